"""The folder that an export makes: whole under its name, or a part under another one.

`NAME.partial` beside the place holds the files and a log. The log names what is on disk, so that a
later run goes on there: a line is written after the bytes that it names are synced, and each run of
bytes is compared with its checksum before anything is added. The caller's process does all of this,
with the caller's rights.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memd.refusal import Refused, StatusCode
from memd.sizes import format_size
from memd_native import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from memd.export.file import File
    from memd.export.formats import RunChecksum

_SUFFIX = ".partial"
_FILES = "files"
_LOG = "log"
_LOG_VERSION = 1
_LOG_BYTES_MAX = 256 << 20
# So much is written between two lines of the log: a later run reads no more of it again in vain.
# One window is synced while the next is written; more is never dirty in the page cache.
_WINDOW_BYTES = 64 << 20
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Window:
    """Runs since the log's last line: file, offset, bytes and checksum of each."""

    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    size_bytes: int = 0


class _Checksums:
    """CRC-32 of what is in the files. A run counts once its piece is whole: another daemon sends
    the piece again."""

    def __init__(self, new: Callable[[], RunChecksum] | None) -> None:
        self._new = new
        self._of_files: dict[int, RunChecksum] = {}
        self._noted: list[tuple[int, int, int, int]] = []  # file, offset, bytes and checksum

    def note(self, file: int, offset: int, data: bytes | memoryview) -> None:
        if self._new is not None:
            self._noted.append((file, offset, len(data), zlib.crc32(data)))

    def count(self) -> None:
        """All that were noted."""
        for file, offset, length, found in self._noted:
            assert self._new is not None
            if file not in self._of_files:
                self._of_files[file] = self._new()
            self._of_files[file].add_run(offset, length, found)
        self._noted.clear()

    def forget(self) -> None:
        """Those that were noted and do not count."""
        self._noted.clear()

    def clear(self) -> None:
        self._noted.clear()
        self._of_files.clear()

    def value(self, file: int, begin: int, end: int) -> int:
        """That of the bytes from `begin` to `end`; without a run they are zero."""
        assert self._new is not None
        return self._of_files.get(file, self._new()).value(begin, end)


