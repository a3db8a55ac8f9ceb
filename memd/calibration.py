"""How much a path is given at a time: measured, kept beside its volume, used at the next start.

A demanded read waits behind everything that is in flight. So the best depth and chunk size are the
smallest that keep the path busy, and those are a property of the drive.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memd.refusal import Refused, StatusCode
from memd.sizes import exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memd_native import IoBench

log = logging.getLogger(__name__)

FILE_NAME = "memd.calibration"
VERSION = 1
DEPTH_MAX = 1024
_CHUNK_BYTES = (64 << 10, 4 << 20)  # least and most
_BLOCK_BYTES = 4096
_MIB = 1 << 20

MIXES = ("read", "write", "mixed")
# Part of the deepest point's rate that is enough: more in flight adds less than the wait behind it
# costs.
_ENOUGH = 0.95
# The deepest point is among them or near to one that is. If not even the best comes near it, they
# measured other users of the drive.
_TRUSTED = 0.8
_FILE_BYTES = 256 * _MIB
# Written first: how long the whole file takes, without having to wait for it.
_PROBE_BYTES = 4 * _MIB
# Bytes that other processes moved, as a part of ours, up to which the drive was ours. The file
# system's own are below that.
_OTHERS_MAX = 0.1
_SECTOR_BYTES = 512  # the kernel's unit, whatever the drive's
# A part of the time for all; the rest is for measuring.
_WRITING_PART = 0.5
# Seconds of one measurement: some 50 MiB on a drive of 2 GB/s.
_RUN_S = 0.025
# For a first start, which makes its volumes meanwhile: see worth_measuring().
QUICK_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Chunks in flight on a path at most, and the bytes of each."""

    depth: int = 32
    chunk_bytes: int = 1 << 20

    def __str__(self) -> str:
        return f"depth {self.depth}, chunks of {exact_size(self.chunk_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Limits and the rate at which they were measured, in GB/s by mix, and as a fraction of the
    deepest point's."""

    limits: Limits
    rates: dict[str, float]
    fractions: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    limits: Limits
    seconds: float
    points: Sequence[Point] = ()


def limits_in_use(folder: Path, *, depth: int) -> tuple[Limits, str]:
    """Limits of the path that `folder` lies on, and their origin. `depth` is the setting; 0 takes
    the calibrated one. A file that cannot be used is logged, and as good as none."""
    limits, origin = Limits(), "default"
    try:
        kept = read(folder)
    except ValueError as error:
        log.warning(
            "a calibration is not used; measure anew with `memd bench io --calibrate`",
            extra={"path": str(folder / FILE_NAME), "reason": str(error)},
        )
        kept = None
    if kept is not None:
        limits, origin = kept, str(folder / FILE_NAME)
    if depth:
        limits = Limits(depth=depth, chunk_bytes=limits.chunk_bytes)
        origin = "io_depth" if kept is None else f"io_depth, {origin}"
    return limits, origin


def read(folder: Path) -> Limits | None:
    """The kept calibration; None if there is none. ValueError says why it cannot be used."""
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    table = json.loads(text)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    depth, chunk_bytes = table.get("depth"), table.get("chunk_bytes")
    if type(depth) is not int or not 1 <= depth <= DEPTH_MAX:
        raise ValueError(f"its depth is not 1 to {DEPTH_MAX}: {depth!r}")
    least, most = _CHUNK_BYTES
    if (
        type(chunk_bytes) is not int
        or not least <= chunk_bytes <= most
        or chunk_bytes % _BLOCK_BYTES
    ):
        raise ValueError(f"its chunk_bytes are not {least} to {most} in blocks: {chunk_bytes!r}")
    return Limits(depth=depth, chunk_bytes=chunk_bytes)


def keep(folder: Path, calibration: Calibration) -> Path:
    """Replaces what was kept, whole or not at all."""
    path = folder / FILE_NAME
    record = {"version": VERSION, **asdict(calibration.limits), "seconds": calibration.seconds}
    record["points"] = [
        {**asdict(point.limits), "gigabytes_per_second": point.rates, "fractions": point.fractions}
        for point in calibration.points
    ]
    unfinished = path.with_name(f"{FILE_NAME}.unfinished")
    try:
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise Refused(
            StatusCode.DEVICE, f"{path} cannot be written: {error.strerror or error}"
        ) from error
    return path


