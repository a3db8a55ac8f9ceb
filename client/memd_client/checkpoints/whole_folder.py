"""Folders that others see whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memd_client.checkpoints.checkpoint_files import os_error
from memd_client.checkpoints.partial_name import make_locked, remove_abandoned
from memd_client.checkpoints.whole_file import sync_folder
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_AT_CWD = -100
_EXCHANGE = 2

_renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
_renameat2.argtypes = (
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
    ctypes.c_uint,
)


class WholeFolder(AbstractContextManager["WholeFolder"]):
    """A new folder under a name of its own, beside the place that it will take: `place` puts it
    there. Otherwise it is removed when the context is left. If the process is killed, the next
    folder for this place removes it: its writer keeps it locked.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: where it will be; what is there stays until then.

        Raises:
            InvalidArgument: a file is there, or no folder can be made.
        """
        self._path = Path(os.path.realpath(path))
        if self._path.exists() and not self._path.is_dir():
            raise InvalidArgument(f"{path} is a file, and a checkpoint is a folder")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self._path.parent, re.escape(self._path.name), _remove)
            self._partial, self._lock = make_locked(self._path, _new_folder)
        except OSError as error:
            raise os_error(error, path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Under this name is what nobody needs: what was begun, or what was replaced.
        _remove(self._partial)
        os.close(self._lock)

    @property
    def path(self) -> Path:
        """Write here."""
        return self._partial

    def place(self, keeps: Callable[[str], bool]) -> None:
        """Replaces the folder at the path. A file of that folder which this one does not have stays
        if `keeps` is true of its name.

        Raises:
            InvalidArgument: the file system cannot exchange two folders. Nothing has changed.
            CapacityError, DeviceError: nothing has changed.
        """
        try:
            _sync_files(self._partial)
            if not self._path.exists():
                self._partial.rename(self._path)
            else:
                _take_rights(self._path, self._partial)
                _link_files(self._path, self._partial, keeps)
                _exchange(self._partial, self._path)
                # Files that somebody has put there meanwhile.
                _link_files(self._partial, self._path, keeps)
        except OSError as error:
            raise os_error(error, self._path) from error
        sync_folder(self._path.parent)


def _new_folder(path: Path) -> int | None:
    path.mkdir()
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    if not _renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE):
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise InvalidArgument(
            f"{other} is there, and its file system cannot exchange two folders, so there would be "
            "a moment without a checkpoint; save into a new folder"
        )
    raise OSError(number, os.strerror(number))


def _link_files(old: Path, new: Path, keeps: Callable[[str], bool]) -> None:
    """The files of `old` that `new` does not have are in both from now on."""
    for found in old.iterdir():
        target = new / found.name
        if found.is_dir() and not found.is_symlink():
            if not target.exists():
                target.mkdir()
                _take_rights(found, target)
            _link_files(found, target, lambda name: True)
        elif keeps(found.name) and not target.exists():
            os.link(found, target, follow_symlinks=False)


def _take_rights(old: Path, new: Path) -> None:
    """`new` takes the place of `old`: mode, attributes, and the group where that is allowed."""
    with suppress(PermissionError):
        os.chown(new, -1, old.stat().st_gid)
    shutil.copystat(old, new)


def _sync_files(folder: Path) -> None:
    """The files in it, and their names, are on disk. Libraries write some without waiting."""
    for found in folder.iterdir():
        if found.is_symlink():
            continue
        if found.is_dir():
            _sync_files(found)
            continue
        file = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    sync_folder(folder)
