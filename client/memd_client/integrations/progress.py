"""A library's part of a commit: the place of its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping


class Loop(Protocol):
    """The object of a library that makes the commits."""

    def progress(self) -> Mapping[str, Any]:
        """Plain data: what a commit needs to go on, beside what is tracked."""
        ...

    def note_loaded(self, state: dict[str, Any]) -> None:
        """`state` is that of the commit. Random numbers are not restored yet."""
        ...


class Progress:
    """An object that the session tracks in the loop's place."""

    def __init__(self, loop: Loop, *, what: str) -> None:
        """
        Args:
            what: the loop, for messages.
        """
        # A session that refers to what refers to it ends late.
        self._loop = ref(loop)
        self._what = what

    def state_dict(self) -> dict[str, Any]:
        return dict(self._alive().progress())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._alive().note_loaded(state)

    def _alive(self) -> Loop:
        loop = self._loop()
        if loop is None:
            raise InvalidArgument(f"{self._what} that makes the commits does not exist any more")
        return loop
