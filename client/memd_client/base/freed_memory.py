"""Returning freed memory to the system."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEPT_BYTES_MAX = 16 << 20


def return_freed_memory() -> None:
    """glibc keeps freed memory, so all but the largest parameters would stay in this process's
    resident size. Other C libraries return it by themselves and do not have this function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PassingBytes:
    """Bytes that are in this process one after the other. What they leave is returned in time."""

    def __init__(self) -> None:
        self._kept_bytes = 0

    def passed(self, size_bytes: int) -> None:
        """So many were here, and their memory is free."""
        self._kept_bytes += size_bytes
        if self._kept_bytes >= _KEPT_BYTES_MAX:
            self._kept_bytes = 0
            return_freed_memory()


@contextmanager
def passing_bytes() -> Iterator[PassingBytes]:
    """Around a save or a load: it does not add to what training has freed, and leaves nothing."""
    return_freed_memory()
    try:
        yield PassingBytes()
    finally:
        return_freed_memory()
