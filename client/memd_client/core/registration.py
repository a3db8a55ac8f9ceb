"""The arena's memory, registered with a device's driver: then copies to and from it run at the
link's speed, beside what the host and the device do.

This module has all that only CUDA needs, and ROCm by the same names in torch. Other kinds of
devices have nothing to register.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memd_client.base.dtypes import DTYPE_NUMBERS
from memd_client.base.process import OwnProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger(__name__)

# CUDA refuses to register 512 GiB and more at once.
PIECE_BYTES_MAX = 64 << 30
# cudaHostRegisterPortable: for all devices of the process.
_PORTABLE = 1
_CUDA = "cuda"  # also ROCm's type in torch


class ArenaPlane(Protocol):
    """The part of `memd_native.ClientSession` that registration uses."""

    @property
    def arena_address(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    def arena_view(self, lease: object, address: int, dtype: int, shape: Sequence[int]) -> Any: ...


class HostRegistration:
    """The part of one session's arena that copies cross. Any thread may call.

    A lease for reading is a private mapping, which a driver would copy page by page to pin it. So
    the shared mapping is registered, segment by segment as copies need them, and `host` shows it.
    If the driver refuses, copies have the same bytes and are slower.
    """

    def __init__(self, plane: ArenaPlane, *, piece_bytes_max: int = PIECE_BYTES_MAX) -> None:
        self._plane = plane
        # It holds the plane, so the mapping lives until its last piece is unregistered.
        self._pieces = _Pieces(plane, piece_bytes_max)
        self._finalizer = weakref.finalize(self, self._pieces.release)

    @property
    def registered_bytes(self) -> int:
        return self._pieces.registered_bytes

    @property
    def refused_count(self) -> int:
        """How often the driver has refused."""
        return self._pieces.refused_count

    def host(self, lease: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The arena's own bytes of a lease, in its dtype and shape, to copy to and from `device`.

        The result keeps the lease. What was written through a lease for reading is not in it.
        """
        if not lease.is_contiguous():
            raise ValueError(f"a lease of strides {lease.stride()} has no bytes of its own")
        view: torch.Tensor = self._plane.arena_view(
            lease, lease.data_ptr(), DTYPE_NUMBERS[lease.dtype], tuple(lease.shape)
        )
        if device.type == _CUDA:
            self._pieces.cover(view.data_ptr(), view.nbytes, device)
        return view

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between `host()` and a device's memory, of one dtype and both contiguous, on the
        current stream, without waiting. A driver takes no copy that lies in two registrations, so
        it is cut where they meet.
        """
        host = to if to.is_cpu else source
        cuts = self._pieces.cuts(host.data_ptr(), host.nbytes)
        with torch.no_grad():
            if not cuts:
                to.copy_(source, non_blocking=True)
                return
            to_bytes, source_bytes = (each.view(-1).view(torch.uint8) for each in (to, source))
            for begin, end in zip((0, *cuts), (*cuts, host.nbytes), strict=True):
                to_bytes[begin:end].copy_(source_bytes[begin:end], non_blocking=True)

    def close(self) -> None:
        """Unregisters all, when the last copy has ended and before the arena is unmapped. Later
        copies register nothing. A second call does nothing, and neither does one in a forked child.
        """
        self._finalizer()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Addresses that were given to the driver at once."""

    begin: int
    end: int
    is_registered: bool  # False: refused


class _Pieces:
    """Apart, in the order of their addresses, each whole segments."""

    def __init__(self, plane: ArenaPlane, piece_bytes_max: int) -> None:
        self._plane = plane
        self._piece_bytes_max = piece_bytes_max
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._refused_count = 0
        self._is_released = False

    @property
    def registered_bytes(self) -> int:
        with self._lock:
            return sum(each.end - each.begin for each in self._pieces if each.is_registered)

    @property
    def refused_count(self) -> int:
        return self._refused_count

    def cover(self, address: int, length_bytes: int, device: torch.device) -> None:
        """Registers the segments of these bytes that the driver has not been asked for."""
        if not length_bytes or self._process.is_another:
            return
        base, segment_bytes = self._plane.arena_address, self._plane.segment_bytes
        first = (address - base) // segment_bytes
        last = -(-(address + length_bytes - base) // segment_bytes)
        begin, end = base + first * segment_bytes, base + last * segment_bytes
        with self._lock:
            if self._is_released:
                return
            for missing in list(self._missing(begin, end)):
                insort(self._pieces, self._register(*missing, device), key=_begin)

    def cuts(self, address: int, length_bytes: int) -> list[int]:
        """The places at which these bytes meet another piece, counted from their beginning."""
        with self._lock:
            first = bisect_right(self._pieces, address, key=_begin)
            last = bisect_left(self._pieces, address + length_bytes, key=_begin)
            begins = {each.begin for each in self._pieces[first:last]}
            # A range that no driver was asked for is a piece of its own.
            ends = {
                each.end
                for each in self._pieces[max(first - 1, 0) : last]
                if address < each.end < address + length_bytes
            }
        return sorted(cut - address for cut in begins | ends)

    def release(self) -> None:
        with self._lock:
            pieces, self._pieces, self._is_released = self._pieces, [], True
        if self._process.is_another:
            return  # a driver's registrations are the parent's
        for piece in pieces:
            if piece.is_registered:
                _unregister(piece.begin)

    def _missing(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The rest of these addresses, cut to the largest piece."""
        overlapping = [each for each in self._pieces if each.begin < end and begin < each.end]
        for stop, after in (
            (each.begin, each.end) for each in [*overlapping, _Piece(end, end, False)]
        ):
            while begin < stop:
                yield begin, min(stop, begin + self._piece_bytes_max)
                begin = min(stop, begin + self._piece_bytes_max)
            begin = max(begin, after)

    def _register(self, begin: int, end: int, device: torch.device) -> _Piece:
        refusal = _register(begin, end - begin, device)
        if refusal:
            if not self._refused_count:
                _log.warning(
                    "the driver of %s refuses to register %d bytes of host memory: %s; copies of "
                    "them are slower and hold up the host",
                    *(device, end - begin, refusal),
                )
            self._refused_count += 1
        return _Piece(begin, end, not refusal)


def _begin(piece: _Piece) -> int:
    return piece.begin


def _register(address: int, length_bytes: int, device: torch.device) -> str:
    """Why the driver refuses, or nothing."""
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(address, length_bytes, _PORTABLE)
        if int(result) == 0:
            return ""
        _forget_error(device)
        return str(runtime.cudaGetErrorString(result))


def _unregister(address: int) -> None:
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostUnregister(address)
    if int(result) != 0:
        _forget_error(torch.device(_CUDA))
        _log.warning("unregistering host memory failed: %s", runtime.cudaGetErrorString(result))


def _forget_error(device: torch.device) -> None:
    """The runtime keeps a call's error for the thread, and torch would raise it at the next kernel,
    whosever it is. So that is one of ours."""
    with contextlib.suppress(RuntimeError):
        _launch(device)


def _launch(device: torch.device) -> None:
    torch.ones(1, device=device)
