"""Threads that use a value which a step has replaced since."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Condition, RLock
from typing import TYPE_CHECKING

from memd_client.base.interrupts import safe_point
from memd_client.errors import MemdError
from memd_client.parameters.thread_uses import must_wait, note_step, this_thread

if TYPE_CHECKING:
    from memd_client.parameters.thread_uses import ThreadUses

# How long a use waits until they have left. They are in module calls, which take no longer than a
# lease, or in gather().
_LEAVE_S = 60.0
# A step that failed outdates nothing, and wakes nobody.
_LOOK_S = 0.2


@dataclass(slots=True)
class OldUsers:
    """The users of one parameter whose value is outdated. The parameter's lock serialises, but for
    `undo_update` and who only asks."""

    _left: Condition
    # The clock when a step took the parameter while other threads used it, until they have left;
    # otherwise 0.
    _outdated_at: int = 0
    # How the value that they use was named.
    _value_count: int = 0
    _is_by_update: bool = False  # by the last step, and not by one before it

    @staticmethod
    def under(lock: RLock) -> OldUsers:
        return OldUsers(Condition(lock))

    @property
    def outdated_at(self) -> int:
        """The clock when the value was replaced; 0: nobody uses an old one."""
        return self._outdated_at

    @property
    def value_count(self) -> int:
        """How the value that they use was named."""
        return self._value_count

    def begin_update(self, user_count: int, value_count: int) -> None:
        """A step will change the value of this name, which so many use."""
        self._is_by_update = bool(user_count) and not self._outdated_at
        if user_count:
            now = note_step(this_thread.uses)
            # A thread that uses the value of an earlier step still does.
            if self._is_by_update:
                # In this order: who asks for the name looks at them in the other.
                self._value_count = value_count
                self._outdated_at = now

    def undo_update(self) -> None:
        """That step was not made."""
        if self._is_by_update:
            self._outdated_at = 0

    def leave(self) -> None:
        """Nobody uses the value any more."""
        if self._outdated_at:
            self._outdated_at = 0
            self._left.notify_all()

    def wait(self, uses: ThreadUses, who: str) -> None:
        """Until they have left, if the thread of `uses` began after the step.

        Args:
            who: the job and the parameter, for messages.
        """
        deadline = time.monotonic() + _LEAVE_S
        while must_wait(uses, self._outdated_at):
            safe_point()
            if not self._left.wait(min(_LOOK_S, deadline - time.monotonic())):
                if time.monotonic() < deadline:
                    continue
                raise MemdError(
                    f"{who} is still in use by another thread, {_LEAVE_S:.0f} s after a step has "
                    "replaced that value; leave gather() and module calls there"
                )
