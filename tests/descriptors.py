"""Descriptors that this process has open, by what they are open on.

A count of all of them is no measure: garbage of an earlier test may close its own meanwhile.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def name_of(fd: int) -> str:
    """A path, or /memfd:NAME."""
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removesuffix(" (deleted)")


def open_names() -> list[str]:
    """One for each descriptor of the process."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(name_of(int(fd.name)))
    return names
