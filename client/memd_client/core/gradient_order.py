"""The order in which backward makes gradients, so that their slots are reserved ahead."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import TYPE_CHECKING, Protocol

import torch
from torch.autograd import Variable

from memd_client.base.dynamo import untraced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.connection.shard import Shard

# A request takes up to several milliseconds while compute threads keep all cores busy, as long as a
# layer's backward (3 ms for a layer of width 512). Slots are requested in batches of half this
# number, so that the daemon wakes once for several.
_AHEAD_COUNT = 16
_AHEAD_BYTES = 32 << 20

_graph_task = torch._C._current_graph_task_id
_NO_TASK = -1


class Slot(Protocol):
    """`gradients.GradientSlot`."""

    @property
    def shard(self) -> Shard: ...
    @property
    def present(self) -> bool: ...
    @property
    def is_sealed(self) -> bool: ...


class BackwardEnd:
    """A callback for the end of one backward. If backward raised, torch does not call its callbacks
    but drops them, hence `__del__`."""

    def __init__(self, order: GradientOrder, graph_task: int) -> None:
        self._order = weakref.ref(order)
        self._graph_task = graph_task

    @untraced
    def __call__(self) -> None:
        order = self._order()
        if order is not None:
            order.end_backward(self._graph_task)

    @untraced
    def __del__(self) -> None:
        self()


class Asking(Protocol):
    """The part of `memd_native.ClientSession` that this uses."""

    def ask_ahead(self, shard_ids: Sequence[int]) -> None: ...
    def forget_asked(self) -> bool: ...


class GradientOrder:
    """Reserves the slots that backward will need next, in the order of the last backward. If the
    order changes, each gradient waits for its own slot. Any thread may call.

    Only slots without a gradient are reserved, and none whose gradient a step has that is not
    closed, so that a step never takes one that is still leased.
    Unused slots are returned at the end of backward, even if it raised.
    """

    def __init__(self, plane: Asking) -> None:
        self._may_ask = True
        self._plane = plane
        self._order: list[weakref.ref[Slot]] = []
        self._position: dict[int, int] = {}  # shard id → in `_order`
        # As a set that keeps its order. Without a step `zero_grad(set_to_none=False)` makes the
        # next gradient a first one again.
        self._next_order: dict[weakref.ref[Slot], None] = {}
        self._begin = 0  # in `_order`: the next expected
        self._end = 0  # in `_order`: behind the last reserved
        self._has_asked = False
        self._coming = set[int]()  # shard ids of those that are being accumulated
        self._graph_task = _NO_TASK  # the backward at whose end slots are returned
        self._expected_task = _NO_TASK  # the last backward passed to `expect_backward`
        # Reentrant: a BackwardEnd that torch refuses is deleted inside.
        self._lock = RLock()

    def expect_backward(self, shard_id: int) -> None:
        """Backward uses a parameter, and no step is in flight or open. Reserves the first slots,
        for which the first gradient would otherwise wait while all cores compute. Does nothing if
        the last backward made no gradient of this parameter: it was another model's."""
        graph_task = _graph_task()
        if graph_task in (self._expected_task, _NO_TASK) or shard_id not in self._position:
            return
        with self._lock:
            self._expected_task = graph_task
            if self._may_ask and not self._end:
                self._ask_until(_AHEAD_COUNT // 2)
                self._return_after(graph_task)

    def stop_asking(self) -> None:
        """From now on no slot is reserved ahead."""
        self._may_ask = False

    def comes(self, slot: Slot) -> None:
        """A gradient is about to lease its slot. Backwards of several devices have a thread each:
        another one must not ask for the slot meanwhile, and give it back with the gradient."""
        with self._lock:
            self._coming.add(slot.shard.shard_id)

    def came(self, slot: Slot, *, is_first: bool) -> None:
        """A gradient is in its slot; `is_first`: the first one since the last step."""
        with self._lock:
            self._coming.discard(slot.shard.shard_id)
            if is_first:
                self._next_order.setdefault(weakref.ref(slot))
            position = self._position.get(slot.shard.shard_id)
            graph_task = _graph_task()
            if position is None or not self._may_ask or graph_task == _NO_TASK:
                return
            if not self._begin <= position < self._end:
                # Backward follows another order than the last one.
                self._return_slots()
                self._end = position + 1
            self._begin = position + 1
            if self._end - self._begin > _AHEAD_COUNT // 2:
                return
            self._ask_until(position + 1 + _AHEAD_COUNT)
            self._return_after(graph_task)

    def _return_after(self, graph_task: int) -> None:
        """Returns unused slots when this backward ends."""
        if self._has_asked and self._graph_task != graph_task:
            self._graph_task = graph_task
            Variable._execution_engine.queue_callback(BackwardEnd(self, graph_task))

    def _ask_until(self, end: int) -> None:
        ahead = [known() for known in self._order[self._begin : end]]
        total_bytes = 0
        wanted: list[int] = []
        for position, slot in enumerate(ahead, self._begin):
            if slot is not None:
                total_bytes += slot.shard.size_bytes
                if total_bytes > _AHEAD_BYTES:
                    break
                is_coming = slot.shard.shard_id in self._coming
                if position >= self._end and not (is_coming or slot.present or slot.is_sealed):
                    wanted.append(slot.shard.shard_id)
            self._end = max(self._end, position + 1)
        if wanted:
            self._plane.ask_ahead(wanted)
            self._has_asked = True

    def _return_slots(self) -> None:
        if self._has_asked:
            self._plane.forget_asked()
        self._has_asked = False
        self._begin = self._end = 0

    def end_backward(self, graph_task: int) -> None:
        """Backward is complete or has raised. Ignored if another backward has begun meanwhile."""
        with self._lock:
            if graph_task == self._graph_task:
                self._return_slots()
                self._graph_task = _NO_TASK

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        with self._lock:
            self._return_slots()
            if self._next_order:
                self._order, self._next_order = list(self._next_order), {}
                self._position = {
                    slot.shard.shard_id: position
                    for position, known in enumerate(self._order)
                    if (slot := known()) is not None
                }
