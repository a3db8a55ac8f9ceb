"""The names that threads of one session use, and those that are being deleted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class NameUses:
    """Keeps the deletion of a name apart from its uses. Any thread may call.

    The daemon gives the id of a deleted shard to the next tensor at once, unless another session
    may know it. In this session no thread may then be between looking the id up and leasing it: a
    deletion waits for the uses that have begun, and a use waits for the deletion.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._use_counts: dict[str, int] = {}
        self._deleting: set[str] = set()

    # A get passes through both: with a Counter and the Condition's own methods they took 1.5 µs.
    def begin_use(self, names: Sequence[str]) -> None:
        counts = self._use_counts
        with self._lock:
            if self._deleting:
                self._changed.wait_for(lambda: self._deleting.isdisjoint(names))
            for name in names:
                counts[name] = counts.get(name, 0) + 1

    def end_use(self, names: Sequence[str]) -> None:
        counts = self._use_counts
        with self._lock:
            for name in names:
                if counts[name] == 1:
                    del counts[name]
                else:
                    counts[name] -= 1
            if self._deleting:
                self._changed.notify_all()

    def begin_deletion(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: name not in self._deleting)
            self._deleting.add(name)
            try:
                self._changed.wait_for(lambda: name not in self._use_counts)
            except BaseException:
                self._deleting.remove(name)
                self._changed.notify_all()
                raise

    def end_deletion(self, name: str) -> None:
        with self._changed:
            self._deleting.remove(name)
            self._changed.notify_all()
