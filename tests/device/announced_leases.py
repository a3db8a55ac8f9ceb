"""Announces to the simulation what a daemon does with a session's host memory.

The daemon is another process, whose accesses the vector clocks don't see. From the end of a lease
on, it may fill the slot with something else: a write of the host. Once a step with a gradient was
sent, it reads the slot: a read of the host. By the clock it updates in no time, and shows a new
value no earlier than its step was sent.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memd_client.base.dtypes import DTYPE_NUMBERS
from memd_native import PART_GRADIENT
from tests.device.ordered_threads import Handover
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from memd_client import Session


_PAGE = 4096


class _Slots:
    """The leases of the arena's slots. The daemon grants one after it knows of the ends of those
    before that met the same bytes."""

    def __init__(self) -> None:
        self._pages: dict[int, threading.Lock] = {}
        self._counts: dict[int, int] = {}  # by address

    def begin(self, slot: torch.Tensor) -> None:
        with self._pages_of(slot):
            self._counts[slot.data_ptr()] = self._counts.get(slot.data_ptr(), 0) + 1

    def end(self, slot: torch.Tensor) -> None:
        with self._pages_of(slot):
            self._counts[slot.data_ptr()] -= 1
            if not self._counts[slot.data_ptr()]:
                SIM.host_touches(slot, writes=True)

    def read(self, slot: torch.Tensor) -> None:
        """A step has it, and the next lease of it is granted when that has ended."""
        with self._pages_of(slot):
            SIM.host_touches(slot, writes=False)

    def read_if_free(self, slot: torch.Tensor) -> None:
        with self._pages_of(slot):
            if not self._counts[slot.data_ptr()]:
                SIM.host_touches(slot, writes=False)

    @contextmanager
    def _pages_of(self, slot: torch.Tensor) -> Iterator[None]:
        first, last = slot.data_ptr() // _PAGE, (slot.data_ptr() + slot.nbytes - 1) // _PAGE
        with ExitStack() as held:
            for page in range(first, last + 1):
                held.enter_context(self._pages.setdefault(page, threading.Lock()))
            yield


class _AnnouncedPlane:
    """A session's data plane whose leases, when they end, are announced."""

    def __init__(self, plane: Any, races: list[str]) -> None:
        self._plane = plane
        self._races = races
        self._slots = _Slots()
        self._gradients: dict[int, torch.Tensor] = {}  # shard id → its slot, without a lease
        self._updates: dict[int, Handover] = {}  # by shard id: of the last step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def lease_together(
        self,
        shards: Sequence[tuple[int, int, Sequence[int], int]],
        part: int,
        mode: int,
        timeout_s: float,
        phase: int,
        follows: bool = True,
    ) -> list[Any]:
        answers: list[Any] = self._plane.lease_together(
            shards, part, mode, timeout_s, phase, follows
        )
        for (shard_id, *_), answer in zip(shards, answers, strict=True):
            if isinstance(answer, torch.Tensor):
                self._watch(answer)
                if part == PART_GRADIENT:
                    self._gradients[shard_id] = self._slot_of(answer)
                else:
                    self._note_shown(shard_id)
        return answers

    def lease_resident(self, shard_id: int, dtype: int, shape: Sequence[int]) -> Any:
        lease = self._plane.lease_resident(shard_id, dtype, shape)
        if lease is not None:
            self._watch(lease)
            self._note_shown(shard_id)
        return lease

    def seal(self, shard_id: int) -> None:
        """Raises if the gradient's copy may still be under way, and then may be called again."""
        if shard_id in self._gradients:
            self._slots.read(self._gradients[shard_id])
            del self._gradients[shard_id]
        self._updates[shard_id] = Handover()
        self._updates[shard_id].give()

    def _note_shown(self, shard_id: int) -> None:
        if shard_id in self._updates:
            self._updates[shard_id].take()

    def gradient_is_final(self, shard_id: int) -> None:
        """The daemon may begin to read it, and does nothing while its slot is leased: then it is
        changed since."""
        self._slots.read_if_free(self._gradients[shard_id])
        self._plane.gradient_is_final(shard_id)

    def _watch(self, lease: torch.Tensor) -> None:
        slot = self._slot_of(lease)
        self._slots.begin(slot)
        weakref.finalize(lease.untyped_storage(), self._end, slot).atexit = False

    def _slot_of(self, lease: torch.Tensor) -> torch.Tensor:
        """The arena's bytes of a lease, without holding the lease."""
        number = DTYPE_NUMBERS[lease.dtype]
        return _bytes_of(self._plane.arena_view(lease, lease.data_ptr(), number, lease.shape))

    def _end(self, slot: torch.Tensor) -> None:
        # Nobody can catch what is raised here: leases end when tensors die.
        try:
            self._slots.end(slot)
        except RuntimeError as error:
            self._races.append(str(error))


def _bytes_of(lease: torch.Tensor) -> torch.Tensor:
    """The same bytes, without holding the lease. Never read."""
    address, length_bytes = lease.data_ptr(), lease.nbytes
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cpu"), length_bytes
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextmanager
def announced_leases(session: Session, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the races that ends of leases have shown so far; a seal raises its own."""
    races: list[str] = []
    leases, control = session.leases, session.transaction.job.control
    plane = _AnnouncedPlane(leases.plane, races)
    plain_begin_step = control.begin_step

    def begin_step(request: Any) -> Any:
        for group in request.groups:
            for shard_id in group.shard_ids:
                plane.seal(shard_id)
        return plain_begin_step(request)

    with patch.context() as patched:
        patched.setattr(leases, "_plane", plane)
        patched.setattr(control, "begin_step", begin_step)
        yield races
