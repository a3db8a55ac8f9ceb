"""Temporary folders of embedded daemons. A process that was killed cannot remove its own, so the
next start of the same user does.

Each folder has a marker that its daemon keeps locked for as long as it runs. A folder is removed
only with that lock, so nobody uses it, and only if folder and marker belong to this user.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MARKER = ".memd-temporary"
_MARKER_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class TemporaryFolder:
    """A new folder with a locked marker. The daemon inherits `lock`, and so keeps it."""

    def __init__(self, parent: Path, *, prefix: str) -> None:
        remove_abandoned(parent, prefix=prefix)
        self._path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        marker = self._path / (_MARKER + ".new")
        self._lock: int | None = os.open(marker, _MARKER_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # With its name it is locked already: nobody may find it otherwise.
        marker.rename(self._path / _MARKER)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def lock(self) -> int:
        """The descriptor that holds the lock, for the daemon's process."""
        assert self._lock is not None
        return self._lock

    def hand_over(self) -> None:
        """The daemon has inherited the lock: this process need not hold it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        self.hand_over()
        shutil.rmtree(self._path, ignore_errors=True)


def remove_abandoned(parent: Path, *, prefix: str) -> None:
    """Removes the temporary folders in `parent` that a killed process of this user has left."""
    for folder in parent.glob(prefix + "*"):
        # Somebody else may remove it at the same time, or may be starting.
        with suppress(OSError):
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    if not _is_ours(folder.lstat(), stat.S_ISDIR):
        return
    marker = folder / _MARKER
    lock = os.open(marker, _MARKER_FLAGS)
    try:
        found = os.fstat(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name may be another's by now.
        if _is_ours(found, stat.S_ISREG) and os.path.samestat(marker.lstat(), found):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _is_ours(found: os.stat_result, has_kind: Callable[[int], bool]) -> bool:
    return found.st_uid == os.geteuid() and has_kind(found.st_mode)
