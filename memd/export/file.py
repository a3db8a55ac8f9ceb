"""A file of an export, before its bytes are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd.export.contents import Place, Source


@dataclass(frozen=True, slots=True)
class Ending:
    """Bytes at `end` that depend on the CRC-32 of those from `begin` to there."""

    begin: int
    end: int
    encode: Callable[[int], bytes]


@dataclass(slots=True)
class File:
    """`begins` has where each source's bytes begin, and `ends` where they end; `writes` is known
    from the start, and `endings` once all of these are there."""

    name: str
    size_bytes: int
    writes: list[tuple[int, bytes]]
    begins: dict[Place, int] = field(default_factory=dict)
    ends: dict[Place, int] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)

    def add_source(self, source: Source, begin: int) -> int:
        """Its bytes are there. Returns where they end."""
        self.begins[source.place] = begin
        self.ends[source.place] = begin + source.size_bytes
        return self.ends[source.place]
