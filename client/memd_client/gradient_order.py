"""In which order backward makes gradients, so that their slots are there before they are."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from memd_native import MODE_OVERWRITE, MODE_WRITE, PART_GRADIENT

if TYPE_CHECKING:
    from memd_client.leases import Shard

# A request takes up to several milliseconds where compute threads keep all cores busy, which is as
# long as a layer's backward (one of 8 layers of 512: 3 ms). Asked for in halves of this many, so
# that the daemon wakes once for several.
_AHEAD_COUNT = 16
_AHEAD_BYTES = 32 << 20


class Slot(Protocol):
    """`gradients.GradientSlot`."""

    @property
    def shard(self) -> Shard: ...
    @property
    def present(self) -> bool: ...


class Asking(Protocol):
    """What it needs of `memd_native.ClientSession`."""

    def ask_ahead(self, shard_id: int, part: int, mode: int) -> None: ...
    def forget_asked(self) -> bool: ...


class GradientOrder:
    """Asks for the slots that backward will need next, as the one before it did. Another order
    costs what it cost before: a wait for each. Any thread may call.
    """

    def __init__(self, plane: Asking) -> None:
        self.may_ask = True
        self._plane = plane
        self._order: list[weakref.ref[Slot]] = []
        self._position: dict[int, int] = {}  # shard id → in `_order`
        self._next_order: list[weakref.ref[Slot]] = []
        self._asked_end = 0  # in `_order`
        self._asked_begin = 0
        self._lock = Lock()

    def came(self, slot: Slot, *, is_first: bool) -> None:
        """A gradient is in its slot; `is_first`: since the last step."""
        with self._lock:
            if is_first:
                self._next_order.append(weakref.ref(slot))
            position = self._position.get(slot.shard.shard_id)
            if position is None or not self.may_ask:
                return
            if not self._asked_begin <= position < self._asked_end:
                # Another place than the one it was going to.
                if self._asked_begin < self._asked_end:
                    self._plane.forget_asked()
                self._asked_end = position + 1
            self._asked_begin = position + 1
            if self._asked_end - self._asked_begin > _AHEAD_COUNT // 2:
                return
            self._ask_until(position + 1 + _AHEAD_COUNT)

    def _ask_until(self, end: int) -> None:
        ahead = [known() for known in self._order[self._asked_begin : end]]
        total_bytes = 0
        for position, slot in enumerate(ahead, self._asked_begin):
            if slot is not None:
                total_bytes += slot.shard.size_bytes
                if total_bytes > _AHEAD_BYTES:
                    return
                if position >= self._asked_end:
                    mode = MODE_WRITE if slot.present else MODE_OVERWRITE
                    self._plane.ask_ahead(slot.shard.shard_id, PART_GRADIENT, mode)
            self._asked_end = max(self._asked_end, position + 1)

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        with self._lock:
            if self._asked_begin < self._asked_end:
                self._plane.forget_asked()
            self._asked_begin = self._asked_end = 0
            if self._next_order:
                self._order, self._next_order = self._next_order, []
                self._position = {
                    slot.shard.shard_id: position
                    for position, known in enumerate(self._order)
                    if (slot := known()) is not None
                }
