"""The parameters that each thread has in place, and the step after which it began to use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock, local
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class _Clock:
    """Ticks when a step takes a parameter that is in use."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now = 0

    @property
    def now(self) -> int:
        return self._now

    def tick(self) -> int:
        with self._lock:
            self._now += 1
            return self._now


_clock = _Clock()


@dataclass(slots=True)
class ThreadUses:
    """The uses of one thread: which parameters it has in place, and how often each. They change
    with the lock of the parameter's residency."""

    counts: dict[int, int] = field(default_factory=dict)  # by id: whoever uses one refers to it
    # The clock at the first of these uses, or at the thread's own last step.
    since: int = 0


def add_use(uses: ThreadUses, parameter: torch.Tensor) -> None:
    """One use more."""
    key, counts = id(parameter), uses.counts
    if not counts:
        uses.since = _clock.now
    counts[key] = counts.get(key, 0) + 1


def remove_use(uses: ThreadUses, parameter: torch.Tensor) -> None:
    """One use less."""
    key, counts = id(parameter), uses.counts
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1


def note_step(uses: ThreadUses) -> int:
    """The thread's own step takes a parameter that is in use. Returns the clock of that."""
    uses.since = _clock.tick()
    return uses.since


def must_wait(uses: ThreadUses, outdated_at: int) -> bool:
    """Whether old users have to leave a value that a step has outdated, at `outdated_at` on the
    clock, or 0, before the thread uses the new one. A thread that was using parameters before that
    step goes on with the old one: if it waited, the threads that wait for it would wait for
    ever."""
    return outdated_at > 0 and (not uses.counts or outdated_at <= uses.since)


@dataclass
class _ThisThread(local):
    """Each thread has its own."""

    uses: ThreadUses = field(default_factory=ThreadUses)


this_thread = _ThisThread()


def is_in_place_here(parameter: torch.Tensor) -> bool:
    """Whether this thread uses it: then no other thread moves its bytes."""
    return id(parameter) in this_thread.uses.counts