class Target(AbstractContextManager["Target"]):
    """One export at a time has it. What was begun stays for a later run."""

    def __init__(self, path: Path, new_checksum: Callable[[], RunChecksum] | None = None) -> None:
        """
        Args:
            path: of the folder to be; its parent exists.
            new_checksum: for files that have endings.

        Raises:
            Refused: something is there; another export writes it; its folder cannot be written.
        """
        self._path = Path(os.path.abspath(path))  # noqa: PTH100  (resolve() follows a link there)
        self._name = self._path.name
        self._partial = self._name + _SUFFIX
        self._fds: list[int] = []
        self._files: list[int] = []
        self._names: list[str] = []
        self._window = _Window()
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="memd-sync")
        self._syncing: Future[None] | None = None
        self._description: dict[str, Any] | None = None
        self._piece_next = 0
        self._is_placed = False
        self._checksums = _Checksums(new_checksum)
        self._planned: Sequence[File] = ()
        try:
            self._open()
        except OSError as error:
            self._close()
            raise self._refused(error) from error
        except BaseException:
            self._close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    @property
    def log_path(self) -> Path:
        """For messages of a run that nobody watches."""
        return self._path.with_name(self._partial) / "messages"

    def _open(self) -> None:
        if not self._name:
            raise Refused(StatusCode.INVALID_ARGUMENT, f"{self._path} is no place for a folder")
        self._parent = self._keep(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY))
        self._refuse_existing()
        self._folder = self._keep(self._locked_folder())
        # Its last holder may have put it in place.
        self._refuse_existing()
        with suppress(FileExistsError):
            os.mkdir(_FILES, dir_fd=self._folder)
        self._inner = self._keep(os.open(_FILES, _FOLDER, dir_fd=self._folder))
        self._log = self._keep(os.open(_LOG, _FILE | os.O_CREAT, 0o666, dir_fd=self._folder))

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _refuse_existing(self) -> None:
        with suppress(FileNotFoundError):
            os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
            raise Refused(
                StatusCode.ALREADY_EXISTS,
                f"{self._path} is there already; name another folder, or remove it",
            )

    def _locked_folder(self) -> int:
        while True:
            with suppress(FileExistsError):
                os.mkdir(self._partial, dir_fd=self._parent)
            folder = os.open(self._partial, _FOLDER, dir_fd=self._parent)
            try:
                self._lock(folder)
                now = os.stat(self._partial, dir_fd=self._parent, follow_symlinks=False)
                if os.path.samestat(now, os.fstat(folder)):
                    return folder
            except FileNotFoundError:
                pass  # it was put in place before it was locked
            except BaseException:
                os.close(folder)
                raise
            os.close(folder)

    def _lock(self, folder: int) -> None:
        # Its owner could write what this process is to trust.
        if os.fstat(folder).st_uid != os.geteuid():
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                f"{self._path}{_SUFFIX} belongs to another user; name another folder",
            )
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                StatusCode.IN_USE, f"another export writes {self._path}; wait for its end"
            ) from error

    # ---- The part of an earlier run ----------------------------------------------------------

    def verify(self, progress: Callable[[int, int], None]) -> tuple[int, int]:
        """The identity of the snapshot that an earlier run has a part of, and how many pieces of it
        are on disk, as they were written; (0, 0) where there are none."""
        lines, ends = self._lines()
        if not lines or lines[0].get("version") != _LOG_VERSION:
            return 0, 0
        try:
            self._open_files([name for name, _ in lines[0]["files"]], 0)
        except OSError:
            return 0, 0
        self._description = lines[0]
        end = ends[0]
        bytes_all = sum(length for line in lines[1:] for _, _, length, _ in line["runs"])
        done = 0
        for line, line_end in zip(lines[1:], ends[1:], strict=True):
            if not all(self._holds(*run) for run in line["runs"]):
                break
            self._checksums.count()
            done += sum(length for _, _, length, _ in line["runs"])
            progress(done, bytes_all)
            self._piece_next, end = line["piece_next"], line_end
        self._checksums.forget()
        os.ftruncate(self._log, end)
        return int(lines[0]["identity"]), self._piece_next

    def _lines(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Up to the first that was not written whole, and where each ends."""
        lines, ends, end = [], [], 0
        text = _read(self._log, 0, min(os.fstat(self._log).st_size, _LOG_BYTES_MAX))
        for line in text.splitlines(keepends=True):
            digest, _, body = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or digest != b"%016x" % checksum(body):
                break
            end += len(line)
            lines.append(json.loads(body))
            ends.append(end)
        return lines, ends

    def _holds(self, file: int, offset: int, length: int, digest: int) -> bool:
        try:
            data = _read(self._files[file], offset, length)
        except OSError:
            return False
        self._checksums.note(file, offset, data)
        return checksum(data) == digest

    # ---- Writing ----------------------------------------------------------------------------

    def begin(self, identity: int, files: Sequence[File]) -> int:
        """Goes on with what an earlier run, or this one, has of these files of that snapshot, or
        begins anew. Returns how many pieces are there.

        Raises:
            Refused: the disk is full, or the folder cannot be written.
        """
        description = {
            "version": _LOG_VERSION,
            "identity": identity,
            "files": [[file.name, file.size_bytes] for file in files],
        }
        self._planned = files
        self._checksums.forget()  # of a piece that is sent again
        try:
            if self._description == description and self._has(files):
                return self._piece_next
            self._begin_anew(description, files)
        except OSError as error:
            if self._description is None:
                self._remove()
            raise self._refused(error, sum(file.size_bytes for file in files)) from error
        return 0

    def _has(self, files: Sequence[File]) -> bool:
        return all(
            os.fstat(fd).st_size == file.size_bytes
            and all(_read(fd, at, len(data)) == data for at, data in file.writes)
            for fd, file in zip(self._files, files, strict=True)
        )

    def _begin_anew(self, description: dict[str, Any], files: Sequence[File]) -> None:
        self._finish_sync()
        self._description, self._piece_next, self._window = None, 0, _Window()
        self._checksums.clear()
        os.ftruncate(self._log, 0)
        os.fsync(self._log)
        self._close_files()
        for name in _names(self._inner):
            os.unlink(name, dir_fd=self._inner)
        self._open_files([file.name for file in files], os.O_CREAT | os.O_EXCL)
        for fd, file in zip(self._files, files, strict=True):
            # A disk that is too small is found out now, and not in an hour.
            os.posix_fallocate(fd, 0, file.size_bytes)
        for fd, file in zip(self._files, files, strict=True):
            for offset, data in file.writes:
                _write(fd, offset, data)
            os.fsync(fd)
        for folder in (self._inner, self._folder, self._parent):
            os.fsync(folder)
        self._append(description)
        self._description = description

    def _open_files(self, names: Sequence[str], flags: int) -> None:
        self._close_files()
        for name in names:
            self._files.append(os.open(name, _FILE | flags, 0o666, dir_fd=self._inner))
            if not stat.S_ISREG(os.fstat(self._files[-1]).st_mode):
                raise FileNotFoundError(errno.ENOENT, "no regular file", name)

    def write(self, file: int, offset: int, data: bytes | memoryview) -> None:
        """Refused: the disk is full, or failed."""
        try:
            _write(self._files[file], offset, data)
        except OSError as error:
            raise self._refused(error) from error
        self._checksums.note(file, offset, data)
        self._window.runs.append((file, offset, len(data), checksum(data)))
        self._window.size_bytes += len(data)

    def reached(self, piece_next: int) -> None:
        """All pieces before that one are written. Refused: the disk failed."""
        if piece_next > self._piece_next:
            self._checksums.count()
        self._piece_next = piece_next
        if self._window.size_bytes < _WINDOW_BYTES:
            return
        self._begin_sync()

    def _begin_sync(self) -> None:
        self._finish_sync()
        window, self._window = self._window, _Window()
        self._syncing = self._sync_thread.submit(self._sync, window, self._piece_next)

    def _finish_sync(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is None:
            return
        try:
            syncing.result()
        except OSError as error:
            raise self._refused(error) from error

    def _sync(self, window: _Window, piece_next: int) -> None:
        for file in sorted({file for file, *_ in window.runs}):
            os.fdatasync(self._files[file])
            os.posix_fadvise(self._files[file], 0, 0, os.POSIX_FADV_DONTNEED)
        self._append({"piece_next": piece_next, "runs": window.runs})

    def _append(self, line: dict[str, Any]) -> None:
        body = json.dumps(line, separators=(",", ":")).encode()
        _write(self._log, os.fstat(self._log).st_size, b"%016x %s\n" % (checksum(body), body))
        os.fdatasync(self._log)

    # ---- The end ----------------------------------------------------------------------------

    def place(self) -> None:
        """The folder has its name, and is on disk.

        Raises:
            Refused: a sync failed, or something has that name meanwhile.
        """
        self._begin_sync()
        self._finish_sync()
        try:
            self._write_endings()
            for fd in self._files:
                os.fsync(fd)
            os.fsync(self._inner)
            # It replaces nothing but an empty folder.
            os.rename(_FILES, self._name, src_dir_fd=self._folder, dst_dir_fd=self._parent)
            self._is_placed = True
            os.fsync(self._parent)
            os.fsync(self._folder)
        except OSError as error:
            raise self._refused(error) from error

    def _write_endings(self) -> None:
        """A later run writes them again: they are not in the log."""
        for number, file in enumerate(self._planned):
            begins = {each.begin for each in file.endings}
            for at, data in file.writes:
                if at in begins:  # others are before what has a checksum
                    self._checksums.note(number, at, data)
            self._checksums.count()
            for each in file.endings:
                found = self._checksums.value(number, each.begin, each.end)
                _write(self._files[number], each.end, each.encode(found))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sync_thread.shutdown(wait=True)
        if self._is_placed or self._description is None:
            with suppress(OSError):
                self._remove()
        self._close()

    def _remove(self) -> None:
        """The folder under its other name, and all that a run makes there."""
        self._close_files()
        if not self._is_placed:
            for name in _names(self._inner):
                os.unlink(name, dir_fd=self._inner)
            os.rmdir(_FILES, dir_fd=self._folder)
        for name in _names(self._folder):
            os.unlink(name, dir_fd=self._folder)
        os.rmdir(self._partial, dir_fd=self._parent)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _close(self) -> None:
        self._close_files()
        while self._fds:
            os.close(self._fds.pop())

    def _refused(self, error: OSError, needed_bytes: int = 0) -> Refused:
        if error.errno in _FULL:
            needs = f"; it needs {format_size(needed_bytes)}" if needed_bytes else ""
            return Refused(
                StatusCode.CAPACITY,
                f"no room for {self._path}{needs}: {error.strerror}; free some and export again, "
                "or name a folder on another disk",
            )
        return Refused(StatusCode.DEVICE, f"{self._path} cannot be written: {error.strerror}")


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _read(fd: int, offset: int, length: int) -> bytes:
    """Fewer where the file ends."""
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(fd: int, offset: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        offset, rest = offset + count, rest[count:]
