"""Reads of bytes that are needed once, in an order that is known before.

The system fetches what comes next while the caller works with what it has, or waits for others.
Nothing else is fetched, and what was read leaves the page cache.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# So many bytes are fetched before they are read, into the page cache.
AHEAD_BYTES = 32 << 20
# One read: others are asked for between two of them.
_READ_BYTES = 2 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# For one advice, Linux fetches at most what it reads ahead by itself, or what the device takes at
# once: never less than the first number. More than the second would only wait longer in one call.
_ADVICE_BYTES_MIN = 128 << 10
_ADVICE_BYTES_MAX = 1 << 20
# linux/fs.h of 6.14: what a read brings into the page cache leaves it again.
_RWF_DONTCACHE = 0x80
_UNKNOWN_FLAG = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


@dataclass(frozen=True, slots=True)
class FileRun:
    """Bytes that lie one after the other in an open file."""

    file: int
    begin: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes

    def split(self, at: int) -> tuple[FileRun, FileRun]:
        """Before and after byte `at` of the file."""
        return (
            FileRun(self.file, self.begin, at - self.begin),
            FileRun(self.file, at, self.end - at),
        )


def read_once(file: int, offset_bytes: int, into: memoryview) -> int:
    """Reads as `os.preadv` does; of what that brings into the page cache, nothing stays there."""
    try:
        return os.preadv(file, [into], offset_bytes, _RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in _UNKNOWN_FLAG:
            raise
    count = os.preadv(file, [into], offset_bytes)
    os.posix_fadvise(file, offset_bytes, count, os.POSIX_FADV_DONTNEED)
    return count


class FileReads:
    """The reads of one load, whose files are open until it is closed. One thread at a time."""

    def __init__(self) -> None:
        self._upcoming: Iterator[FileRun] = iter(())
        self._rest: FileRun | None = None  # of the last one of `_upcoming`
        self._asked: deque[FileRun] = deque()  # in the order of the reads
        self._asked_bytes = 0
        self._advices: dict[int, int] = {}  # bytes of one, by file
        # Reads ended here, within a page, which the read that goes on there drops.
        self._ends: set[tuple[int, int]] = set()

    def expect(self, upcoming: Iterable[FileRun]) -> None:
        """These come next, in this order: the first are fetched from now on. Each is looked at when
        the window reaches it, and needs no open file before. Other reads are as good, and wait for
        the disk."""
        self._give_up(len(self._asked))
        self._upcoming, self._rest = iter(upcoming), None
        self._ask(AHEAD_BYTES)

    def read(self, file: int, begin: int, into: memoryview) -> int:
        """Reads some bytes into the beginning of `into`, and returns how many: 0 at the file's end.

        Raises:
            OSError: as of `os.preadv`.
        """
        into = into[:_READ_BYTES]
        self._ask(AHEAD_BYTES + len(into))
        if not self._take(FileRun(file, begin, len(into))):
            return read_once(file, begin, into)
        count = os.preadv(file, [into], begin)
        if count:
            self._drop(FileRun(file, begin, count))
        return count

    def close(self) -> None:
        """Fetched bytes that were not read leave the page cache, too, but for pages that the disk
        has in work."""
        self.expect(())

    def _ask(self, size_bytes: int) -> None:
        """Until so many are asked for."""
        while self._asked_bytes < size_bytes:
            run = self._rest or next(self._upcoming, None)
            if run is None:
                return
            # Whole pages: the last of one advice may be the first of the next.
            end = (run.begin // _PAGE_BYTES) * _PAGE_BYTES + self._advice(run.file)
            run, rest = run.split(min(run.end, end))
            self._rest = rest if rest.size_bytes else None
            if run.size_bytes:
                os.posix_fadvise(run.file, run.begin, run.size_bytes, os.POSIX_FADV_WILLNEED)
                self._asked.append(run)
                self._asked_bytes += run.size_bytes

    def _take(self, wanted: FileRun) -> bool:
        """False: the first byte was not asked for."""
        skipped_count = 0
        for each in self._asked:
            if each.file == wanted.file and each.begin <= wanted.begin < each.end:
                break
            skipped_count += 1
        else:
            return False
        self._give_up(skipped_count)
        while self._asked and self._asked[0].file == wanted.file:
            first = self._asked[0]
            if first.begin >= wanted.end or first.end <= wanted.begin:
                break
            self._asked.popleft()
            self._asked_bytes -= first.size_bytes
            if first.end > wanted.end:
                _, rest = first.split(wanted.end)
                self._asked.appendleft(rest)
                self._asked_bytes += rest.size_bytes
                break
        return True

    def _give_up(self, count: int) -> None:
        """So many parts will not be read."""
        for _ in range(count):
            run = self._asked.popleft()
            self._asked_bytes -= run.size_bytes
            os.posix_fadvise(run.file, run.begin, run.size_bytes, os.POSIX_FADV_DONTNEED)

    def _drop(self, run: FileRun) -> None:
        """From the page cache, which keeps pages of which only a part is named."""
        begin = run.begin
        if (run.file, begin) in self._ends:
            self._ends.remove((run.file, begin))
            begin -= begin % _PAGE_BYTES
        if run.end % _PAGE_BYTES:
            self._ends.add((run.file, run.end))
        os.posix_fadvise(run.file, begin, run.end - begin, os.POSIX_FADV_DONTNEED)

    def _advice(self, file: int) -> int:
        if file not in self._advices:
            self._advices[file] = _advice_bytes(os.fstat(file).st_dev)
        return self._advices[file]


def _advice_bytes(device: int) -> int:
    """The bytes that one advice fetches of a file on `device`."""
    number = f"{os.major(device)}:{os.minor(device)}"
    disk = Path("/sys/dev/block", number)
    found = [_ADVICE_BYTES_MIN]
    for path in (
        Path("/sys/class/bdi", number, "read_ahead_kb"),
        *(disk / name for name in ("bdi/read_ahead_kb", "queue/max_sectors_kb")),
        # Partitions lie below their disk.
        *(disk / name for name in ("../bdi/read_ahead_kb", "../queue/max_sectors_kb")),
    ):
        try:
            found.append(int(path.read_text("ascii")) << 10)
        except (OSError, ValueError):
            continue
    return min(max(found), _ADVICE_BYTES_MAX)
