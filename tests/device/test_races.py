"""Each kind of missing wait raises under every seed; with the check off, its data goes wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.schemes import MISTAKES, ONES, Mistake
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from torch import Tensor

SEEDS = 200
RESULT = ONES * 2


def outcomes(mistake: Mistake) -> list[Tensor]:
    """The results under all seeds, without the check."""
    found = []
    with SIM.unchecked():
        for seed in range(SEEDS):
            SIM.seed(seed)
            found.append(mistake.wrong())
            torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_missing_wait_raises_under_every_seed(mistake: Mistake) -> None:
    for seed in range(SEEDS):
        SIM.seed(seed)
        with pytest.raises(RuntimeError, match=r"race: .* and nothing orders the two"):
            mistake.wrong()


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_same_scheme_with_its_wait_is_right_under_every_seed(mistake: Mistake) -> None:
    for seed in range(SEEDS):
        SIM.seed(seed)
        assert torch.equal(mistake.scheme(), RESULT)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_without_the_check_a_missing_wait_makes_data_wrong_under_some_seeds(
    mistake: Mistake,
) -> None:
    """So what raises is a real race, and tasks really run late."""
    wrong = sum(not torch.equal(result, RESULT) for result in outcomes(mistake))
    assert 0 < wrong < SEEDS


def test_a_race_names_both_uses_and_their_streams() -> None:
    numbers = torch.ones(8, device="sim")
    message = (
        "race: aten::mul (stream 1 of sim:0) reads bytes that aten::fill_ (stream 0 of sim:0) "
        "writes, and nothing orders the two"
    )
    with torch.Stream(device="sim"), pytest.raises(RuntimeError, match=re.escape(message)):
        numbers * 2


def test_two_streams_may_read_the_same_bytes_at_once() -> None:
    numbers, ready = torch.ones(8, device="sim"), torch.Event(device="sim")
    sides = [torch.Stream(device="sim") for _ in range(2)]
    ready.record()
    results = []
    for side in sides:
        side.wait_event(ready)
        with side:
            results.append(numbers + 1)
        numbers.record_stream(side)
    for side in sides:
        side.synchronize()
    assert [result.tolist() for result in results] == [[2.0] * 8] * 2


def test_parts_of_one_allocation_do_not_race() -> None:
    whole, ready = torch.ones(8, device="sim"), torch.Event(device="sim")
    ready.record()
    side = torch.Stream(device="sim")
    side.wait_event(ready)
    whole[:4].fill_(2)
    with side:
        whole[4:].fill_(3)
    side.synchronize()
    assert whole.tolist() == [2.0] * 4 + [3.0] * 4


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_a_stream_still_uses_is_taken_back_before_a_refusal(seed: int) -> None:
    """The allocator waits for the stream; the program has not."""
    SIM.seed(seed)
    side, made = torch.Stream(device="sim"), torch.Event(device="sim")
    count = 1280  # of one segment
    host = torch.zeros(count).pin_memory()
    torch.accelerator.empty_cache()
    with SIM.limit(torch.accelerator.memory_reserved() + 4 * count):
        first = torch.ones(count, device="sim")
        made.record()
        side.wait_event(made)
        with side:
            host.copy_(first, non_blocking=True)
        first.record_stream(side)
        del first
        assert torch.full((count,), 2.0, device="sim").tolist() == [2.0] * count
        with pytest.raises(RuntimeError, match="race: the host"):
            SIM.host_touches(host, writes=False)
    assert host.tolist() == [1.0] * count


@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_waited_orders_what_it_queues_next(seed: int) -> None:
    SIM.seed(seed)
    side = torch.Stream(device="sim")
    with side:
        there = ONES.pin_memory().to("sim", non_blocking=True)
    side.synchronize()
    assert torch.equal((there + there).cpu(), RESULT)


@pytest.mark.parametrize("seed", range(20))
def test_an_event_that_was_seen_to_be_over_orders_the_host(seed: int) -> None:
    SIM.seed(seed)
    host, copied = torch.zeros(len(ONES)).pin_memory(), torch.Event(device="sim")
    host.copy_(ONES.to("sim"), non_blocking=True)
    copied.record()
    while not copied.query():
        pass
    SIM.host_touches(host, writes=True)
    assert torch.equal(host, ONES)
