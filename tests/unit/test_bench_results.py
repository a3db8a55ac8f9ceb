"""What `make bench` says about results: tests/bench/report.py and compare_results.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bench_durability
import bench_io
import compare_results
import run_all
from memd.bench.figures import Figure
from report import byte_count, ratio, seconds, write_report

if TYPE_CHECKING:
    from collections.abc import Sequence

MACHINE = {"cpu": "a", "cores": 2, "load": 0.1}


def a_report(*figures: Figure, **settings: Any) -> dict[str, Any]:
    return {
        "machine": dict(MACHINE),
        "settings": settings,
        "figures": [figure.record() for figure in figures],
    }


def change(committed: Figure, new: Figure) -> compare_results.Change:
    listed, only = compare_results.changes(a_report(committed), a_report(new))
    assert only == []
    (found,) = listed
    return found


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([0.8, 0.7, 0.9], "better"),
        ([1.5, 1.4, 1.6], "worse"),
        ([1.1, 1.3, 1.2], "same"),  # 1.1 overlaps
    ],
)
def test_only_runs_that_do_not_overlap_are_a_change(runs: Sequence[float], verdict: str) -> None:
    found = change(seconds("step", [1.0, 1.1, 1.0]), seconds("step", runs))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(sorted(runs)[1])


def test_more_of_a_rate_is_better() -> None:
    found = change(ratio("faster", [2.0, 2.2], [1.0, 1.0]), ratio("faster", [3.0, 3.3], [1.0, 1.0]))
    assert found.verdict == "better"
    assert found.noise == pytest.approx(0.1 / 2.1)


def limited(runs: Sequence[float], limits: Sequence[float]) -> Figure:
    return Figure(
        name="step",
        unit="s",
        runs=runs,
        limit_name="roofline",
        limit_runs=limits,
        less_is_better=True,
    )


def test_a_slower_disk_is_not_a_change_where_its_limit_was_measured_too() -> None:
    found = change(limited([1.0, 1.0], [0.9, 0.8]), limited([2.0, 2.0], [1.8, 1.6]))
    assert found.of_limit
    assert found.ratio == 1.0
    assert found.verdict == "same"


def test_a_time_farther_from_its_limit_is_worse() -> None:
    found = change(limited([1.0, 1.0], [0.9, 0.8]), limited([2.0, 2.0], [0.9, 0.8]))
    assert found.ratio == 0.5
    assert found.verdict == "worse"


def test_one_run_is_no_verdict() -> None:
    assert change(seconds("step", [1.0]), seconds("step", [9.0])).verdict == "one run"


def test_figures_that_cannot_be_compared_are_named_or_left_out() -> None:
    listed, only = compare_results.changes(
        a_report(seconds("gone", [1.0]), seconds("none", [0.0]), seconds("step", [1.0])),
        a_report(seconds("new", [1.0]), seconds("none", [1.0]), limited([1.0], [1.0])),
    )
    assert listed == []
    assert only == ["new: new", "gone: no longer measured"]


def test_another_machine_other_settings_and_a_busy_one_are_said() -> None:
    committed, new = a_report(params=1), a_report(params=2)
    new["machine"].update(cores=8, load=3.0)
    assert compare_results.differences(committed, new) == [
        "cores: committed 2, now 8",
        "setting params: committed 1, now 2",
        "now: measured on a busy machine, with a load of 3.0 before it",
    ]


def test_every_measuring_program_is_run_and_has_a_name_of_its_own() -> None:
    listed = run_all.programs()
    assert {path.stem for path in run_all.HERE.glob("bench_*.py")} <= listed.keys()
    assert listed["memd_bench_lease"][3:5] == ["bench", "lease"]
    files = [command[-1] for name, command in listed.items() if name.startswith("bench_")]
    assert len(set(files)) == len(files)


def test_what_was_written_is_compared_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    for folder, values in ((results, [1.0, 1.1, 1.2]), (out, [2.0, 2.2, 2.4])):
        folder.mkdir()
        write_report(
            folder / "bench_step.json",
            name="bench_step",
            machine=MACHINE,
            settings={},
            figures=[seconds("step", values), byte_count("read", [5.0, 5.0, 5.0])],
            details={"more": 1},
        )
    write_report(out / "bench_new.json", name="bench_new", machine={}, settings={}, figures=[])
    assert "1.10 s" in capsys.readouterr().out
    program = Path(compare_results.__file__)
    command = [sys.executable, str(program), "--results", str(results), "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "no committed result to compare with" in shown
    told = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    )
    step, read = told["bench_step"]["changes"]
    assert (step["figure"], step["verdict"], step["ratio"]) == ("step", "worse", 2.0)
    assert (read["verdict"], read["ratio"], read["noise"]) == ("same", 1.0, 0.0)


@pytest.mark.parametrize(
    ("now", "limits", "exit_code"),
    [
        ([1.18, 1.17, 1.19], [1.0, 1.0, 1.0], 1),
        ([1.07, 1.06, 1.08], [1.0, 1.0, 1.0], 0),  # worse, by less than 5 %
        ([1.4, 1.6, 1.03], [1.0, 1.0, 1.0], 0),  # runs overlap
        ([2.0, 2.1, 2.05], [1.95, 2.03, 2.0], 0),  # slower, and so is the limit
    ],
)
def test_make_bench_fails_where_a_fraction_of_a_limit_falls(
    tmp_path: Path, now: list[float], limits: list[float], exit_code: int
) -> None:
    folders = {"results": ([1.03, 1.02, 1.04], [1.0, 1.0, 1.0]), "out": (now, limits)}
    for folder, (runs, limit_runs) in folders.items():
        (tmp_path / folder).mkdir()
        write_report(
            tmp_path / folder / "bench_train.json",
            name="bench_train",
            machine=MACHINE,
            settings={},
            figures=[limited(runs, limit_runs)],
        )
    command = [sys.executable, str(Path(compare_results.__file__))]
    command += ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stdout
    assert ("step is 13% farther from its limit" in done.stderr) == (exit_code == 1), done.stderr


def test_the_bound_on_durability_is_made_of_neighbours() -> None:
    def runs(seconds_each: float, written_bytes: int) -> dict[str, Any]:
        return {"seconds": seconds_each, "written_bytes": written_bytes, "parameters": 10}

    durable, in_memory, written, _ = bench_durability.compare(
        "quarter",
        {"step": [runs(2.3, 120), runs(4.6, 120)], "none": [runs(1.0, 20), runs(2.0, 20)]},
        [100.0, 50.0],
    )
    # 1.15 × (1.0 s + 100 bytes / 100 a second), and twice that in the round that was slow.
    assert durable.limit_runs == pytest.approx([2.3, 4.6])
    assert durable.fraction == pytest.approx(1.0)
    assert in_memory.value == 1.5
    assert written.fraction == 1.0


def test_a_comparison_with_fio_says_how_long_it_takes() -> None:
    # 1 GB to fill at 500 MB/s; 2 blocks, 2 mixes, 2 kinds of pages, 5 rounds, each with two runs.
    shared = {"size": 10**9, "block_count": 2, "rounds": 5}
    assert bench_io.expected_seconds(seconds=0.5, **shared) == pytest.approx(62)
    assert bench_io.expected_seconds(seconds=1.0, **shared) == pytest.approx(102)


def test_nothing_to_compare_with_is_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(bench_io.__file__))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 1
    assert "apt-get install fio" in done.stderr
