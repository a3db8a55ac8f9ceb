"""Whether the value of a parameter in this process lacks its last update."""

from __future__ import annotations

from enum import Enum, auto


class _State(Enum):
    """none → taken → pending → none; taken → none if the step is not made; none → pending if a
    commit, or a saved state, says so."""

    none = auto()  # it is the value that memd has
    taken = auto()  # a delayed step has the gradient
    pending = auto()  # memd has made the update


class DelayedValue:
    """That of one parameter that stays in this process. Its target calls, with the turn of the
    transaction; any thread may ask."""

    def __init__(self) -> None:
        self._state = _State.none
        self._is_wanted = False
        self._is_stored = False
        self._checksum: int | None = None

    @property
    def is_wanted(self) -> bool:
        """The next step's update comes to the parameter with the step after it."""
        return self._is_wanted

    @property
    def is_late(self) -> bool:
        """The value here is not to be the new one once the step is made."""
        return self._state is not _State.none

    @property
    def is_taken(self) -> bool:
        """The commit that is being made contains the update: memd has still the value of here."""
        return self._state is _State.taken

    @property
    def is_pending(self) -> bool:
        """memd has another value than the parameter."""
        return self._state is _State.pending

    @property
    def is_stored(self) -> bool:
        """The commit that made the update has the value of here."""
        return self._is_stored

    @property
    def checksum(self) -> int | None:
        """That of the value which is to be here while an update is pending; None: its target
        has one of its own."""
        return self._checksum

    def begin_step(self, *, is_wanted: bool) -> None:
        """Nothing is pending. The update of the step that begins may be delayed."""
        assert self._state is _State.none, self._state
        self._is_wanted = is_wanted

    def take(self, checksum: int | None) -> None:
        """The step has the gradient."""
        if self._is_wanted:
            self._state, self._is_stored, self._checksum = _State.taken, True, checksum

    def undo(self) -> None:
        """The step was not made."""
        if self._state is _State.taken:
            self._state = _State.none

    def note_made(self) -> None:
        """memd has made the update."""
        if self._state is _State.taken:
            self._state = _State.pending

    def note_pending(self, checksum: int | None, *, is_stored: bool) -> None:
        """memd has a newer value than the parameter, by what a commit or a saved state says."""
        self._state, self._is_stored, self._checksum = _State.pending, is_stored, checksum

    def end(self) -> None:
        """The value here is memd's."""
        self._state, self._checksum = _State.none, None
