"""The least time of a step, from parts measured alone: memd/bench/roofline.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memd.bench.roofline import PartsAlone, StepMeasured, roofline, step_bound
from memd.bench.train import steps_for

STEP = StepMeasured(seconds=10.0, read_bytes=80.0, written_bytes=120.0)
# 6 s of CPU work; 200 bytes at 100 a second are 2 s.
PARTS = PartsAlone(
    compute_seconds=4.0,
    adam_seconds=1.0,
    hash_seconds=0.5,
    io_seconds=0.5,
    backward_seconds=1.5,
    bytes_per_second=100.0,
)


@pytest.mark.parametrize(
    ("core_count", "name", "seconds"),
    [
        (2, "roofline: CPU work / cores", 3.0),
        (4, "roofline: bytes / bandwidth", 2.0),
    ],
)
def test_the_roofline_is_the_larger_of_work_and_bytes(
    core_count: int, name: str, seconds: float
) -> None:
    bound = roofline(STEP, PARTS, core_count=core_count)
    assert (bound.name, bound.seconds) == (name, seconds)


def test_a_step_that_moves_nothing_stands_against_its_work() -> None:
    resident = StepMeasured(seconds=10.0, read_bytes=0.0, written_bytes=0.0)
    assert resident.write_share == 0.5
    bound = roofline(resident, replace(PARTS, bytes_per_second=1e-9), core_count=2)
    assert bound.name == "roofline: CPU work / cores"


def test_half_of_what_is_moved_is_not_always_written() -> None:
    assert STEP.write_share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("state_bytes", "in_backward", "name", "seconds"),
    [
        # 1.5 s of backward, and 2 × 90 bytes at 100 a second.
        (100, False, "backward + 2 (state - cache) / bandwidth", 3.3),
        (100, True, "roofline: CPU work / cores", 3.0),
        (50, False, "roofline: CPU work / cores", 3.0),  # 2.3 s is less
        (10, False, "roofline: CPU work / cores", 3.0),  # all is cached
        (5, False, "roofline: CPU work / cores", 3.0),
    ],
)
def test_an_ordinary_step_cannot_begin_its_update_before_backward_ends(
    state_bytes: int, in_backward: bool, name: str, seconds: float
) -> None:
    bound = step_bound(
        STEP,
        PARTS,
        core_count=2,
        state_bytes=state_bytes,
        cache_bytes=10,
        in_backward=in_backward,
    )
    assert bound.name == name
    assert bound.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("durability", "step_count"), [("step", 4), ("none", 4), ("every:3", 4), ("every:10", 10)]
)
def test_a_round_has_a_step_that_goes_to_disk(durability: str, step_count: int) -> None:
    assert steps_for(durability) == step_count
