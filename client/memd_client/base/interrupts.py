"""A KeyboardInterrupt is raised between memd's actions, not within them.

Python runs the handler of SIGINT between any two instructions of the main thread. An exception
there, between a lease and the note that it is held, leaves a parameter in use for ever, and in a
call of gRPC it leaves a call that nobody ends. So the handler of this module looks at the frames of
the main thread: while memd works, the interrupt is deferred. It is raised in the user's code, in
torch, and in functions that are marked `interruptible`. Without an interrupt nothing is done.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

FunctionT = TypeVar("FunctionT", bound="Callable[..., Any]")

_FOLDER = f"{Path(__file__).parents[1]}/"
# A training library runs its loop inside of these: they are as code of the user.
_INTEGRATIONS = f"{_FOLDER}integrations/"
_interruptible: set[CodeType] = set()
# When a deferred interrupt is tried again. Between two module calls memd works for less.
_AGAIN_S = 0.001


def interruptible(function: FunctionT) -> FunctionT:
    """Interrupts are raised in `function` and what it calls. Its callers see them as they see
    other exceptions: they undo what they have begun."""
    _interruptible.add(function.__code__)
    return function


@interruptible
def safe_point() -> None:
    """A deferred interrupt is raised here: for loops that may be long."""


@interruptible
def pause(seconds: float) -> None:
    """Sleeps."""
    time.sleep(seconds)


@interruptible
def call_user(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls code of the user, or of torch, which may take as long as it likes."""
    return function(*args, **kwargs)


class Latch:
    """Opens once. An interrupt may end a wait; the latch is as before."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []  # each is locked until the latch opens

    def open(self) -> None:
        """Called once."""
        self._is_open = True
        for waiter in self._waiters:
            waiter.release()

    def wait(self) -> None:
        """Until it is open."""
        if self._is_open:
            return
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # It may have opened before it saw the waiter.
        if not self._is_open:
            _acquire(waiter)


@interruptible
def _acquire(waiter: threading.Lock) -> None:
    waiter.acquire()  # nobody else waits for this lock, so nobody misses it


@dataclass(slots=True)
class Interrupts:
    """Two different counts say that calls may have ended without a word in between."""

    raised_count: int = 0
    is_deferred: bool = False


interrupts = Interrupts()


def defer_interrupts() -> None:
    """From now on interrupts are deferred inside memd. A handler of the user or of asyncio stays.
    Only the main thread may change handlers."""
    if (
        threading.get_ident() == threading.main_thread().ident
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    if not _is_deferred_in(frame):
        interrupts.is_deferred = False
        interrupts.raised_count += 1
        signal.default_int_handler(number, frame)
    if not interrupts.is_deferred:
        interrupts.is_deferred = True
        _thread.start_new_thread(_interrupt_again, ())


def _interrupt_again() -> None:
    """In another thread: a signal that the handler sent itself would interrupt the handler. And it
    is a signal, which ends a wait that has begun meanwhile."""
    time.sleep(_AGAIN_S)
    was_deferred, interrupts.is_deferred = interrupts.is_deferred, False
    if was_deferred and signal.getsignal(signal.SIGINT) is _handle:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_deferred_in(frame: FrameType | None) -> bool:
    """The nearest frame of memd decides. One that is `interruptible` called what is nearer."""
    while frame is not None:
        if frame.f_code in _interruptible:
            return False
        name = frame.f_code.co_filename
        if name.startswith(_FOLDER) and not name.startswith(_INTEGRATIONS):
            return True
        frame = frame.f_back
    return False
