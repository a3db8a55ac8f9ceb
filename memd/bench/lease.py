"""Leases of a resident tensor, beside the least that each way could take: native, as a torch tensor
from Python, and by request.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import torch

import memd_client
from memd.bench.figures import Figure
from memd_native import measure_leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client.session import Session
    from memd_native import Quantiles

_NAME = "bench"
_SHAPE = (1024, 1024)
_HOST = "64MiB"
_NVME = "256MiB"


class _Times(NamedTuple):
    """Seconds."""

    p50: float
    p99: float


def lease_figures(folder: Path, *, count: int, rounds: int) -> Iterator[Figure]:
    """Microseconds, of leases from a daemon of our own with a volume in `folder`."""
    data = Path(tempfile.mkdtemp(prefix="memd-bench-", dir=folder)).resolve()
    try:
        address = f"embedded:{quote(str(data))}?host={_HOST}&nvme={_NVME}"
        with memd_client.connect(address, job="bench") as session:
            session.put(_NAME, torch.zeros(_SHAPE))
            session.get(_NAME)  # by request: from here on the table shows it
            yield from _figures(session, count=count, rounds=rounds)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _figures(session: Session, *, count: int, rounds: int) -> Iterator[Figure]:
    shard_id = session.find_shard(_NAME).shard_id
    plane: Any = session.leases.plane
    rate = measure_leases(plane, shard_id=shard_id, count=count, round_count=rounds)
    yield from _pair("lease and release", rate.resident, "two atomic operations", rate.atomics)
    runs: list[_Times] = []
    limits: list[_Times] = []
    buffer = bytearray(4 * _SHAPE[0] * _SHAPE[1])
    for _ in range(rounds):
        runs.append(_time(lambda: session.get(_NAME), count))
        limits.append(
            _time(lambda: torch.frombuffer(buffer, dtype=torch.float32).view(_SHAPE), count)
        )
    yield from _pair("Session.get, a torch tensor", runs, "torch.frombuffer", limits)
    yield from _pair("the same lease by request", rate.requested, "word to a thread", rate.handed)


def _pair(
    name: str,
    runs: list[Quantiles] | list[_Times],
    limit_name: str,
    limits: list[Quantiles] | list[_Times],
) -> Iterator[Figure]:
    for quantile in ("p50", "p99"):
        yield Figure(
            name=f"{name}, {quantile}",
            unit="us",
            runs=[getattr(each, quantile) * 1e6 for each in runs],
            limit_name=limit_name,
            limit_runs=[getattr(each, quantile) * 1e6 for each in limits],
            less_is_better=True,
        )


def _time(make: Callable[[], torch.Tensor], count: int) -> _Times:
    """Times of a tensor that is made and let go."""
    times = []
    for _ in range(count):
        start = perf_counter_ns()
        tensor = make()
        del tensor
        times.append(perf_counter_ns() - start)
    times.sort()
    return _Times(p50=times[count // 2] * 1e-9, p99=times[count * 99 // 100] * 1e-9)
