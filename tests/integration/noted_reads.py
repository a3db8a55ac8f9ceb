"""Notes the reads of mapped files that a load makes, and those that it announces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memd_client.base.mapped_files import FileBytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


class NotedReads:
    """Notes them from now on, each as its first byte in the file and its size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads: list[tuple[int, int]] = []
        self._fetched: list[tuple[int, int]] = []
        read, advise = FileBytes.read, os.posix_fadvise

        def noted_read(source: FileBytes, into: memoryview) -> bool:
            self._reads.append((source.offset_bytes, len(into)))
            return read(source, into)

        def noted_advice(file: int, begin: int, size_bytes: int, advice: int) -> None:
            if advice == os.POSIX_FADV_WILLNEED:
                self._fetched.append((begin, size_bytes))
            advise(file, begin, size_bytes, advice)

        monkeypatch.setattr(FileBytes, "read", noted_read)
        monkeypatch.setattr(os, "posix_fadvise", noted_advice)

    @property
    def sizes(self) -> list[int]:
        return [size_bytes for _, size_bytes in self._reads]

    def assert_fetched(self) -> None:
        """All that was read, in the order of the reads, and nothing else."""
        assert _joined(self._fetched) == _joined(self._reads)


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, size_bytes in runs:
        if joined and sum(joined[-1]) == begin:
            joined[-1] = joined[-1][0], joined[-1][1] + size_bytes
        else:
            joined.append((begin, size_bytes))
    return joined
