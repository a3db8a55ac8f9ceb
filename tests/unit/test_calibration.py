"""What a path is given at a time: how it is chosen, kept and found again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from memd import calibration
from memd.calibration import Calibration, Limits, Point, best, keep, limits_in_use, read
from memd.cli import main
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# The temporary folder may lie in memory.
KIB, MIB = 1 << 10, 1 << 20


class Clock:
    """In place of the module `time`. Each look takes as long as the last, however fast the disk
    is."""

    def __init__(self, *, tick_s: float) -> None:
        self._tick_s = tick_s
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


def point(depth: int, chunk_bytes: int, *fractions: float) -> Point:
    by_mix = dict(zip(calibration.MIXES, fractions, strict=True))
    return Point(
        limits=Limits(depth=depth, chunk_bytes=chunk_bytes), rates=by_mix, fractions=by_mix
    )


def test_the_least_in_flight_that_keeps_the_path_busy_is_best() -> None:
    points = [
        point(1, MIB, 0.5, 0.9, 0.6),
        point(4, MIB, 0.97, 1.1, 0.98),
        point(16, MIB, 1.0, 1.0, 1.0),
        point(8, 256 * KIB, 1.0, 1.0, 0.8),  # mixed is too slow
    ]
    assert best(points) == Limits(depth=4, chunk_bytes=MIB)


def test_of_equals_the_larger_chunks_are_best() -> None:
    points = [point(8, 512 * KIB, 1.0, 1.0, 1.0), point(4, MIB, 1.0, 1.0, 1.0)]
    assert best(points) == Limits(depth=4, chunk_bytes=MIB)
    assert best(reversed(points)) == Limits(depth=4, chunk_bytes=MIB)


def test_where_nothing_is_fast_enough_the_fastest_counts() -> None:
    points = [point(1, MIB, 0.2, 0.2, 0.2), point(32, MIB, 0.9, 1.0, 0.85)]
    assert best(points) == Limits(depth=32, chunk_bytes=MIB)


def test_a_busy_drive_is_not_calibrated() -> None:
    with pytest.raises(Refused, match="too busy to be measured"):
        best([point(1, MIB, 0.5, 1.4, 1.0), point(32, MIB, 1.0, 1.0, 0.6)])


def test_what_was_kept_is_found_again_and_replaced(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    for depth in (4, 7):
        limits = Limits(depth=depth, chunk_bytes=512 * KIB)
        kept = keep(tmp_path, Calibration(limits=limits, seconds=1, points=[]))
        assert read(tmp_path) == limits
        assert limits_in_use(tmp_path, depth=0) == (limits, str(kept))
    assert [path.name for path in tmp_path.iterdir()] == ["memd.calibration"]


def test_the_setting_beats_what_was_calibrated(tmp_path: Path) -> None:
    assert limits_in_use(tmp_path, depth=0) == (Limits(), "default")
    assert limits_in_use(tmp_path, depth=9) == (Limits(depth=9), "io_depth")
    kept = keep(
        tmp_path,
        Calibration(limits=Limits(depth=4, chunk_bytes=MIB), seconds=1),
    )
    expected = (Limits(depth=9, chunk_bytes=MIB), f"io_depth, {kept}")
    assert limits_in_use(tmp_path, depth=9) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"version": 1, "depth": 8, "chu', "Unterminated string"),
        ("\xff\xfe", "codec"),
        ("[1]", "not of version 1"),
        ('{"version": 2, "depth": 8, "chunk_bytes": 1048576}', "not of version 1"),
        ('{"version": 1, "depth": 0, "chunk_bytes": 1048576}', "its depth is not 1 to 1024: 0"),
        ('{"version": 1, "depth": true, "chunk_bytes": 1048576}', "its depth is not"),
        ('{"version": 1, "depth": 8}', "its chunk_bytes are not"),
        ('{"version": 1, "depth": 8, "chunk_bytes": 1048577}', "its chunk_bytes are not"),
        ('{"version": 1, "depth": 8, "chunk_bytes": 8388608}', "its chunk_bytes are not"),
    ],
)
def test_a_damaged_or_unknown_file_is_logged_and_as_good_as_none(
    text: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memd.calibration").write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert limits_in_use(tmp_path, depth=0) == (Limits(), "default")
    (record,) = caplog.records
    assert "measure anew with `memd bench io --calibrate`" in record.getMessage()
    assert reason in vars(record)["reason"]


def test_a_folder_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "memd.calibration").mkdir()
    with pytest.raises(Refused, match=r"memd\.calibration cannot be written: Is a directory"):
        keep(tmp_path, Calibration(limits=Limits(), seconds=1))
    assert [path.name for path in tmp_path.iterdir()] == ["memd.calibration"]


def test_what_a_first_start_measured_is_kept_when_its_volume_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Calibration(limits=Limits(depth=6, chunk_bytes=MIB), seconds=1)

    def measured(folder: Path, *, seconds: float) -> Calibration:
        assert seconds == calibration.QUICK_S
        if folder.name == "busy":
            raise Refused(StatusCode.UNAVAILABLE, "the drive is too busy")
        return found

    monkeypatch.setattr(calibration, "measure", measured)
    monkeypatch.setattr(calibration, "drive_bytes", lambda folder: 0)
    monkeypatch.setattr(calibration, "worth_measuring", lambda folder, volume_bytes: True)
    folders = [tmp_path / "free", tmp_path / "busy"]
    for folder in folders:
        folder.mkdir()
    with caplog.at_level(logging.WARNING):
        by_folder = calibration.measure_for_new_volumes(folders, volume_bytes=8 << 30)
    assert by_folder == {folders[0]: found}
    assert "the drive is too busy" in vars(caplog.records[-1])["reason"]
    assert read(folders[0]) is None
    calibration.keep_all(by_folder)
    assert read(folders[0]) == found.limits
    assert read(folders[1]) is None


def test_a_first_start_measures_only_beside_a_volume_that_takes_longer(tmp_path: Path) -> None:
    large = 8 << 30
    assert calibration.worth_measuring(tmp_path, volume_bytes=large)
    assert not calibration.worth_measuring(tmp_path, volume_bytes=large - 1)
    assert not calibration.worth_measuring(tmp_path, volume_bytes=large << 30)  # no room for it
    assert not calibration.worth_measuring(tmp_path / "none", volume_bytes=large)
    (tmp_path / "memd.calibration").touch()
    assert not calibration.worth_measuring(tmp_path, volume_bytes=large)
    (tmp_path / "memd.calibration").unlink()
    (tmp_path / "memd.volume").touch()
    assert not calibration.worth_measuring(tmp_path, volume_bytes=large)


@pytest.mark.more
def test_calibrating_measures_reads_writes_and_both_and_keeps_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, disk_path: Path
) -> None:
    # A small file, for a moment: this is about what is done with it.
    monkeypatch.setattr(calibration, "time", Clock(tick_s=0.4))
    monkeypatch.setattr(calibration, "_FILE_BYTES", 64 * MIB)
    monkeypatch.setattr(calibration, "_RUN_S", 0.001)
    monkeypatch.setattr(calibration, "_TRUSTED", 0.0)  # others may use this disk
    monkeypatch.setattr(calibration, "_OTHERS_MAX", float("inf"))
    monkeypatch.setattr(
        calibration,
        "_candidate_sets",
        lambda: [[Limits(depth=depth, chunk_bytes=MIB) for depth in (1, 4)]],
    )
    kept = disk_path / "memd.calibration"
    answer = CliRunner().invoke(
        main, ["bench", "io", "--calibrate", "--data", str(disk_path), "--json"]
    )
    assert answer.exit_code == 0, answer.output
    told: Mapping[str, object] = json.loads(answer.output)
    assert read(disk_path) in [Limits(depth=depth, chunk_bytes=MIB) for depth in (1, 4)]
    assert told["file"] == str(kept)
    points = json.loads(kept.read_text())["points"]
    assert [each["depth"] for each in points] == [1, 4]
    for each in points:
        assert set(each["gigabytes_per_second"]) == set(calibration.MIXES)
        assert min(each["gigabytes_per_second"].values()) > 0
    assert list(disk_path.iterdir()) == [kept]


def test_a_drive_that_others_use_meanwhile_is_not_calibrated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, disk_path: Path
) -> None:
    # No run moves as much in its millisecond as the other writes.
    one = Limits(depth=1, chunk_bytes=64 * KIB)

    def candidate_sets_while_another_writes() -> list[list[Limits]]:
        another_writes(disk_path / "memd.other")
        return [[one]]

    monkeypatch.setattr(calibration, "time", Clock(tick_s=1.0))
    monkeypatch.setattr(calibration, "QUICK_S", 16.0)  # a whole round, and part of another
    monkeypatch.setattr(calibration, "_FILE_BYTES", 64 * MIB)
    monkeypatch.setattr(calibration, "_RUN_S", 0.001)
    monkeypatch.setattr(calibration, "_TRUSTED", 0.0)
    monkeypatch.setattr(calibration, "_WRITING_PART", float("inf"))
    monkeypatch.setattr(calibration, "_deepest", lambda: one)
    monkeypatch.setattr(calibration, "_candidate_sets", candidate_sets_while_another_writes)
    monkeypatch.setattr(calibration, "worth_measuring", lambda folder, volume_bytes: True)
    if calibration.drive_bytes(disk_path) is None:
        pytest.skip(f"the kernel counts no single drive of {disk_path}")
    with caplog.at_level(logging.WARNING):
        assert calibration.measure_for_new_volumes([disk_path], volume_bytes=8 << 30) == {}
    said = vars(caplog.records[-1])["reason"]
    assert "too busy to be measured: other processes moved " in said
    assert "memd bench io --calibrate" in caplog.records[-1].getMessage()


def test_a_first_start_measures_nothing_where_nothing_counts_the_io_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[Path] = []

    def measure(folder: Path, *, seconds: float) -> Calibration:
        measured.append(folder)
        return Calibration(limits=Limits(), seconds=seconds)

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(
        calibration, "drive_bytes", lambda folder: None if folder.name == "network" else 0
    )
    folders = [tmp_path / "network", tmp_path / "drive"]
    for folder in folders:
        folder.mkdir()
    with caplog.at_level(logging.WARNING):
        by_folder = calibration.measure_for_new_volumes(folders, volume_bytes=8 << 30)
    assert list(by_folder) == measured == [folders[1]]
    (record,) = caplog.records
    assert "measure with `memd bench io --calibrate` when nothing else uses" in record.getMessage()
    assert vars(record)["data"] == str(folders[0])
    assert "nothing tells whether others use it" in vars(record)["reason"]


def test_the_io_of_others_is_that_of_the_whole_drive_and_not_of_a_partition(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    drive, devices = tmp_path / "block/sda", tmp_path / "dev/block"
    devices.mkdir(parents=True)
    assert calibration.drive_bytes(tmp_path, devices=devices) is None
    (drive / "sda1").mkdir(parents=True)
    (drive / "stat").write_text("  10 0 1000 5 20 0 3000 7 0 1 1\n")
    (drive / "sda1/stat").write_text("   1 0    8 5  2 0   16 7 0 1 1\n")
    link = devices / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(drive / "sda1")
    assert calibration.drive_bytes(tmp_path, devices=devices) == 24 * 512
    (drive / "sda1/partition").write_text("1\n")
    assert calibration.drive_bytes(tmp_path, devices=devices) == 4000 * 512


def another_writes(path: Path) -> None:
    """Past the kernel's cache, in a process of its own, as another daemon would."""
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=64", "oflag=direct"]
    subprocess.run([*command, "status=none"], check=True)
    path.unlink()


def test_a_drive_that_is_too_slow_for_the_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, disk_path: Path
) -> None:
    monkeypatch.setattr(calibration, "_FILE_BYTES", 64 * MIB)
    monkeypatch.setattr(calibration, "_WRITING_PART", float("inf"))
    with pytest.raises(Refused, match="too slow to be measured in 0 s: one of"):
        calibration.measure(disk_path, seconds=0.001)
    assert list(disk_path.iterdir()) == []


def test_a_drive_that_would_write_the_file_for_too_long_is_refused_before_it_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[int] = []
    now = [0.0]

    class SlowBench:
        def __init__(self, directory: str, *, bytes: int) -> None:
            written.append(bytes)
            now[0] += bytes / (4 * MIB)  # 4 MiB/s: 64 s for the file

    monkeypatch.setattr("memd_native.IoBench", SlowBench)
    monkeypatch.setattr("memd.calibration.time.monotonic", lambda: now[0])
    with pytest.raises(Refused, match=r"in 15 s: writing the file alone would take 64 s"):
        calibration.measure(tmp_path)
    assert sum(written) <= 4 * MIB
