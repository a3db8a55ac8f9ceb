"""tests/bench/bench_train.py: cases in turn, and what is made of their reports."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_train
from bench_train import Case, cases, figures_of_case, measure
from memd.bench.figures import Figure

if TYPE_CHECKING:
    import pytest


def a_report(step_s: float, bound_s: float, bound: str) -> dict[str, Any]:
    step = Figure(
        name="step",
        unit="s",
        runs=[step_s],
        limit_name=bound,
        limit_runs=[bound_s],
        less_is_better=True,
    )
    return {"settings": {"cache": 0.25}, "figures": [step.record()]}


def test_every_combination_of_the_table_is_a_case() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 9
    assert "cache 1/8, every:10, in backward" in names
    assert names[0] == "resident, none"
    in_backward = [case for case in cases() if "--step-in-backward" in case.arguments]
    assert len(in_backward) == 4


def test_rounds_are_joined_and_the_bounds_of_all_are_named() -> None:
    reports = [a_report(2.0, 1.0, "roofline"), a_report(4.0, 3.0, "backward"), a_report(1.0, 1.0, "roofline")]  # fmt: skip  # noqa: E501
    (step,) = figures_of_case("cache 1/4", reports)
    assert step.name == "cache 1/4: step"
    assert list(step.runs) == [2.0, 4.0, 1.0]
    assert step.limit_name == "roofline or backward"
    assert step.fraction == 0.75


def outcomes(*, seen: list[str], failing: dict[str, str]) -> Any:
    def run(case: Case, arguments: argparse.Namespace) -> subprocess.CompletedProcess[str]:
        seen.append(case.name)
        said = failing.get(case.name, "")
        return subprocess.CompletedProcess(
            [], int(bool(said)), json.dumps(a_report(1.0, 1.0, "roofline")), said
        )

    return run


CASES = [Case(name=name, arguments=()) for name in ("a", "b", "c")]


def test_rounds_begin_with_another_case_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(bench_train, "run_case", outcomes(seen=seen, failing={}))
    outcome = measure(argparse.Namespace(rounds=3, seconds_max=60.0), CASES)
    assert seen == [*"abc", *"bca", *"cab"]
    assert outcome.rounds == 3
    assert [len(reports) for reports in outcome.reports.values()] == [3, 3, 3]


def test_what_fails_is_not_run_again_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    failing = {"a": "Error: comes in a later version", "b": "Error: no room"}
    monkeypatch.setattr(bench_train, "run_case", outcomes(seen=seen, failing=failing))
    outcome = measure(argparse.Namespace(rounds=2, seconds_max=60.0), CASES)
    assert seen == ["a", "b", "c", "c"]
    assert outcome.failed == failing


def test_no_round_begins_that_would_pass_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train, "run_case", outcomes(seen=[], failing={}))
    outcome = measure(argparse.Namespace(rounds=5, seconds_max=0.0), CASES)
    assert outcome.rounds == 1


def test_an_unknown_case_is_refused() -> None:
    command = [sys.executable, str(Path(bench_train.__file__)), "--only", "cache 1/3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "resident, none" in done.stderr
