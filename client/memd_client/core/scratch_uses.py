"""How many bytes of scratch a session has."""

from __future__ import annotations

import threading


class ScratchUses:
    """The bytes of scratch that a session has, over all its models. Any thread may call."""

    def __init__(self) -> None:
        # A finalizer gives slots back, perhaps within another change.
        self._lock = threading.RLock()
        self._is_expected = False
        self._held_bytes = 0
        self._held_bytes_max = 0

    @property
    def is_expected(self) -> bool:
        return self._is_expected

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def held_bytes_max(self) -> int:
        return self._held_bytes_max

    def expect(self) -> None:
        """A model of the session will use some."""
        self._is_expected = True

    def change(self, more_bytes: int) -> None:
        with self._lock:
            self._held_bytes += more_bytes
            self._held_bytes_max = max(self._held_bytes_max, self._held_bytes)
