"""A thread that waits for copies to and from a device, so that the trainer's threads need not."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import TYPE_CHECKING

from memd_client.base.interrupts import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Action = Callable[[], None]
    # An event to wait for, and what to do then; None ends the thread.
    Tasks = queue.SimpleQueue[tuple[torch.Event | None, Action] | None]


class _Failure:
    """The first error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        with self._lock:
            return self._error

    def note(self, error: BaseException | None) -> None:
        """None: what came so far is done. Whoever asks afterwards comes after it."""
        with self._lock:
            self._error = self._error or error

    def forget(self) -> None:
        with self._lock:
            self._error = None


class EventThread:
    """Does one thing after another, each when its event has passed. Any thread may call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._tasks: Tasks = queue.SimpleQueue()
        self._failure = _Failure()
        self._thread: threading.Thread | None = None
        # The thread refers to nobody: who drops the last reference to this ends it.
        weakref.finalize(self, self._tasks.put, None).atexit = False

    @property
    def error(self) -> BaseException | None:
        """The first error since `forget_error`."""
        return self._failure.error

    def forget_error(self) -> None:
        """The caller gives up what has failed."""
        self._failure.forget()

    def after(self, event: torch.Event | None, action: Action) -> None:
        """Calls `action` when `event` has passed, and everything that came before is done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._tasks, self._failure), name=self._name, daemon=True
                )
                self._thread.start()
        self._tasks.put((event, action))

    def close(self) -> None:
        """Waits, raises nothing, and ends the thread."""
        self.wait_for_end()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join()

    def wait_for_end(self) -> None:
        """Until everything so far is done, well or not."""
        if self._thread is None:
            return
        done = Latch()
        self.after(None, done.open)
        done.wait()
        # As a waiter knows what the thread has done: the latch may have been open already.
        _ = self.error


def _run(tasks: Tasks, failure: _Failure) -> None:
    while (task := tasks.get()) is not None:
        event, action = task
        error = None
        if event is not None:
            error = _failure_of(event.synchronize)
        failure.note(error)
        error = _failure_of(action)
        if error is not None:
            failure.note(error)
        # While the thread waits it must hold nothing, such as a lease.
        del task, event, action, error


def _failure_of(action: Action) -> BaseException | None:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 # for whoever waits
        return error
    return None
