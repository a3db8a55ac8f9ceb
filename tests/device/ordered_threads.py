"""Tells the simulation what orders the threads of Python: starts, joins and locks.

A thread that takes a lock knows what came before its last release. Conditions, events, queues and
futures are made of locks. A lock that was made before `install`, or in C, orders nothing here.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_keys = itertools.count(1)  # by Python's lock alone: next() of it is one step
_plain_lock, _plain_rlock = threading.Lock, threading.RLock


class _OrderedLock:
    """A lock, or one that its thread may take again."""

    def __init__(self, lock: Any, order: _Order) -> None:
        self._lock = lock
        self._order = order
        self._key = next(_keys)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._order.observe(self._key)
        return taken

    def release(self) -> None:
        self._order.publish(self._key)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        """`locked`, and `_is_owned` and `_at_fork_reinit` of the lock in use."""
        return getattr(self._lock, name)


class _OrderedRLock(_OrderedLock):
    # Condition gives all levels of such a lock back at once, and takes them again.
    def _release_save(self) -> Any:
        self._order.publish(self._key)
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._order.observe(self._key)


class _Order:
    def __init__(self, publish: Callable[[int], None], observe: Callable[[int], None]) -> None:
        self.publish = publish
        self.observe = observe

    def lock(self) -> _OrderedLock:
        return _OrderedLock(_plain_lock(), self)

    def rlock(self) -> _OrderedRLock:
        return _OrderedRLock(_plain_rlock(), self)


def install(publish: Callable[[int], None], observe: Callable[[int], None]) -> None:
    """`publish` what the calling thread knows under a key, and let it `observe` what others did."""
    order = _Order(publish, observe)
    # mypy has these down as functions and classes that nobody replaces.
    threading.Lock = order.lock  # type: ignore[assignment]
    threading.RLock = order.rlock  # type: ignore[assignment]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc]
    _order_starts_and_joins(order)


def _order_starts_and_joins(order: _Order) -> None:
    plain_start, plain_join = threading.Thread.start, threading.Thread.join

    def start(self: threading.Thread) -> None:
        started, ended = next(_keys), next(_keys)
        plain_run = self.run

        def run() -> None:
            order.observe(started)
            try:
                plain_run()
            finally:
                order.publish(ended)

        self.run = run  # type: ignore[method-assign]
        self._simulation_ended = ended  # type: ignore[attr-defined]
        order.publish(started)
        plain_start(self)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        plain_join(self, timeout)
        ended: int | None = getattr(self, "_simulation_ended", None)
        if ended is not None and not self.is_alive():
            order.observe(ended)

    threading.Thread.start = start  # type: ignore[method-assign]
    threading.Thread.join = join  # type: ignore[method-assign]
