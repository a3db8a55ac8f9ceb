"""Files that others see whole or not at all, written without filling the page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Self

from memd_client.base.interrupts import safe_point
from memd_client.checkpoints.checkpoint_files import os_error
from memd_client.checkpoints.partial_name import make_locked, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

# The kernel writes one window while the next is filled; no more of a file is dirty or cached.
_WINDOW_BYTES = 16 << 20
_SYNC_FILE_RANGE_WAIT_BEFORE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT_AFTER = 4
_WAIT = _SYNC_FILE_RANGE_WAIT_BEFORE | _SYNC_FILE_RANGE_WRITE | _SYNC_FILE_RANGE_WAIT_AFTER

_WRITE_ERRORS = frozenset((errno.EIO, errno.ENOSPC, errno.EDQUOT))

_sync_file_range: Any = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class WholeFile(AbstractContextManager["WholeFile"]):
    """A new file under a name of its own, beside the place that it will take: `place` puts it
    there. Otherwise it is removed when the context is left. If the process is killed, the next
    file for this place removes it: its writer keeps it locked.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """
        Args:
            path: where it will be; what is there stays until then.
            size_bytes: of the whole file, for the message when the disk is full.

        Raises:
            InvalidArgument: the folder does not exist, or no file can be made there.
        """
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0
        self._written_back = 0
        self._scattered_bytes = 0  # written at places, and perhaps not on disk
        self._is_placed = False
        remove_abandoned(path.parent, re.escape(path.name))
        self._partial, self._file = self._try(make_locked, path, _new_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The name goes while it is locked: nobody else's file can have it.
        if not self._is_placed:
            with suppress(OSError):
                self._partial.unlink()
        os.close(self._file)

    def write(self, data: memoryview | bytes) -> None:
        """Appends.

        Raises:
            CapacityError: the disk, the quota or the largest file is full.
            DeviceError: a write failed.
        """
        rest = memoryview(data)
        while rest:
            safe_point()
            count = self._try(os.write, self._file, rest[:_WINDOW_BYTES])
            rest = rest[count:]
            self._offset += count
            if self._offset - self._written_back >= 2 * _WINDOW_BYTES:
                self._write_back()

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Writes at a place, instead of behind what is there. Nothing is appended afterwards.

        Raises:
            CapacityError, DeviceError: as of `write`.
        """
        rest = memoryview(data)
        while rest:
            safe_point()
            count = self._try(os.pwrite, self._file, rest[:_WINDOW_BYTES], offset)
            offset, rest = offset + count, rest[count:]
            self._scattered_bytes += count
            if self._scattered_bytes >= _WINDOW_BYTES:
                self._scattered_bytes = 0
                self._try(_write_range, self._file, 0, 0, _WAIT)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """The bytes are on disk when it returns; the name is not."""
        self._try(os.fsync, self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def place(self) -> None:
        """Replaces what is at the path. Call `finish` before, and `sync_folder` after it."""
        self._try(os.rename, self._partial, self._path)
        self._is_placed = True

    def _write_back(self) -> None:
        """Begins to write the last window, and waits for those before it."""
        begin, self._written_back = self._written_back, self._offset - _WINDOW_BYTES
        length = self._written_back - begin
        self._try(_write_range, self._file, self._written_back, 0, _SYNC_FILE_RANGE_WRITE)
        self._try(_write_range, self._file, begin, length, _WAIT)
        os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_DONTNEED)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            raise os_error(error, self._path, needed_bytes=self._size_bytes) from error


def sync_folder(folder: Path) -> None:
    """The names in it are on disk.

    Raises:
        DeviceError: they may not be.
    """
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise os_error(error, folder) from error


def _new_file(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o666)


def _write_range(file: int, offset: int, length: int, flags: int) -> None:
    # A file system that knows no ranges writes all in `finish`.
    if _sync_file_range(file, offset, length, flags) and ctypes.get_errno() in _WRITE_ERRORS:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
