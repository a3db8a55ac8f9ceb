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
