"""Views of a parameter's bytes that outlive the use that leased them, such as a `detach()` that the
user keeps, and those that the user had before the parameter was offloaded.

A lease for reading is private: what is written there stays in this process, and memd finds it when
the lease ends, or looks at one that lives.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from memd_client.base.device_waits import note_device_wait

if TYPE_CHECKING:
    from memd_client.connection.shard import Shard
    from memd_client.core.parameter_leases import WatchedLeases


# Names no value.
_NO_VALUE = -1
# An attribute of a storage. torch keeps its Python object for as long as the storage lives.
_SHARED = "_memd_shared"


def mark_shared(storage: torch.UntypedStorage) -> None:
    """The program gets its memory, as by `numpy()`, in which torch counts no change: one that is
    found there is meant."""
    setattr(storage, _SHARED, True)


@dataclass(slots=True)
class WrittenView:
    """A lease for reading whose bytes were changed by this process."""

    value: torch.Tensor
    # The value that it showed before; None if that is not known.
    write_count: int | None
    # The program has its memory: see `mark_shared`.
    is_shared: bool = False


@dataclass(slots=True)
class _Kept:
    # torch keeps the Python object of a storage for as long as the storage lives.
    storage: weakref.ref[torch.UntypedStorage]
    offset: int  # of the value in the storage, in elements
    address: int  # of the value
    write_count: int  # names the value that it shows
    # The program has its memory: see `mark_shared`. Of a storage that lives, the storage knows.
    was_shared: bool = False
    # A digest of what memory of the program, or of a device, was shown; None for a lease of host
    # memory, whose pages tell.
    digest: bytes | None = None


class KeptViews:
    """The leases of one parameter that are for reading and outlived their use. Any thread may call.
    Waits for nothing. Transforms of torch.func do not see what it does.
    """

    def __init__(self, shard: Shard, leases: WatchedLeases) -> None:
        self._shard = shard
        self._leases = leases
        leases.watch_writes(shard)
        # Nobody else would take them.
        weakref.finalize(self, leases.unwatch_writes, shard).atexit = False
        # Those that have ended stay until `written` asks by what they were kept.
        self._kept: list[_Kept] = []
        # Those that have ended and were written.
        self._ended: list[WrittenView] = []
        self._lock = RLock()

    def __bool__(self) -> bool:
        """Whether there may be some."""
        return bool(self._kept or self._ended)

    def keep(self, storage: weakref.ref[torch.UntypedStorage], write_count: int) -> None:
        """The use is over. `storage` is of its lease, which shows the value of this name."""
        held = storage()
        if held is None:
            return
        with self._lock:
            is_shared = hasattr(held, _SHARED)
            self._kept.append(_Kept(storage, 0, held.data_ptr(), write_count, is_shared))
            if self._shard.is_on_device:  # whose pages tell nothing
                for kept, view in self._living():
                    if kept is self._kept[-1]:
                        kept.digest = _digest(view)

    def keep_memory(self, storage: weakref.ref[torch.UntypedStorage], offset: int) -> None:
        """The parameter was offloaded from there, and tensors of the program may still show it.
        The next `catch_up` shows them the value."""
        held = storage()
        if held is None:
            return
        address = held.data_ptr() + offset * self._shard.dtype.itemsize
        with self._lock:
            self._kept.append(_Kept(storage, offset, address, _NO_VALUE))
            for kept, view in self._living():
                if kept.storage is storage:
                    kept.digest = _digest(view)

    @temporarily_clear_interpreter_stack()
    def written(self) -> list[WrittenView]:
        """Those that were written. Those that have ended are among them until `forget_ended`."""
        with self._lock:
            by_address = {kept.address: kept for kept in self._kept}
            while (value := self._leases.take_written(self._shard)) is not None:
                self._ended.append(_ended(value, by_address.get(value.data_ptr())))
            living = self._living()
            self._kept = [kept for kept, _ in living]
            return self._ended + [
                WrittenView(value, kept.write_count, hasattr(value.untyped_storage(), _SHARED))
                for kept, value in living
                if self._is_written(kept, value)
            ]

    def leave(self) -> bool:
        """The parameter gets other memory, and memory of the program keeps the value that it has.
        False, and nothing happens, if there are leases, which would not."""
        with self._lock:
            if any(kept.digest is None for kept, _ in self._living()):
                return False
            self._kept.clear()
            return True

    @property
    def are_alive(self) -> bool:
        with self._lock:
            return any(kept.storage() is not None for kept in self._kept)

    @temporarily_clear_interpreter_stack()
    def contradict(self, value: torch.Tensor) -> bool:
        """Whether one was written, in memory of its own, and differs from this new value."""
        return any(
            each.value.data_ptr() != value.data_ptr() and not is_same_bits(each.value, value)
            for each in self.written()
        )

    def overlook(self) -> bool:
        """Whether one was written. From now on it does not count, and the view shows the next value
        of the parameter all the same."""
        with self._lock:
            is_written = bool(self.written())
            for kept, view in self._living():
                if self._is_written(kept, view):
                    self._note_shown(kept, view)
                    kept.write_count = _NO_VALUE
            self.forget_ended()
            return is_written

    def keep_ended(self, value: torch.Tensor, write_count: int) -> None:
        """As if a lease with this value had ended, and had shown the value of this name before."""
        with self._lock:
            self._ended.append(WrittenView(value, write_count))

    def forget_ended(self) -> None:
        """Drops what was written through leases that have ended."""
        with self._lock:
            self._ended.clear()
            while self._leases.take_written(self._shard) is not None:
                pass

    @temporarily_clear_interpreter_stack()
    def show(self, value: torch.Tensor, write_count: int) -> None:
        """The parameter has this value now, and so have views that share its memory."""
        with self._lock:
            for kept, view in self._living():
                self._show(kept, view, value, write_count)

    @temporarily_clear_interpreter_stack()
    def catch_up(self, value: torch.Tensor, write_count: int) -> None:
        """As `show`, for those that are behind: the user may have changed others since."""
        with self._lock:
            for kept, view in self._living():
                if kept.write_count != write_count:
                    self._show(kept, view, value, write_count)

    @torch.no_grad()
    def _show(self, kept: _Kept, view: torch.Tensor, value: torch.Tensor, write_count: int) -> None:
        value = value.to(view.device)
        # A page that is written is memory of this process.
        if not is_same_bits(view, value):
            view.copy_(value)
        if self._is_written(kept, view):
            self._note_shown(kept, view)
        kept.write_count = write_count

    def _is_written(self, kept: _Kept, view: torch.Tensor) -> bool:
        if kept.digest is None:
            return self._leases.is_written(view)
        return kept.digest != _digest(view)

    def _note_shown(self, kept: _Kept, view: torch.Tensor) -> None:
        if kept.digest is None:
            self._leases.note_shown(view)
        else:
            kept.digest = _digest(view)

    def _living(self) -> list[tuple[_Kept, torch.Tensor]]:
        shard, living = self._shard, []
        for kept in self._kept:
            storage = kept.storage()
            if storage is not None:
                value: torch.Tensor = torch.empty(0, dtype=shard.dtype, device=shard.device)
                value.set_(storage, kept.offset, shard.shape)  # type: ignore[call-overload] # its stub has no ints
                living.append((kept, value))
        return living


def _ended(value: torch.Tensor, kept: _Kept | None) -> WrittenView:
    if kept is None:
        return WrittenView(value, None)
    return WrittenView(value, kept.write_count, kept.was_shared)


def _digest(value: torch.Tensor) -> bytes:
    _note_wait(value)
    data: Any = _bits(value).cpu().numpy()
    return hashlib.blake2b(data, digest_size=16).digest()


def is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals itself, and 0 is not -0. Waits for devices."""
    _note_wait(one, other)
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    return torch.equal(_bits(one), _bits(other))


def _note_wait(*tensors: torch.Tensor) -> None:
    if any(not tensor.is_cpu for tensor in tensors):
        note_device_wait("comparison")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