def worth_measuring(folder: Path, *, volume_bytes: int) -> bool:
    """At a first start, whose volume is about to be written in full: where that takes as long as
    the measurement, some seconds more are not noticed. No later start measures."""
    try:
        if (folder / "memd.volume").exists() or (folder / FILE_NAME).exists():
            return False
        return volume_bytes >= 8 << 30 and shutil.disk_usage(folder).free >= volume_bytes
    except OSError:  # the start says what is wrong with it
        return False


def measure_for_new_volumes(
    folders: Iterable[Path], *, volume_bytes: int
) -> dict[Path, Calibration]:
    """Calibrates the folders where it is worth it; the results are kept when the volumes are made.
    No start fails here: an obstacle to a measurement is one to the volume too, and is explained
    better there. Nothing is measured where the I/O of others cannot be counted: what a busy first
    start finds would be kept for as long as the volume is, and no later start measures."""
    from memd_native import StatusError

    measured = {}
    for folder in folders:
        if not worth_measuring(folder, volume_bytes=volume_bytes):
            continue
        if drive_bytes(folder) is None:
            log.warning(
                "not calibrated; measure with `memd bench io --calibrate` when nothing else uses "
                "the drive",
                extra={
                    "data": str(folder),
                    "reason": "the kernel counts no drive of its file system alone, so that "
                    "nothing tells whether others use it",
                },
            )
            continue
        log.info("calibrating", extra={"data": str(folder)})
        try:
            measured[folder] = measure(folder, seconds=QUICK_S)
        except (StatusError, Refused) as error:
            log.warning(
                "not calibrated; measure with `memd bench io --calibrate`",
                extra={"data": str(folder), "reason": str(error)},
            )
    return measured


def keep_all(measured: Mapping[Path, Calibration]) -> None:
    """Says so where it fails: the next start does without."""
    for folder, found in measured.items():
        try:
            keep(folder, found)
        except Refused as refused:
            log.warning(
                "a calibration is not kept", extra={"data": str(folder), "reason": str(refused)}
            )


def measure(
    folder: Path,
    *,
    seconds: float = 15.0,
    progress: Callable[[int, int], None] = lambda done, of_all: None,
) -> Calibration:
    """Finds the smallest limits that keep the path of `folder` busy, within about `seconds`, on a
    file of random bytes that is removed. StatusError where there is no room, Refused where the
    drive is too slow for the time it is given, or too busy."""
    from memd_native import IoBench  # who only reads what was kept needs none

    began = time.monotonic()
    IoBench(str(folder), bytes=_PROBE_BYTES)  # written in full, and removed
    writing_s = (time.monotonic() - began) * _FILE_BYTES / _PROBE_BYTES
    if writing_s > _WRITING_PART * seconds:
        raise Refused(
            StatusCode.UNAVAILABLE,
            f"{folder} is too slow to be measured in {seconds:.0f} s: writing the file alone would "
            f"take {writing_s:.0f} s",
        )
    drive = _Drive(IoBench(str(folder), bytes=_FILE_BYTES), folder)
    # With the kernel's and the drive's own caches warm, as during a training.
    drive.rate("read", _deepest())
    run_began = time.monotonic()
    drive.rate("read", _deepest())
    run_s = time.monotonic() - run_began
    left_s = seconds - (time.monotonic() - began)
    candidates = next(
        (
            points
            for points in _candidate_sets()
            if len(points) * len(MIXES) * 2 * run_s * _ROUNDS_LEAST <= left_s
        ),
        None,
    )
    if candidates is None:
        raise Refused(
            StatusCode.UNAVAILABLE,
            f"{folder} is too slow to be measured in {seconds:.0f} s: one of "
            f"{len(_candidate_sets()[-1]) * len(MIXES) * 2 * _ROUNDS_LEAST} runs takes "
            f"{run_s:.2f} s",
        )
    rates, fractions = _measured(drive, candidates, end=began + seconds, progress=progress)
    drive.check_that_it_was_ours()
    points = [
        Point(
            limits=limits,
            rates={mix: statistics.median(rates[limits, mix]) for mix in MIXES},
            fractions={mix: statistics.median(fractions[limits, mix]) for mix in MIXES},
        )
        for limits in candidates
    ]
    return Calibration(limits=best(points), seconds=time.monotonic() - began, points=points)


def best(points: Iterable[Point]) -> Limits:
    """The least in flight that is fast enough in every mix; of equals, the larger chunks, which
    take less of the processor. Refused where no figure can be trusted."""
    worst = {point.limits: min(point.fractions.values()) for point in points}
    if max(worst.values()) < _TRUSTED:
        raise Refused(
            StatusCode.UNAVAILABLE,
            "the drive is too busy to be measured: its rates vary more than they depend on depth; "
            "calibrate when nothing else uses it",
        )
    enough = _ENOUGH * min(1.0, max(worst.values()))
    return min(
        (limits for limits, fraction in worst.items() if fraction >= enough),
        key=lambda limits: (limits.depth * limits.chunk_bytes, -limits.chunk_bytes),
    )


