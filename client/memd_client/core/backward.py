"""The backward that runs in this thread, and what has to be done when it ends."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from memd_client.base.dynamo import untraced
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_graph_task = torch._C._current_graph_task_id
_NO_TASK = -1
_RUN = _engine_run_backward.__code__


class Backward:
    """The outermost backward of one thread. What runs inside it, as torch's reentrant checkpoints
    run a backward each, is part of it and is not its end."""

    def __init__(self, graph_task: int, depth: int) -> None:
        self._graph_task = graph_task
        self._depth = depth
        self._has_ended = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_of_this_thread(self) -> bool:
        return _this_thread.outermost is self

    def is_around(self, graph_task: int) -> bool:
        """Whether this thread's `graph_task` is this backward, or one inside it."""
        return not self._has_ended and (graph_task == self._graph_task or _depth() > self._depth)

    def tell_end(self, listener: Callable[[bool], None]) -> None:
        """Calls `listener` once when it ends: with True if it is complete, and then backward raises
        what `listener` raises; with False if it has raised, and then `listener` must not."""
        self._listeners.append(listener)

    def end(self, *, is_complete: bool) -> None:
        """A second call does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        if self.is_of_this_thread:
            _this_thread.note(None)
        with ExitStack() as calls:  # all of them, even if one raises
            for listener in self._listeners:
                calls.callback(listener, is_complete)
            self._listeners = []


class _End:
    """A callback for the end. torch drops the callbacks of a backward that has raised without a
    call, hence `__del__`."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    @untraced
    def __call__(self) -> None:
        self._backward.end(is_complete=True)

    @untraced
    def __del__(self) -> None:
        self._backward.end(is_complete=False)


class _ThisThread(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self._outermost: Backward | None = None

    @property
    def outermost(self) -> Backward | None:
        return self._outermost

    def note(self, outermost: Backward | None) -> None:
        self._outermost = outermost


_this_thread = _ThisThread()


def is_in_backward() -> bool:
    """Whether this thread runs one."""
    return _graph_task() != _NO_TASK


def note_backward() -> None:
    """A module is called: if that is in backward, a checkpoint computes it again, perhaps in order
    to run a backward inside this one. torch does not tell there what it is inside of."""
    if _graph_task() != _NO_TASK:
        _outermost()


def running_backward(job: str) -> Backward | None:
    """The outermost backward that this thread runs, or None.

    Raises:
        InvalidArgument: it runs one inside another, and memd was not called in the outer one yet.
    """
    if _graph_task() == _NO_TASK:
        return None
    backward = _outermost()
    if backward is None:
        raise InvalidArgument(
            f"job {job!r}: step() was called in a backward inside another, as reentrant "
            "checkpoints run it, and memd can't tell when the outer one ends; checkpoint with "
            "use_reentrant=False, or call step() after backward"
        )
    return backward


def _outermost() -> Backward | None:
    """None if this thread is in a backward inside one that is not known."""
    graph_task = _graph_task()
    known = _this_thread.outermost
    if known is not None:
        if known.is_around(graph_task):
            return known
        known.end(is_complete=False)
    depth = _depth()
    if depth > 1 or (depth == 0 and _is_thread_of_torch()):
        return None
    backward = Backward(graph_task, depth)
    Variable._execution_engine.queue_callback(_End(backward))
    _this_thread.note(backward)
    return backward


def _depth() -> int:
    """How many calls of torch's engine are on this thread's stack; those from C++ not counted."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is _RUN
        frame = frame.f_back
    return count


def _is_thread_of_torch() -> bool:
    """torch runs what is nested deeper than 60 backwards in threads of its own."""
    this_thread = threading.get_ident()
    return all(thread.ident != this_thread for thread in threading.enumerate())
