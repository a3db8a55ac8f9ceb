"""Copies between the arena and a device, beside those of memory that torch has pinned: the link's
limit. And what it costs to register the arena with the device's driver.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import torch
from torch import nn

import memd_client
from memd.bench.figures import Figure
from memd_client.core.leases import MODE_OVERWRITE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from memd_client.session import Session

# Long beside what starts a copy, and as large as a large parameter.
_PARAMETER_BYTES = 64 << 20
# For each byte that is copied: a parameter's published and its private value, two sets of
# gradients, and one for slots that do not fit side by side.
_HOST_BYTES = 5
_MARGIN_BYTES = 128 << 20
_NVME = "64MiB"
_WARM_RUNS = 2
_MATRIX_SIZE = 8192
_HOST = torch.device("cpu")  # registers nothing


class NoDevice(Exception):
    """Nothing to measure; the message says why."""


class _Times(NamedTuple):
    """Seconds of one round."""

    registration: float
    unregistered_in: float
    unregistered_out: float
    plain_in: float
    arena_in: float
    plain_out: float
    arena_out: float
    plain_both: float
    arena_both: float
    compute: float
    together: float


def find_device() -> torch.device:
    """Raises NoDevice if torch finds none that memory is copied to."""
    if not torch.accelerator.is_available():
        raise NoDevice(
            "torch finds no accelerator here: install the build of torch for this machine's "
            "device, and check that its driver is loaded"
        )
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def device_figures(
    folder: Path,
    device: torch.device,
    *,
    size: int,
    rounds: int,
    matrix_size: int = _MATRIX_SIZE,
) -> list[Figure]:
    """GB/s, and seconds, with a daemon of our own with a volume in `folder`.

    `size` bytes are copied each way in a run, in whole parameters of 64 MiB.
    """
    data = Path(tempfile.mkdtemp(prefix="memd-bench-", dir=folder)).resolve()
    try:
        host = _HOST_BYTES * size + _MARGIN_BYTES
        address = f"embedded:{quote(str(data))}?host={host}B&nvme={_NVME}"
        limit = _PlainCopies(device, size)
        compute = _Compute(device, matrix_size)
        # A round has a session of its own: a mapping is registered once.
        times = [_round(address, device, size, limit, compute) for _ in range(rounds)]
    finally:
        shutil.rmtree(data, ignore_errors=True)
    return list(_figures(times, size))


def _round(
    address: str, device: torch.device, size: int, limit: _PlainCopies, compute: _Compute
) -> _Times:
    with _arena_copies(address, device, size) as arena:
        arena.register()
        for copies in (limit, arena):
            for _ in range(_WARM_RUNS):
                copies.both()
        plain_in, arena_in = _seconds(limit.copy_in), _seconds(arena.copy_in)
        plain_out, arena_out = _seconds(limit.copy_out), _seconds(arena.copy_out)
        plain_both, arena_both = _seconds(limit.both), _seconds(arena.both)
        compute.run_for(arena_both)
        alone = _seconds(compute.start)

        def together() -> None:
            arena.both()
            compute.start()

        together_seconds = _seconds(together)
        arena.unregister()
        return _Times(
            registration=arena.registration_seconds,
            unregistered_in=_seconds(arena.copy_in),
            unregistered_out=_seconds(arena.copy_out),
            plain_in=plain_in,
            arena_in=arena_in,
            plain_out=plain_out,
            arena_out=arena_out,
            plain_both=plain_both,
            arena_both=arena_both,
            compute=alone,
            together=together_seconds,
        )


class _Copies:
    """Starts copies of host memory to a device, and back to other host memory."""

    def __init__(self, device: torch.device, sources: list[Tensor], targets: list[Tensor]) -> None:
        self._sources, self._targets = sources, targets
        self._there = [torch.zeros_like(each, device=device) for each in sources]
        self._back = [torch.zeros_like(each, device=device) for each in sources]
        self._streams = torch.Stream(device=device), torch.Stream(device=device)
        torch.accelerator.synchronize()  # the zeros are there before other streams write

    def copy_in(self) -> None:
        with self._streams[0]:
            for there, source in zip(self._there, self._sources, strict=True):
                self._copy(there, source)

    def copy_out(self) -> None:
        with self._streams[1]:
            for target, back in zip(self._targets, self._back, strict=True):
                self._copy(target, back)

    def both(self) -> None:
        self.copy_in()
        self.copy_out()

    def _copy(self, to: Tensor, source: Tensor) -> None:
        raise NotImplementedError


class _PlainCopies(_Copies):
    """Copies of memory that torch has pinned."""

    def __init__(self, device: torch.device, size: int) -> None:
        sources, targets = (
            [torch.rand(shape).pin_memory() for shape in _shapes(size)] for _ in range(2)
        )
        super().__init__(device, sources, targets)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)


class _ArenaCopies(_Copies):
    """Copies of the parameters and gradients of a session."""

    def __init__(self, session: Session, device: torch.device, count: int) -> None:
        shards = [session.find_shard(f"{index}") for index in range(count)]
        leases = [session.leases.value(shard) for shard in shards]
        slots = [session.leases.gradient(shard, MODE_OVERWRITE) for shard in shards]
        self._registration = session.leases.registration
        self._device = device
        self._registration_seconds = 0.0
        super().__init__(device, *(self._shown(part, _HOST) for part in (leases, slots)))

    def register(self) -> None:
        """As a session does it, before most pages are mapped in this process."""
        start = perf_counter()
        for part in (self._sources, self._targets):
            self._shown(part, self._device)
        seconds = perf_counter() - start
        registered_bytes = self._registration.registered_bytes
        if registered_bytes:
            self._registration_seconds = seconds * (1 << 30) / registered_bytes

    def unregister(self) -> None:
        self._registration.close()

    def _shown(self, leases: list[Tensor], device: torch.device) -> list[Tensor]:
        return [self._registration.host(each, device) for each in leases]

    @property
    def registration_seconds(self) -> float:
        """For a GiB; 0 if nothing was registered."""
        return self._registration_seconds

    def _copy(self, to: Tensor, source: Tensor) -> None:
        self._registration.copy(to, source)


class _Compute:
    """Products of matrices, which leave the link alone."""

    def __init__(self, device: torch.device, matrix_size: int) -> None:
        shape = (matrix_size, matrix_size)
        self._left, self._right = (
            torch.rand(shape, device=device).to(torch.bfloat16) for _ in range(2)
        )
        self._product = torch.empty_like(self._left)
        self._count = 1
        for _ in range(_WARM_RUNS):
            self.start()

    def run_for(self, seconds: float) -> None:
        """From now on a start takes about so long."""
        self._count = 1
        self._count = max(1, round(seconds / _seconds(self.start)))

    def start(self) -> None:
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._product)


@contextmanager
def _arena_copies(address: str, device: torch.device, size: int) -> Iterator[_ArenaCopies]:
    with memd_client.connect(address, job="bench", fresh=True) as session:
        model = nn.ParameterList(nn.Parameter(torch.rand(shape)) for shape in _shapes(size))
        memd_client.offload(model, session, tier="host")
        copies = _ArenaCopies(session, device, len(model))
        try:
            yield copies
        finally:
            torch.accelerator.synchronize()


def _shapes(size: int) -> list[tuple[int, ...]]:
    return [(_PARAMETER_BYTES // 4,)] * max(1, size // _PARAMETER_BYTES)


def _seconds(start: Callable[[], None]) -> float:
    torch.accelerator.synchronize()
    begin = perf_counter()
    start()
    torch.accelerator.synchronize()
    return perf_counter() - begin


def _figures(times: list[_Times], size: int) -> Iterator[Figure]:
    copied = 4 * sum(shape[0] for shape in _shapes(size)) / 1e9

    def rate(name: str, runs: list[float], limits: list[float], parts: int = 1) -> Figure:
        return Figure(
            name=name,
            unit="GB/s",
            runs=[parts * copied / seconds for seconds in runs],
            limit_name="pinned by torch",
            limit_runs=[parts * copied / seconds for seconds in limits],
        )

    yield rate(
        "arena to device", [each.arena_in for each in times], [each.plain_in for each in times]
    )
    yield rate(
        "device to arena", [each.arena_out for each in times], [each.plain_out for each in times]
    )
    yield rate(
        "both at once", [each.arena_both for each in times], [each.plain_both for each in times], 2
    )
    yield Figure(
        name="both at once, beside compute",
        unit="s",
        runs=[each.together for each in times],
        limit_name="the longer alone",
        limit_runs=[max(each.arena_both, each.compute) for each in times],
        less_is_better=True,
    )
    yield rate(
        "arena to device, unregistered",
        [each.unregistered_in for each in times],
        [each.plain_in for each in times],
    )
    yield rate(
        "device to arena, unregistered",
        [each.unregistered_out for each in times],
        [each.plain_out for each in times],
    )
    yield Figure(
        name="registering a GiB",
        unit="s",
        runs=[each.registration for each in times],
        no_limit="once a session",
        less_is_better=True,
    )
