"""Tells the simulation what orders the threads of Python: starts, joins and locks.

A thread that takes a lock knows what came before its last release. Conditions, events, queues and
futures are made of locks. A lock that was made before `install`, or in C, orders nothing here.

Time passes from thread to thread where one waits for the other: at starts and joins, with what a
`SimpleQueue` has and a `Latch` opens for, and where a thread releases a lock that another has
taken, as conditions do. Who only keeps others out of a block of code holds its lock for no time.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Announce = Callable[[int], None]

_keys = itertools.count(1)  # by Python's lock alone: next() of it is one step
_plain_lock, _plain_rlock = threading.Lock, threading.RLock


class _OrderedLock:
    """A lock, or one that its thread may take again."""

    def __init__(self, lock: Any, order: _Order) -> None:
        self._lock = lock
        self._order = order
        self._key = next(_keys)
        self._owner = 0  # the thread that has taken it last

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner = threading.get_ident()
            self._order.observe(self._key)
        return taken

    def release(self) -> None:
        self._order.publish(self._key)
        if self._owner != threading.get_ident():
            self._order.publish_time(self._key)
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
        self._owner = threading.get_ident()
        self._order.observe(self._key)


class Handover:
    """The time of who gives something, for who takes it."""

    _order: _Order  # since `install`

    def __init__(self) -> None:
        self._key = next(_keys)

    def give(self) -> None:
        self._order.publish_time(self._key)

    def take(self) -> None:
        self._order.observe(self._key)


# typeshed does not list the queue in Python, which `queue` has beside the one in C.
class _TimedQueue(queue._PySimpleQueue):  # type: ignore[name-defined,misc]
    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        handover = Handover()
        handover.give()
        super().put((handover, item), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        handover, item = super().get(block, timeout)
        handover.take()
        return item


class _Order:
    def __init__(self, publish: Announce, publish_time: Announce, observe: Announce) -> None:
        self.publish = publish
        self.publish_time = publish_time
        self.observe = observe

    def lock(self) -> _OrderedLock:
        return _OrderedLock(_plain_lock(), self)

    def rlock(self) -> _OrderedRLock:
        return _OrderedRLock(_plain_rlock(), self)


def install(publish: Announce, publish_time: Announce, observe: Announce) -> None:
    """`publish` what the calling thread knows under a key, or its time, and let it `observe` what
    others did."""
    order = Handover._order = _Order(publish, publish_time, observe)
    # mypy has these down as functions and classes that nobody replaces.
    threading.Lock = order.lock  # type: ignore[assignment]
    threading.RLock = order.rlock  # type: ignore[assignment]
    queue.SimpleQueue = _TimedQueue  # type: ignore[misc]
    _order_starts_and_joins(order)
    _time_latches()


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
                order.publish_time(ended)

        self.run = run  # type: ignore[method-assign]
        self._simulation_ended = ended  # type: ignore[attr-defined]
        order.publish(started)
        order.publish_time(started)
        plain_start(self)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        plain_join(self, timeout)
        ended: int | None = getattr(self, "_simulation_ended", None)
        if ended is not None and not self.is_alive():
            order.observe(ended)

    threading.Thread.start = start  # type: ignore[method-assign]
    threading.Thread.join = join  # type: ignore[method-assign]


def _time_latches() -> None:
    """A thread that comes to an open one has waited for it all the same, by the clock."""
    from memd_client.base.interrupts import Latch  # here: its locks are those from above

    # As above, mypy expects that nobody replaces methods or adds fields.

    plain_make, plain_open, plain_wait = Latch.__init__, Latch.open, Latch.wait

    def make(self: Latch) -> None:
        plain_make(self)
        self._simulation_opened = Handover()  # type: ignore[attr-defined]

    def open_it(self: Latch) -> None:
        self._simulation_opened.give()  # type: ignore[attr-defined]
        plain_open(self)

    def wait(self: Latch) -> None:
        plain_wait(self)
        self._simulation_opened.take()  # type: ignore[attr-defined]

    Latch.__init__ = make  # type: ignore[method-assign]
    Latch.open, Latch.wait = open_it, wait  # type: ignore[method-assign]
