"""In which order backward makes gradients, so that their slots are there before they are."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import TYPE_CHECKING, Protocol

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.shard import Shard

# A request takes up to several milliseconds where compute threads keep all cores busy, which is as
# long as a layer's backward (one of 8 layers of 512: 3 ms). Asked for in halves of this many, so
# that the daemon wakes once for several.
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


class BackwardEnd:
    """A callback of one backward. torch calls none where backward raised, but drops them all."""

    def __init__(self, order: GradientOrder, graph_task: int) -> None:
        self._order = weakref.ref(order)
        self._graph_task = graph_task

    def __call__(self) -> None:
        order = self._order()
        if order is not None:
            order.end_backward(self._graph_task)

    def __del__(self) -> None:
        self()


class Asking(Protocol):
    """What it needs of `memd_native.ClientSession`."""

    def ask_ahead(self, shard_ids: Sequence[int]) -> None: ...
    def forget_asked(self) -> bool: ...


class GradientOrder:
    """Asks for the slots that backward will need next, as the one before it did. Another order
    costs what it cost before: a wait for each. Any thread may call.

    Only slots without a gradient are asked for, so that none which a step takes is leased still;
    what is not used is given back at the end of backward, also of one that ended early.
    """

    def __init__(self, plane: Asking) -> None:
        self._may_ask = True
        self._plane = plane
        self._order: list[weakref.ref[Slot]] = []
        self._position: dict[int, int] = {}  # shard id → in `_order`
        self._next_order: list[weakref.ref[Slot]] = []
        self._begin = 0  # in `_order`: what is expected next
        self._end = 0  # what is asked for ends here
        self._has_asked = False
        self._graph_task = _NO_TASK  # the backward whose end is waited for
        self._expected_task = _NO_TASK  # the last one that was expected to make gradients
        # Reentrant: a BackwardEnd that torch does not take ends inside.
        self._lock = RLock()

    def expect_backward(self, shard_id: int) -> None:
        """Backward uses a parameter, and no step is on its way or open: asks for the first slots,
        for which the first gradient would wait while all cores compute. Where the last backward
        made no gradient of the parameter it is one of another model."""
        graph_task = _graph_task()
        if graph_task in (self._expected_task, _NO_TASK) or shard_id not in self._position:
            return
        with self._lock:
            self._expected_task = graph_task
            if self._may_ask and not self._end:
                self._ask_until(_AHEAD_COUNT // 2)
                self._give_back_after(graph_task)

    def stop_asking(self) -> None:
        """From now on no slot is taken before its gradient is there."""
        self._may_ask = False

    def came(self, slot: Slot, *, is_first: bool) -> None:
        """A gradient is in its slot; `is_first`: since the last step."""
        with self._lock:
            if is_first:
                self._next_order.append(weakref.ref(slot))
            position = self._position.get(slot.shard.shard_id)
            graph_task = _graph_task()
            if position is None or not self._may_ask or graph_task == _NO_TASK:
                return
            if not self._begin <= position < self._end:
                # Another place than the one it was going to.
                self._give_back()
                self._end = position + 1
            self._begin = position + 1
            if self._end - self._begin > _AHEAD_COUNT // 2:
                return
            self._ask_until(position + 1 + _AHEAD_COUNT)
            self._give_back_after(graph_task)

    def _give_back_after(self, graph_task: int) -> None:
        """What is asked for now, once this backward ends."""
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
                if position >= self._end and not slot.present:
                    wanted.append(slot.shard.shard_id)
            self._end = max(self._end, position + 1)
        if wanted:
            self._plane.ask_ahead(wanted)
            self._has_asked = True

    def _give_back(self) -> None:
        if self._has_asked:
            self._plane.forget_asked()
        self._has_asked = False
        self._begin = self._end = 0

    def end_backward(self, graph_task: int) -> None:
        """Whether it came to its end or raised. One that is over and another that has begun do not
        concern each other."""
        with self._lock:
            if graph_task == self._graph_task:
                self._give_back()
                self._graph_task = _NO_TASK

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        with self._lock:
            self._give_back()
            if self._next_order:
                self._order, self._next_order = self._next_order, []
                self._position = {
                    slot.shard.shard_id: position
                    for position, known in enumerate(self._order)
                    if (slot := known()) is not None
                }
