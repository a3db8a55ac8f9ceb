"""The memory of an export: pieces lie in it first in, first out, and its caller cannot write it."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from memd.refusal import Refused, StatusCode
from memd.service.export_memories import ExportMemories
from memd.service.piece_memory import PieceMemory
from memd_native import SnapshotMemory, StatusError

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[PieceMemory]:
    with PieceMemory(ExportMemories(), 0) as made:
        yield made


def taken(memory: PieceMemory, size_bytes: int) -> list[int]:
    """Places until there is none."""
    offsets = []
    while (offset := memory.take(size_bytes)) is not None:
        offsets.append(offset)
    return offsets


def release(memory: PieceMemory, count: int) -> None:
    """Of pieces that were sent."""
    for _ in range(count):
        memory.sent()
    claim(memory, count)


def claim(memory: PieceMemory, count: int) -> None:
    os.write(memory.fds[1], count.to_bytes(8, sys.byteorder))
    memory.release()


def test_a_place_is_taken_again_once_its_piece_is_released(memory: PieceMemory) -> None:
    all_bytes = memory.memory.bytes
    assert taken(memory, 3 * MIB) == [i * 3 * MIB for i in range(all_bytes // (3 * MIB))]
    memory.release()
    assert memory.take(3 * MIB) is None
    release(memory, 1)
    # The end is too short for one more: what lies behind it begins anew.
    assert taken(memory, 3 * MIB) == [0]
    release(memory, 2)
    assert taken(memory, 2 * MIB) == [3 * MIB, 5 * MIB, 7 * MIB]


def test_no_two_pieces_share_a_byte_whatever_their_sizes(memory: PieceMemory) -> None:
    sizes = [(number * 7919 % 1280 + 1) * 4096 for number in range(500)]
    held: list[tuple[int, int]] = []
    for size in sizes:
        while (offset := memory.take(size)) is None:
            held.pop(0)
            release(memory, 1)
        assert offset + size <= memory.memory.bytes
        assert all(offset + size <= begin or end <= offset for begin, end in held)
        held.append((offset, offset + size))


def test_as_many_small_pieces_are_out_as_a_socket_holds_messages_of(memory: PieceMemory) -> None:
    count = len(taken(memory, 4096))
    assert count < memory.memory.bytes // 4096
    release(memory, 1)
    assert len(taken(memory, 4096)) == 1


def test_a_piece_without_bytes_is_released_in_its_turn(memory: PieceMemory) -> None:
    assert memory.take(4096) == 0
    assert memory.take(0) == 4096
    assert memory.take(16 * MIB - 4096) == 4096
    assert memory.take(4096) is None
    release(memory, 1)
    assert memory.take(4096) == 0
    assert memory.take(4096) is None, "the empty one takes none of the room that is released"


def test_a_caller_that_releases_more_than_it_has_gets_no_place_of_a_read(
    memory: PieceMemory,
) -> None:
    before = taken(memory, MIB)
    claim(memory, 10**9)
    assert taken(memory, MIB) == []
    memory.sent()
    memory.release()
    assert taken(memory, MIB) == before[:1]
    memory.release()
    assert taken(memory, MIB) == []


def test_a_caller_that_lets_its_end_wait_holds_up_nobody(memory: PieceMemory) -> None:
    received = os.dup(memory.fds[1])  # the open file that the caller gets
    try:
        flags = fcntl.fcntl(received, fcntl.F_GETFL)
        fcntl.fcntl(received, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
        releasing = threading.Thread(target=memory.release, daemon=True)
        releasing.start()
        releasing.join(10)
        assert not releasing.is_alive()
    finally:
        os.close(received)


def test_a_caller_that_closes_its_end_or_writes_something_else_is_refused() -> None:
    with PieceMemory(ExportMemories(), 0) as closed:
        closed.is_with_caller()
        with pytest.raises(Refused, match="keeps the socket open"):
            closed.release()
    for packet in (b"1", bytes(9)):
        with PieceMemory(ExportMemories(), 0) as wrong:
            os.write(wrong.fds[1], packet)
            with pytest.raises(Refused, match=f"it sent {len(packet)}"):
                wrong.release()


def test_a_caller_that_goes_on_sending_does_not_keep_the_thread(memory: PieceMemory) -> None:
    for _ in range(64):
        os.write(memory.fds[1], bytes(8))
    os.write(memory.fds[1], b"1")
    memory.release()
    with pytest.raises(Refused, match="it sent 1"):
        memory.release()


def test_a_caller_reads_what_it_is_sent_and_writes_nothing(memory: PieceMemory) -> None:
    received = os.dup(memory.memory.fd)
    try:
        with mmap.mmap(received, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
            assert mapping[:4096] == bytes(4096)
        with pytest.raises(PermissionError):
            mmap.mmap(received, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(received, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(received, 4096)
    finally:
        os.close(received)


def test_memory_is_its_owners_for_ever() -> None:
    memories = ExportMemories()
    with PieceMemory(memories, 1000) as first:
        had = first.memory
        with PieceMemory(memories, 1000) as second:
            assert second.memory is not had
    with PieceMemory(memories, "team-a:trainer") as other:
        assert other.memory not in (had, second.memory)
    for _ in range(20):  # whatever the caller keeps mapped
        with PieceMemory(memories, 1000) as again:
            assert again.memory is had


def test_memory_is_not_used_again_while_a_read_is_in_flight() -> None:
    memories = ExportMemories()
    with PieceMemory(memories, 0) as first:
        read = first.reading()
        read.__enter__()
    with PieceMemory(memories, 0) as second:
        assert second.memory is not first.memory
    with pytest.raises(Refused, match="over"), first.reading():
        pass
    read.__exit__(None, None, None)
    with PieceMemory(memories, 0) as third:
        assert third.memory is first.memory


def test_an_owner_has_so_much_memory_at_most() -> None:
    memories = ExportMemories()
    with ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(PieceMemory(memories, 0))
        with pytest.raises(Refused, match="in flight"):
            PieceMemory(memories, 0)
        opened.enter_context(PieceMemory(memories, 1))
    PieceMemory(memories, 0).__exit__(None, None, None)


def test_memory_of_a_read_without_end_is_nobodys() -> None:
    memories = ExportMemories()
    lost = StatusError("waited for the disk")
    lost.code = StatusCode.DEADLINE
    with PieceMemory(memories, 0) as first, pytest.raises(StatusError), first.reading():
        raise lost
    with PieceMemory(memories, 0) as second:
        assert second.memory is not first.memory


def test_memory_of_owners_that_are_not_seen_any_more_goes() -> None:
    memories = ExportMemories()
    seen: list[SnapshotMemory] = []
    for owner in [*range(17), 0, 16]:
        with PieceMemory(memories, owner) as memory:
            seen.append(memory.memory)
    assert seen[0] is not seen[17]
    assert seen[16] is seen[18]
