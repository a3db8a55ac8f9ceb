"""Returning freed memory to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """glibc keeps freed memory, so all but the largest parameters would stay in this process's
    resident size. Other C libraries return it by themselves and do not have this function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
