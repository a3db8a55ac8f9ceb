"""Transfers through memd's queue, beside the same transfers by io_uring alone, on the same file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.bench.figures import Figure
from memd.refusal import StatusCode
from memd_native import IoBench, IoRate, StatusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIXES = ("read", "write", "mixed")


def io_figures(
    folder: Path, *, size: int, block: int, depth: int, seconds: float, rounds: int
) -> Iterator[Figure]:
    """GB/s and CPU seconds a GB; `size` bytes are written into `folder` first, and removed."""
    bench = IoBench(str(folder), bytes=size)
    for mix in MIXES:
        runs: list[IoRate] = []
        limits: list[IoRate] = []
        no_limit = ""
        for _ in range(rounds):
            runs.append(bench.through_queue(mix, block_bytes=block, depth=depth, seconds=seconds))
            try:
                limits.append(bench.raw(mix, block_bytes=block, depth=depth, seconds=seconds))
            except StatusError as error:
                if error.code != StatusCode.UNAVAILABLE:
                    raise
                no_limit = str(error)
        yield Figure(
            name=mix,
            unit="GB/s",
            runs=[_rate(each) for each in runs],
            limit_name="io_uring alone",
            limit_runs=[_rate(each) for each in limits],
            no_limit=no_limit,
        )
        yield Figure(
            name=f"{mix}, bytes for CPU time",
            unit="GB/CPU s",
            runs=[_thrift(each) for each in runs],
            limit_name="io_uring alone",
            limit_runs=[_thrift(each) for each in limits],
            no_limit=no_limit,
        )


def _gigabytes(rate: IoRate) -> float:
    return float(rate.read_bytes + rate.written_bytes) / 1e9


def _rate(rate: IoRate) -> float:
    return _gigabytes(rate) / rate.seconds


def _thrift(rate: IoRate) -> float:
    # A clock of CPU time may stand still during a short run.
    return _gigabytes(rate) / max(rate.cpu_seconds, 1e-6)
