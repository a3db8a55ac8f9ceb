"""Threads evaluate while another trains: the short form of what `make soak` does for a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.test_live_kills import outcome_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "threads"),
    [pytest.param("resident", 3, marks=pytest.mark.soak), ("short", 4)],
)
def test_threads_that_evaluate_while_one_trains_see_values_that_existed(
    memory: str, threads: int, tmp_path: Path
) -> None:
    """In a process of its own, since torch aborts it when threads swap memory under a kernel."""
    arguments = ["--seconds", "2", "--threads", str(threads), "--memory", memory, "--seed", "1"]
    outcome = outcome_of("tests.soak.evaluations", arguments, tmp_path)
    assert outcome["evaluations"] >= threads, outcome
    assert outcome["steps"] > 0, outcome
    assert (outcome["wrong"], outcome["failed"]) == (0, 0), outcome
