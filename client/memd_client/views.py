"""Views of a parameter's bytes that outlive the use that leased them, such as a `detach()` that the
user keeps.

A lease for reading is private: what is written there stays in this process, and memd finds it when
the lease ends, or looks at one that lives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

if TYPE_CHECKING:
    from memd_client.leases import Leases
    from memd_client.shard import Shard


# Names no value.
_NO_VALUE = -1


@dataclass(slots=True)
class WrittenView:
    """A lease for reading whose bytes were changed by this process."""

    value: torch.Tensor
    # The value that it showed before; None if that is not known.
    write_count: int | None


@dataclass(slots=True)
class _Kept:
    # torch keeps the Python object of a storage for as long as the storage lives.
    storage: weakref.ref[torch.UntypedStorage]
    address: int
    write_count: int  # names the value that it shows


class KeptViews:
    """The leases of one parameter that are for reading and outlived their use. Any thread may call.
    Waits for nothing. Transforms of torch.func do not see what it does.
    """

    def __init__(self, shard: Shard, leases: Leases) -> None:
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
            self._kept.append(_Kept(storage, held.data_ptr(), write_count))

    @temporarily_clear_interpreter_stack()
    def written(self) -> list[WrittenView]:
        """Those that were written. Those that have ended are among them until `forget_ended`."""
        with self._lock:
            counts = {kept.address: kept.write_count for kept in self._kept}
            while (value := self._leases.take_written(self._shard)) is not None:
                self._ended.append(WrittenView(value, counts.get(value.data_ptr())))
            living = self._living()
            self._kept = [kept for kept, _ in living]
            return self._ended + [
                WrittenView(value, kept.write_count)
                for kept, value in living
                if self._leases.is_written(value)
            ]

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
                if self._leases.is_written(view):
                    self._leases.note_shown(view)
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
        # A page that is written is memory of this process.
        if not is_same_bits(view, value):
            view.copy_(value)
        if self._leases.is_written(view):
            self._leases.note_shown(view)
        kept.write_count = write_count

    def _living(self) -> list[tuple[_Kept, torch.Tensor]]:
        shard, living = self._shard, []
        for kept in self._kept:
            storage = kept.storage()
            if storage is not None:
                value: torch.Tensor = torch.empty(0, dtype=shard.dtype, device="cpu")
                value.set_(storage, 0, shard.shape)  # type: ignore[call-overload] # its stub has no ints
                living.append((kept, value))
        return living


def is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals itself, and 0 is not -0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
