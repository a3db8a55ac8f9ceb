"""Tensors over mapped files, such as those of a checkpoint that a library has opened.

A touched page comes from the disk with as many behind it as the system reads ahead, and stays in
memory until room is needed. memd needs each byte once, in order: it reads the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memd_client.base.file_reads import FileReads, FileRun
from memd_client.base.interrupts import safe_point
from memd_client.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    _File = tuple[tuple[int, int], int, str]

_PAGEMAP_ENTRY_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Map:
    """A line of /proc/self/maps. `path` is "" for memory of no file."""

    begin: int
    end: int
    is_private: bool
    file_begin: int
    device: tuple[int, int]
    inode: int
    path: str

    @property
    def file(self) -> _File:
        return self.device, self.inode, self.path


@dataclass(frozen=True, slots=True)
class FileBytes:
    """All bytes of a tensor, in a file that is mapped while the tensor lives."""

    files: MappedFiles
    place: _Map
    offset_bytes: int

    def behind(self, count_bytes: int) -> FileBytes:
        """Those that come after the first `count_bytes`."""
        return FileBytes(self.files, self.place, self.offset_bytes + count_bytes)

    def read(self, into: memoryview) -> bool:
        """Fills `into`. False: the file is not to be had under its name; nothing was read.

        Raises:
            DeviceError: a read failed, or the file ends too early.
        """
        return self.files.read(self, into)


class MappedFiles:
    """The files that this process has mapped, for one load, which closes them. Ask only for tensors
    that are older than this object: their memory can't have become another file's meanwhile. One
    thread at a time."""

    def __init__(self) -> None:
        self._maps = _read_maps()
        self._reads = FileReads()
        # One descriptor a file, which may have a map for each tensor. None: it is not there under
        # its name.
        self._open: dict[_File, int | None] = {}
        self._opened = ExitStack()
        self._opened.callback(self._reads.close)
        self._finalizer = weakref.finalize(self, self._opened.close)

    def find(self, tensor: torch.Tensor) -> FileBytes | None:
        """The file that has the bytes of this contiguous tensor; None: no file has them, or they
        were changed in memory."""
        if tensor.is_neg() or tensor.is_conj():
            return None  # its elements are other ones than those in memory
        begin, size_bytes = tensor.data_ptr(), tensor.nbytes
        place = _map_at(self._maps, begin)
        if place is None or not place.path or begin + size_bytes > place.end:
            return None
        if place.is_private and _has_changed(begin, size_bytes):
            return None
        return FileBytes(self, place, place.file_begin + begin - place.begin)

    def expect(self, upcoming: Iterable[tuple[FileBytes, int]]) -> None:
        """So many bytes from there on are read next, in this order: the first are fetched from now
        on. Each is looked at when its turn comes."""
        self._reads.expect(
            FileRun(file, source.offset_bytes, size_bytes)
            for source, size_bytes in upcoming
            if (file := self._file(source.place)) is not None
        )

    def read(self, source: FileBytes, into: memoryview) -> bool:
        """As of `FileBytes`."""
        path, file = source.place.path, self._file(source.place)
        if file is None:
            return False
        done = 0
        while done < len(into):
            safe_point()
            offset_bytes = source.offset_bytes + done
            try:
                count = self._reads.read(file, offset_bytes, into[done:])
            except OSError as error:
                raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error
            if count == 0:
                raise DeviceError(
                    f"{path} became shorter while a tensor was mapped there, and ends at byte "
                    f"{offset_bytes} now",
                    errno.EIO,
                )
            done += count
        return True

    def close(self) -> None:
        """Nothing is read any more."""
        self._finalizer()

    def _file(self, place: _Map) -> int | None:
        if place.file not in self._open:
            file = self._open[place.file] = _opened(place)
            if file is not None:
                # The reads end before it is closed.
                self._opened.callback(os.close, file)
                self._opened.callback(self._reads.close)
        return self._open[place.file]


def _opened(place: _Map) -> int | None:
    """The file that is mapped there, if its name leads to it."""
    try:
        file = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    found = os.fstat(file)
    device = (os.major(found.st_dev), os.minor(found.st_dev))
    is_it = (device, found.st_ino) == (place.device, place.inode)
    # A device's memory is not what a read of it gives.
    if is_it and stat.S_ISREG(found.st_mode):
        return file
    os.close(file)
    return None


class ReadingAhead:
    """Suspends reading ahead where tensors are mapped: a library that looks at one element of each
    would read the whole file, long before anybody needs it. One thread at a time."""

    def __init__(self) -> None:
        self._known: Sequence[_Map] = ()
        self._suspended: set[_Map] = set()

    def suspend(self, tensor: torch.Tensor) -> None:
        """In the file that has the tensor, if one has. Others find that it reads a page at a
        time."""
        place = _map_at(self._known, tensor.data_ptr())
        if place is None:
            self._known = _read_maps()
            place = _map_at(self._known, tensor.data_ptr())
        if place is not None and place.path and place not in self._suspended:
            self._suspended.add(place)
            _advise(place, mmap.MADV_RANDOM)

    def resume(self) -> None:
        """In all files that are mapped still."""
        if self._suspended:
            for place in self._suspended.intersection(_read_maps()):
                _advise(place, mmap.MADV_NORMAL)
            self._suspended.clear()


def _read_maps() -> Sequence[_Map]:
    try:
        text = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return ()  # nothing is known of any tensor
    return [_parse(line) for line in text.split("\n") if line]


def _parse(line: str) -> _Map:
    addresses, access, file_begin, device, inode, *path = line.split(maxsplit=5)
    begin, end = (int(each, 16) for each in addresses.split("-"))
    major, minor = (int(each, 16) for each in device.split(":"))
    # A deleted file, such as memd's own memory, can't be opened.
    is_named = bool(path) and path[0].startswith("/") and not path[0].endswith(" (deleted)")
    name = path[0] if is_named else ""
    return _Map(begin, end, access[3] == "p", int(file_begin, 16), (major, minor), int(inode), name)


def _map_at(maps: Sequence[_Map], address: int) -> _Map | None:
    """`maps` ascend, as the kernel lists them."""
    index = bisect_right(maps, address, key=lambda each: each.begin) - 1
    return maps[index] if index >= 0 and address < maps[index].end else None


def _has_changed(begin: int, size_bytes: int) -> bool:
    """Whether a page of a private map may be no longer the file's."""
    first, last = begin // mmap.PAGESIZE, (begin + size_bytes - 1) // mmap.PAGESIZE
    data = bytearray((last - first + 1) * _PAGEMAP_ENTRY_BYTES)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            count = os.preadv(pagemap.fileno(), [data], first * _PAGEMAP_ENTRY_BYTES)
    except OSError:
        return True
    if count != len(data):
        return True
    # Bits 63 to 61: in memory, swapped out, of a file. A page that is there and of no file is a
    # copy that was written.
    states = (torch.frombuffer(data, dtype=torch.int64) >> 61) & 7
    return bool(((states != 0) & (states % 2 == 0)).any())


def _advise(place: _Map, advice: int) -> None:
    # A hint: if it is refused, the file is read as before.
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise(ctypes.c_void_p(place.begin), ctypes.c_size_t(place.end - place.begin), advice)
