"""SIGINT at random moments of training: the short forms of what `make soak` does 1,000 times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.test_live_kills import outcome_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "tracks"),
    [
        (10, True),
        pytest.param(100, False, marks=pytest.mark.soak),
        pytest.param(100, True, marks=pytest.mark.soak),
    ],
)
def test_a_loop_that_was_interrupted_goes_on_with_the_same_bits(
    count: int, tracks: bool, tmp_path: Path
) -> None:
    arguments = ["--count", str(count), "--seed", "1", *["--tracks"] * tracks]
    outcome = outcome_of("tests.soak.interrupts", arguments, tmp_path)
    assert outcome["interrupts"] == count
    assert outcome["steps"] >= count, outcome
    assert (outcome["different"], outcome["leaked"], outcome["lost"]) == (0, 0, 0), outcome
