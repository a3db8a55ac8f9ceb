"""The simulated clock's record of a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENGINES = ("compute", "copy_in", "copy_out", "host")
_STREAMS = 33  # of a device, as native/vector_clock.h numbers them


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel, a copy, or the wait of a host thread."""

    name: str
    engine: str
    device: int  # -1: the host
    stream: int  # of the device; of the host the thread's number, from 1
    begin_ns: int
    end_ns: int
    moved_bytes: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(slots=True)
class Timeline:
    """Entries in the order in which they were queued. A device has one engine of a kind, which does
    one thing at a time."""

    _entries: list[Entry] = field(default_factory=list)

    def fill(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        for name, row in zip(names, zip(*[iter(numbers)] * 5, strict=True), strict=True):
            actor, engine, begin_ns, end_ns, moved_bytes = row
            device, stream = divmod(actor, _STREAMS) if actor >= 0 else (-1, -actor)
            self._entries.append(
                Entry(name, ENGINES[engine], device, stream, begin_ns, end_ns, moved_bytes)
            )

    def entries(self, *engines: str, device: int | None = None) -> list[Entry]:
        """Those of some engines; of all where none is named."""
        return [
            entry
            for entry in self._entries
            if (not engines or entry.engine in engines) and device in (None, entry.device)
        ]

    def busy_ns(self, *engines: str, device: int | None = None) -> int:
        """How long one of these engines at least was busy."""
        return sum(end - begin for begin, end in _merged(self.entries(*engines, device=device)))

    def overlap_ns(self, one: str, other: str, *, device: int | None = None) -> int:
        """How long both engines were busy."""
        alone = self.busy_ns(one, device=device) + self.busy_ns(other, device=device)
        return alone - self.busy_ns(one, other, device=device)

    @property
    def span_ns(self) -> int:
        """From the first beginning to the last end."""
        if not self._entries:
            return 0
        first = min(entry.begin_ns for entry in self._entries)
        return max(entry.end_ns for entry in self._entries) - first


def _merged(entries: Iterable[Entry]) -> list[tuple[int, int]]:
    """Spans of time without overlaps."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((entry.begin_ns, entry.end_ns) for entry in entries):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
