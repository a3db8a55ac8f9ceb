"""kill -9 at random moments of live training: the short form of what `make soak` does at length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]


def outcome_of(program: str, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """These programs fork, which a process with gRPC's threads must not."""
    report = folder / "report.json"
    command = [sys.executable, "-m", program, *arguments, "--json", str(report)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert report.exists(), answer.stderr
    outcome: dict[str, Any] = json.loads(report.read_text())
    return outcome


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "dtype", "durability", "memory", "early", "count"),
    [
        ("daemon", "fp32", "step", "resident", False, 5),
        soak("daemon", "bf16", "step", "short", False, 5),
        soak("daemon", "fp32", "every:3", "short", False, 4),
        soak("daemon", "bf16", "none", "resident", False, 4),
        ("trainer", "fp32", "step", "short", False, 5),
        soak("trainer", "bf16", "step", "resident", False, 5),
        ("both", "fp32", "step", "short", False, 5),
        soak("both", "bf16", "step", "resident", False, 5),
        soak("both", "fp32", "every:3", "resident", False, 4),
        soak("daemon", "fp32", "step", "short", True, 5),
        ("daemon", "bf16", "every:3", "short", True, 4),
        soak("trainer", "bf16", "step", "resident", True, 5),
        ("both", "fp32", "none", "short", True, 4),
    ],
)
def test_a_training_that_is_killed_has_the_bits_of_an_undisturbed_one(
    what: str, dtype: str, durability: str, memory: str, early: bool, count: int, tmp_path: Path
) -> None:
    arguments = ["--what", what, "--dtype", dtype, "--durability", durability]
    arguments += ["--memory", memory, "--count", str(count), "--seed", "1"]
    arguments += ["--early"] * early
    outcome = outcome_of("tests.soak.live_kills", arguments, tmp_path)
    assert outcome["kills"] == count
    assert outcome["steps"] >= count // 2, outcome
    assert outcome["losses_different"] == 0, outcome
    assert not outcome["state_different"], outcome
    assert outcome["sessions_fenced"] == 0, outcome


def test_killed_clients_leave_no_lease_session_or_descriptor(tmp_path: Path) -> None:
    outcome = outcome_of("tests.soak.lease_kills", ["--count", "30"], tmp_path)
    assert outcome["clients_killed"] == 30
    assert outcome["leases_held_min"] > 0
    assert outcome["freed_seconds_p99"] < 5, "a bound against hangs; bench_reclaim.py measures"
    for leaked in ("descriptors_leaked", "host_bytes_leaked", "sessions_left", "leases_left"):
        assert outcome[leaked] == 0, outcome
    assert outcome["steps_committed"] == 0