_ROUNDS_LEAST = 2


def _deepest() -> Limits:
    return Limits(depth=32, chunk_bytes=_MIB)


def _candidate_sets() -> list[list[Limits]]:
    """From the thorough one to what a slow drive has time for. No chunk above 1 MiB: the server
    thread takes 30 µs to give that to the kernel, and all jobs wait meanwhile."""

    def all_of(chunks: Sequence[int], in_flight_mib: Sequence[int]) -> list[Limits]:
        return [
            Limits(depth=mib * _MIB // chunk, chunk_bytes=chunk)
            for chunk in chunks
            for mib in in_flight_mib
            if 1 <= mib * _MIB // chunk <= 64
        ]

    return [
        all_of((256 << 10, 512 << 10, _MIB), (1, 2, 4, 8, 16, 32)),
        all_of((512 << 10, _MIB), (1, 2, 4, 8, 16, 32)),
        all_of((_MIB,), (1, 2, 4, 8, 16, 32)),
        all_of((_MIB,), (2, 8, 32)),
    ]


def _measured(
    drive: _Drive,
    candidates: Sequence[Limits],
    *,
    end: float,
    progress: Callable[[int, int], None],
) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
    """Rates of the rounds that are whole at `end`, and what they are of the deepest point's. That
    is measured before each: a drive that is slow for a second is slow for both."""
    rates: dict[Any, list[float]] = {(each, mix): [] for each in candidates for mix in MIXES}
    fractions: dict[Any, list[float]] = {key: [] for key in rates}
    began = time.monotonic()
    round_count = 0
    while time.monotonic() < end:
        for limits, mix in rates:
            deepest = drive.rate(mix, _deepest())
            rate = drive.rate(mix, limits)
            rates[limits, mix].append(rate)
            fractions[limits, mix].append(rate / deepest)
            progress(int((time.monotonic() - began) * 1000), int((end - began) * 1000))
            if time.monotonic() >= end:
                break
        else:
            round_count += 1
    if round_count == 0:
        raise Refused(StatusCode.UNAVAILABLE, f"{drive.path}: not all was measured in time")
    return (
        {key: runs[:round_count] for key, runs in rates.items()},
        {key: runs[:round_count] for key, runs in fractions.items()},
    )


class _Drive:
    """Runs on a file below `folder`, and what others do to its drive meanwhile."""

    def __init__(self, bench: IoBench, folder: Path) -> None:
        self.path: str = bench.path
        self._bench = bench
        self._folder = folder
        self._moved_bytes = 0
        self._all_bytes_before = drive_bytes(folder)

    def rate(self, mix: str, limits: Limits) -> float:
        """GB/s."""
        done = self._bench.through_queue(
            mix, block_bytes=limits.chunk_bytes, depth=limits.depth, seconds=_RUN_S
        )
        moved_bytes = done.read_bytes + done.written_bytes
        self._moved_bytes += moved_bytes
        return float(moved_bytes) / 1e9 / float(done.seconds)

    def check_that_it_was_ours(self) -> None:
        """Rates that were measured beside others' would be kept for as long as the volume is.
        A caller comes here without a count of others' I/O only if it knows that there is none."""
        all_bytes = drive_bytes(self._folder)
        if all_bytes is None or self._all_bytes_before is None:
            return
        others_bytes = all_bytes - self._all_bytes_before - self._moved_bytes
        if others_bytes > _OTHERS_MAX * self._moved_bytes:
            raise Refused(
                StatusCode.UNAVAILABLE,
                f"the drive is too busy to be measured: other processes moved "
                f"{format_size(others_bytes)} meanwhile, beside {format_size(self._moved_bytes)} "
                "of the measurement; calibrate when nothing else uses it",
            )


def drive_bytes(folder: Path, *, devices: Path = Path("/sys/dev/block")) -> int | None:
    """Bytes that the drive of `folder` has read and written for all, since it is there. None where
    the file system has no single drive that the kernel counts: btrfs, overlays, network."""
    number = folder.stat().st_dev
    device = (devices / f"{os.major(number)}:{os.minor(number)}").resolve()
    if (device / "partition").exists():
        device = device.parent  # others may use the drive's other partitions
    try:
        fields = (device / "stat").read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(fields[2]) + int(fields[6])) * _SECTOR_BYTES
