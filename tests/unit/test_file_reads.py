"""Reads in an order that is known before: what is fetched, and what stays in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from memd_client.base import file_reads
from memd_client.base.file_reads import FileReads, FileRun
from tests.daemons import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
SIZE_BYTES = 12 * MIB
AHEAD_BYTES = 4 * MIB
PAGE_BYTES = mmap.PAGESIZE


@pytest.fixture
def path() -> Iterator[Path]:
    """A file that is on the disk alone."""
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"test_file_reads.{os.getpid()}"
    path.write_bytes(os.urandom(SIZE_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield path
    path.unlink()


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    yield file
    os.close(file)


@pytest.fixture(autouse=True)
def _window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "AHEAD_BYTES", AHEAD_BYTES)


def resident(path: Path) -> set[int]:
    """The numbers of the file's pages that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        count = -(-len(mapped) // PAGE_BYTES)
        found = (ctypes.c_ubyte * count)()
        begin = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(len(mapped)), found
        )
        del begin
        assert not failed, os.strerror(ctypes.get_errno())
        return {page for page in range(count) if found[page] & 1}


def pages(begin: int, end: int) -> set[int]:
    """All that have one of these bytes."""
    return set(range(begin // PAGE_BYTES, -(-end // PAGE_BYTES)))


def wait_for(path: Path, wanted: set[int]) -> set[int]:
    """Until these are in the page cache: the system fetches them behind the caller."""
    deadline = time.monotonic() + 60
    while not wanted <= (found := resident(path)):
        assert time.monotonic() < deadline, (len(wanted), len(found))
        time.sleep(0.005)
    return found


def read(reads: FileReads, file: int, begin: int, size_bytes: int) -> bytes:
    into = bytearray(size_bytes)
    done = 0
    while done < size_bytes:
        count = reads.read(file, begin + done, memoryview(into)[done:])
        assert count
        done += count
    return bytes(into)


def test_what_comes_next_is_fetched_within_the_window_and_nothing_else(
    path: Path, file: int
) -> None:
    whole = path.read_bytes()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not resident(path)
    # Not in the file's order, and within pages.
    runs = [
        FileRun(file, 7 * MIB + 10, 2 * MIB),
        FileRun(file, 1000, 3 * MIB),
        FileRun(file, 3 * MIB + 1000, MIB + 77),
        FileRun(file, 10 * MIB, MIB),
    ]
    with closing(FileReads()) as reads:
        reads.expect(runs)
        wait_for(path, pages(runs[0].begin, runs[0].end) | pages(1000, 2 * MIB + 1000))
        assert read(reads, file, runs[0].begin, MIB) == whole[7 * MIB + 10 : 8 * MIB + 10]
        # The rest of the first, and the second: 4 MiB.
        ahead = pages(8 * MIB, runs[0].end) | pages(1000, 3 * MIB + 1000)
        assert wait_for(path, ahead) - ahead <= pages(runs[0].begin, runs[0].begin + 1)
        for run in (FileRun(file, 8 * MIB + 10, MIB), *runs[1:]):
            assert read(reads, file, run.begin, run.size_bytes) == whole[run.begin : run.end]
        ends = {byte for run in runs for byte in (run.begin, run.end - 1)}
        assert resident(path) <= set().union(*(pages(byte, byte + 1) for byte in ends))


def test_a_read_that_was_not_expected_is_right_and_the_others_stay_ahead(
    path: Path, file: int
) -> None:
    whole = path.read_bytes()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    with closing(FileReads()) as reads:
        reads.expect([FileRun(file, 0, 2 * MIB)])
        assert read(reads, file, 5 * MIB, MIB) == whole[5 * MIB : 6 * MIB]
        wait_for(path, pages(0, 2 * MIB))
        assert read(reads, file, 0, 2 * MIB) == whole[: 2 * MIB]


def test_what_is_passed_over_or_never_read_leaves_the_page_cache(path: Path, file: int) -> None:
    whole = path.read_bytes()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    with closing(FileReads()) as reads:
        reads.expect(FileRun(file, begin * MIB, MIB) for begin in range(3))
        wait_for(path, pages(0, 3 * MIB))
        assert read(reads, file, MIB, MIB // 2) == whole[MIB : MIB + MIB // 2]
        assert resident(path) == pages(MIB + MIB // 2, 3 * MIB)
    assert not resident(path)


def test_runs_are_looked_for_as_the_window_reaches_them(file: int) -> None:
    taken: list[int] = []

    def runs() -> Iterator[FileRun]:
        for number in range(SIZE_BYTES // MIB):
            taken.append(number)
            yield FileRun(file, number * MIB, MIB)

    with closing(FileReads()) as reads:
        reads.expect(runs())
        assert len(taken) == AHEAD_BYTES // MIB
        for number in range(SIZE_BYTES // MIB):
            read(reads, file, number * MIB, MIB)
            assert len(taken) == min(number + 1 + AHEAD_BYTES // MIB, SIZE_BYTES // MIB)


def test_the_end_of_a_file_that_became_shorter_is_seen(path: Path, file: int) -> None:
    with closing(FileReads()) as reads:
        reads.expect([FileRun(file, 0, 4 * MIB)])
        os.truncate(path, MIB)
        into = memoryview(bytearray(4 * MIB))
        assert reads.read(file, 0, into) == MIB
        assert reads.read(file, MIB, into) == 0
