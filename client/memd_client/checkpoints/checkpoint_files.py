"""The safetensors files of a checkpoint, opened for reading: tensors by name, and their bytes."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memd_client.base.file_reads import FileReads, FileRun
from memd_client.base.interrupts import safe_point
from memd_client.base.sizes import format_size
from memd_client.checkpoints.safetensors_header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from memd_client.errors import CapacityError, DeviceError, InvalidArgument, MemdError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

WEIGHTS_NAME = "model.safetensors"

INDEX_NAME = WEIGHTS_NAME + ".index.json"
# The path is wrong, and not a device.
_PATH_ERRORS = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EEXIST),
    )
)
_FULL_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_SHOWN = 5  # names in a message

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A tensor of an open file."""

    file: CheckpointFile
    tensor: StoredTensor

    def read(self, begin: int, into: memoryview) -> None:
        """Fills `into` with the tensor's bytes from `begin` on."""
        self.file.read(self.tensor.begin + begin, into)

    def run(self, begin: int, size_bytes: int) -> FileRun:
        """So many of the tensor's bytes, from `begin` on."""
        return self.file.run(self.tensor.begin + begin, size_bytes)


class CheckpointFile:
    """One file, whose header was checked against its size. Close it."""

    def __init__(self, path: Path, reads: FileReads) -> None:
        """
        Raises:
            InvalidArgument: no file is there, or none of safetensors; nothing stays open.
            DeviceError: it cannot be read.
        """
        self._path = path
        self._reads = reads
        # A pipe would block, and a shard may be one that its index names.
        self._file = _os(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, path=path)
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument(f"{path} is not a file of bytes, so it is no checkpoint")
            prefix = _os(os.pread, self._file, LENGTH_BYTES, 0, path=path)
            length = header_length(prefix, found.st_size, path)
            text = bytearray(length)
            self._read(LENGTH_BYTES, memoryview(text))
            self._header = parse_header(bytes(text), found.st_size, path)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def path(self) -> Path:
        return self._path

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return self._header.tensors

    def read(self, begin: int, into: memoryview) -> None:
        """Fills `into` with bytes of the tensors, from `begin` on.

        Raises:
            InvalidArgument: the file was truncated since its size was looked at.
            DeviceError: a read failed.
        """
        self._read(self._header.data_begin + begin, into)

    def run(self, begin: int, size_bytes: int) -> FileRun:
        """So many bytes of the tensors, from `begin` on."""
        return FileRun(self._file, self._header.data_begin + begin, size_bytes)

    def close(self) -> None:
        os.close(self._file)

    def _read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            safe_point()
            count = _os(self._reads.read, self._file, offset + done, into[done:], path=self._path)
            if not count:
                raise InvalidArgument(
                    f"{self._path} became shorter while it was read, and ends at byte "
                    f"{offset + done} now; nothing of it was loaded"
                )
            done += count


class CheckpointFiles(AbstractContextManager["CheckpointFiles"]):
    """All files of a checkpoint, open until the context is left. Their headers, and the index
    where there is one, were checked against each other."""

    def __init__(self, paths: Paths) -> None:
        """
        Args:
            paths: a file, an index, a folder with either, or several files.

        Raises:
            InvalidArgument: a file is missing, damaged or hostile; index and files contradict each
                other; a name is in two files.
            DeviceError: a file cannot be read.
        """
        self._tensors: dict[str, StoredBytes] = {}
        self._reads = FileReads()
        with ExitStack() as opened:
            if isinstance(paths, str | os.PathLike):
                self._named = str(paths)
                self._open_one(Path(paths), opened)
            else:
                several = list(paths)
                self._named = ", ".join(map(str, several))
                if not several:
                    raise InvalidArgument("load_safetensors needs a path: the list is empty")
                for path in several:
                    self._open_file(Path(path), opened)
            opened.callback(self._reads.close)  # before the files
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    def __str__(self) -> str:
        return self._named

    @property
    def tensors(self) -> dict[str, StoredBytes]:
        """By name."""
        return self._tensors

    def expect(self, upcoming: Iterable[FileRun]) -> None:
        """The bytes of these files that are read next, in this order."""
        self._reads.expect(upcoming)

    def _open_one(self, path: Path, opened: ExitStack) -> None:
        if path.is_dir():
            folder = path
            path = folder / WEIGHTS_NAME
            if not path.exists():
                path = folder / INDEX_NAME
            if not path.exists():
                raise InvalidArgument(f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}")
        if path.name.endswith(".json"):
            self._open_index(path, opened)
        else:
            self._open_file(path, opened)

    def _open_file(self, path: Path, opened: ExitStack) -> CheckpointFile:
        file = CheckpointFile(path, self._reads)
        opened.callback(file.close)
        for tensor in file.tensors:
            other = self._tensors.setdefault(tensor.name, StoredBytes(file, tensor))
            if other.file is not file:
                raise InvalidArgument(
                    f"tensor {tensor.name!r} is in two files: {other.file.path} and {path}"
                )
        return file

    def _open_index(self, path: Path, opened: ExitStack) -> None:
        weight_map = _weight_map(path)
        for name in sorted(set(weight_map.values())):
            shard = path.parent / name
            if not shard.exists():
                raise InvalidArgument(f"{path} names {name!r}, and that file is not there")
            file = self._open_file(shard, opened)
            held = {tensor.name for tensor in file.tensors}
            named = {key for key, at in weight_map.items() if at == name}
            if held != named:
                wrong = [
                    *(f"{key!r} is not there" for key in sorted(named - held)),
                    *(f"{key!r} is there as well" for key in sorted(held - named)),
                ]
                raise InvalidArgument(f"{path} contradicts {shard}: {listed(wrong)}")


def listed(texts: list[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(texts[:_SHOWN])
    return f"{shown} and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else shown


def os_error(error: OSError, path: object, *, needed_bytes: int = 0) -> MemdError:
    """The exception for an error of the operating system at `path`. `needed_bytes`: as many were to
    be written there."""
    why = error.strerror or str(error)
    if error.errno in _FULL_ERRORS:
        needs = f" needs {format_size(needed_bytes)} ({needed_bytes} bytes), and"
        return CapacityError(
            f"{path}{needs if needed_bytes else ':'} there is no room; what was written is "
            f"removed: {why}"
        )
    if error.errno in _PATH_ERRORS:
        return InvalidArgument(f"{path}: {why}")
    return DeviceError(f"{path}: {why}", error.errno or 0)


@contextmanager
def os_errors(path: object) -> Iterator[None]:
    """Inside, an error of the operating system is raised as that of `path`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemdError):
            raise
        raise os_error(error, path) from error


def _os(function: Any, *arguments: Any, path: Path) -> Any:
    try:
        return function(*arguments)
    except OSError as error:
        raise os_error(error, path) from error


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, by name: plain names of files beside the index."""
    with _os(path.open, "rb", path=path) as file:
        text: bytes = _os(file.read, HEADER_BYTES_MAX + 1, path=path)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than an index may be: {HEADER_BYTES_MAX} bytes")
    try:
        index = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidArgument(f"{path} has no weight_map, so it is no index of safetensors files")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise InvalidArgument(
                f"{path} places {key!r} in {name!r}: an index names files of its own folder"
            )
    return weight_map
