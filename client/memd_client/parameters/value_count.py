"""The name of a parameter's value: the number of its changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ValueCount:
    """Counts the changes of one value. The name of an update that was undone is not used again:
    autograd could take what it saved under that name for the later value.

    The parameter's lock serialises, but for `undo_update`.
    """

    _count: int = 0
    # `_count` before the update of the last step, and after it.
    _updated_from: int = 0
    _updated_count: int = 0
    _undone_count: int = 0  # changes after `_count` that were undone

    @property
    def now(self) -> int:
        """The present name."""
        return self._count

    def after(self, change_count: int) -> int:
        """The name once so many more changes are noted."""
        return self._count + self._undone_count + change_count if change_count else self._count

    def note_changes(self, change_count: int) -> None:
        """At least one."""
        self._count += self._undone_count + change_count
        self._undone_count = 0

    def begin_update(self) -> None:
        """A step will change the value."""
        self._updated_from = self._count

    def end_update(self) -> None:
        """And has: the change is noted."""
        self._updated_count = self._count

    def undo_update(self) -> None:
        """That step was not made. If something came after it, nothing happens."""
        if self._count == self._updated_count:
            self._undone_count = self._count - self._updated_from
            self._count = self._updated_from
