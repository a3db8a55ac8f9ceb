"""Names beside a place that a file or folder will take. Its writer keeps it locked until it is
there, so the next writer removes what a killed one has left, and nothing else."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SUFFIX = ".partial"


def make_locked(path: Path, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """
    Args:
        path: the place.
        make: creates something under a new name, and opens it. None: it was removed before.

    Returns:
        That name beside `path`, and the descriptor, which holds the lock.
    """
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_SUFFIX}")
        opened = make(partial)
        # Before it is locked, it may be taken for an abandoned one, and removed.
        if opened is not None:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if partial.exists():
                return partial, opened
            os.close(opened)


def remove_abandoned(
    folder: Path, place: str, remove: Callable[[Path], object] = Path.unlink
) -> None:
    """Removes what is for places in `folder` whose names match the regular expression `place`, and
    whose writer was killed."""
    its = re.compile(rf"\.({place})\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}")
    with suppress(OSError):
        for found in folder.iterdir():
            if its.fullmatch(found.name):
                # Somebody else may remove it at the same time, or be writing it.
                with suppress(OSError):
                    _remove_if_unlocked(found, remove)


def _remove_if_unlocked(partial: Path, remove: Callable[[Path], object]) -> None:
    opened = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(partial)
    finally:
        os.close(opened)
