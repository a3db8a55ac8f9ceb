"""`memd bench`: figures, and what stands beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from memd.bench.figures import Figure, row
from memd.bench.machine import file_system
from memd.cli import main

# The temporary folder may lie in memory.


def run(*arguments: str, code: int = 0) -> str:
    answer = CliRunner().invoke(main, ["bench", *arguments])
    assert answer.exit_code == code, answer.output
    return answer.output


def test_a_figure_is_judged_by_neighbours_not_by_medians() -> None:
    # The disk was slow in the second half, for both.
    figure = Figure(
        name="read",
        unit="GB/s",
        runs=[2.0, 2.0, 1.0, 0.9, 0.9],
        limit_name="raw",
        limit_runs=[2.0, 2.0, 2.0, 1.0, 1.0],
    )
    assert figure.value == 1.0
    assert figure.limit == 2.0
    assert figure.fraction == 0.9
    assert row(figure) == ("read", "1.00 GB/s", "0.90 to 2.00", "2.00 (raw)", "0.900")


def test_a_figure_without_a_limit_says_why() -> None:
    figure = Figure(name="read", unit="GB/s", runs=[1.0], limit_name="raw", no_limit="forbidden")
    assert figure.fraction is None
    assert row(figure)[-2:] == ("-", "no limit: forbidden")


def test_a_time_reaches_its_limit_from_above() -> None:
    figure = Figure(
        name="step",
        unit="s",
        runs=[1.0, 2.0, 2.5],
        limit_name="roofline",
        limit_runs=[0.5, 1.0, 2.0],
        less_is_better=True,
    )
    assert figure.fraction == 0.5
    assert figure.record()["deviation"] == 0.5
    assert (figure.record()["minimum"], figure.record()["maximum"]) == (1.0, 2.5)


def test_bytes_are_shown_as_people_read_them() -> None:
    figure = Figure(name="memory", unit="bytes", runs=[3 << 30, 1 << 20, 2 << 20])
    assert row(figure) == ("memory", "2 MiB", "1 MiB to 3 GiB", "-", "-")


def test_adam_has_a_row_for_every_combination() -> None:
    arguments = ("adam", "--elements", "100K", "--rounds", "2", "--tensors", "1", "--tensors", "3")
    told = json.loads(run(*arguments, "--threads", "1", "--json"))
    assert [figure["name"] for figure in told["figures"]] == [
        "adam fp32, 1 tensor, 1 thread",
        "adam fp32, 3 tensors, 1 thread",
        "adam bf16, 1 tensor, 1 thread",
        "adam bf16, 3 tensors, 1 thread",
    ]
    for figure in told["figures"]:
        assert len(figure["runs"]) == len(figure["limit_runs"]) == 2
        assert figure["limit_name"] == "memory traffic"
        assert figure["fraction"] > 0
    assert told["machine"]["cores"] >= 1
    assert told["settings"] == {"elements": 100_000}


def test_hash_stands_beside_reading_with_and_without_wide_instructions() -> None:
    told = json.loads(run("hash", "--size", "2MiB", "--rounds", "2", "--json"))
    assert [figure["limit_name"] for figure in told["figures"]] == ["reading memory"] * 2
    assert told["figures"][-1]["name"] == "checksum, plain"
    for figure in told["figures"]:
        assert len(figure["runs"]) == len(figure["limit_runs"]) == 2
        assert min(figure["runs"]) > 0
    assert told["settings"] == {"bytes": 2 << 20}


def test_io_measures_rate_and_cpu_of_reads_writes_and_both(disk_path: Path) -> None:
    arguments = (
        "io",
        "--data",
        str(disk_path),
        "--size",
        "8MiB",
        "--block",
        "1MiB",
        "--depth",
        "2",
    )
    told = json.loads(run(*arguments, "--seconds", "0.02", "--rounds", "2", "--json"))
    names = [figure["name"] for figure in told["figures"]]
    assert names[::2] == ["read", "write", "mixed"]
    assert all(name.endswith("bytes for CPU time") for name in names[1::2])
    assert all(min(figure["runs"]) > 0 for figure in told["figures"])
    assert told["settings"]["block_bytes"] == 1 << 20
    assert list(disk_path.iterdir()) == []


def test_a_time_is_the_better_the_less_it_is() -> None:
    figure = Figure(
        name="lease",
        unit="us",
        runs=[0.4, 0.2],
        limit_name="atomics",
        limit_runs=[0.1, 0.1],
        less_is_better=True,
    )
    assert figure.fraction == pytest.approx(0.375)
    assert figure.record()["less_is_better"] is True


def test_lease_measures_each_way_beside_its_limit(disk_path: Path) -> None:
    arguments = ("lease", "--data", str(disk_path), "--leases", "200", "--rounds", "2", "--json")
    told = json.loads(run(*arguments))
    assert [figure["name"] for figure in told["figures"]] == [
        f"{name}, {quantile}"
        for name in (
            "lease and release",
            "Session.get, a torch tensor",
            "the same lease by request",
        )
        for quantile in ("p50", "p99")
    ]
    for figure in told["figures"]:
        assert len(figure["runs"]) == len(figure["limit_runs"]) == 2
        assert figure["value"] > 0
        assert figure["limit"] > 0
    assert told["settings"] == {"leases": 200}
    assert list(disk_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("io", "--data", "/nowhere"), "does not exist"),
        (("io", "--size", "5"), "has no unit"),
        (("hash", "--size", "3"), "has no unit"),
        (("adam", "--elements", "none"), "is no count"),
        (("adam", "--elements", "3", "--tensors", "4"), "3 elements make no 4 tensors"),
        (("adam", "--rounds", "0"), "is not in the range"),
    ],
)
def test_wrong_use_says_what_is_wrong(arguments: tuple[str, ...], told: str) -> None:
    assert told in run(*arguments, code=2)


def test_what_the_disk_refuses_is_a_failure_with_its_reason(disk_path: Path) -> None:
    # A file of more than any disk here.
    output = run("io", "--data", str(disk_path), "--size", "1024TiB", code=1)
    assert "reserving" in output
    assert list(disk_path.iterdir()) == []


def test_without_an_accelerator_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, disk_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    told = run("device", "--data", str(disk_path), code=1)
    assert told.startswith("Error: torch finds no accelerator here: install")


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm")) == "tmpfs"
