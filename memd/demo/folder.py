"""The folder that holds the demo's volume: on a disk, ours alone, and gone at the end."""

import ctypes
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_FILE_SYSTEMS_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


class FolderError(Exception):
    """The folder can't hold a volume; the message says what to do."""


def file_system_type(folder: Path) -> int:
    """`f_type` of statfs(2), which Python's os.statvfs leaves out."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct statfs has 120 bytes on 64-bit Linux and begins with f_type, a long.
    status = ctypes.create_string_buffer(256)
    if libc.statfs(os.fsencode(folder), status) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), str(folder))
    return int.from_bytes(status.raw[: ctypes.sizeof(ctypes.c_long)], "little")


def default_parent() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path in the variable is to be ignored.
    if cache and Path(cache).is_absolute():
        return Path(cache) / "memd"
    return Path.home() / ".cache" / "memd"


def check_folder(folder: Path, *, bytes_needed: int) -> None:
    """Refuses what accepts O_DIRECT but lies in memory, and what is too full."""
    in_memory = _FILE_SYSTEMS_IN_MEMORY.get(file_system_type(folder))
    if in_memory is not None:
        raise FolderError(
            f"{folder} is on {in_memory}, whose files are memory: nothing would be saved. "
            "Name a folder on a disk with --data"
        )
    bytes_free = shutil.disk_usage(folder).free
    if bytes_free < bytes_needed:
        raise FolderError(
            f"{folder} has {bytes_free / 2**20:.0f} MiB free, the volume needs "
            f"{bytes_needed / 2**20:.0f} MiB: name another disk with --data, or train a smaller "
            "model with --params"
        )


def _terminate(signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


@contextmanager
def volume_folder(parent: Path | None, *, bytes_needed: int) -> Iterator[Path]:
    """A fresh folder below `parent`, by its absolute path; removed however the block is left,
    SIGTERM included."""
    if parent is None:
        parent = default_parent()
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(
                f"{parent} can't be made ({error.strerror}): name a folder on a disk with --data"
            ) from error
    elif not parent.is_dir():
        raise FolderError(f"{parent} is not a folder: create it or name another with --data")
    check_folder(parent, bytes_needed=bytes_needed)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix="demo-", dir=parent.resolve()))
        except OSError as error:
            raise FolderError(
                f"{parent} can't be written to ({error.strerror}): name another with --data"
            ) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGTERM, previous)
