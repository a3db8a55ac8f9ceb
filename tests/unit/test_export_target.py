"""The folder that an export makes, where the disk fails in the middle."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from memd.export import target as targets
from memd.export.file import File
from memd.export.target import Target
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from pathlib import Path

FILES = [File("one", 300, [(0, b"head")]), File("two", 200, [(0, b"h"), (199, b"t")])]


def nothing(done: int, of_all: int) -> None:
    del done, of_all


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_WINDOW_BYTES", 50)


def write_piece(target: Target, piece: int) -> None:
    target.write(0, 4 + piece * 50, bytes([piece + 1]) * 50)
    target.write(1, 1 + piece * 30, bytes([piece + 101]) * 30)
    target.reached(piece + 1)


def expect_whole(path: Path) -> None:
    one = b"head" + b"".join(bytes([piece + 1]) * 50 for piece in range(5))
    two = b"h" + b"".join(bytes([piece + 101]) * 30 for piece in range(5))
    assert (path / "one").read_bytes() == one.ljust(300, b"\0")
    assert (path / "two").read_bytes() == two.ljust(199, b"\0") + b"t"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_in_the_middle_leaves_a_part_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = tmp_path / "out"
    real = getattr(os, call)

    def fails(*arguments: object) -> object:
        raise OSError(number, os.strerror(number))

    def write_rest(target: Target) -> None:
        for piece in range(3, 5):
            write_piece(target, piece)
        target.place()

    with Target(path) as target:
        assert target.verify(nothing) == (0, 0)
        assert target.begin(7, FILES) == 0
        for piece in range(3):
            write_piece(target, piece)
        monkeypatch.setattr(os, call, fails)
        with pytest.raises(Refused) as caught:
            write_rest(target)
    monkeypatch.setattr(os, call, real)
    wanted = StatusCode.DEVICE if number == errno.EIO else StatusCode.CAPACITY
    assert caught.value.code is wanted
    assert str(path) in str(caught.value)
    assert not path.exists()
    with Target(path) as target:
        identity, piece = target.verify(nothing)
        assert identity == 7
        assert 1 <= piece <= 3
        assert target.begin(7, FILES) == piece
        for rest in range(piece, 5):
            write_piece(target, rest)
        target.place()
    expect_whole(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_named_by_the_log_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Target(path) as target:
        target.verify(nothing)
        target.begin(7, FILES)
        write_piece(target, 0)
        target.write(0, 54, b"unfinished")
    with Target(path) as target:
        assert target.verify(nothing) == (7, 1)
        # Another snapshot's part is none of this one.
        assert target.begin(8, FILES) == 0
        for piece in range(5):
            write_piece(target, piece)
        target.place()
    expect_whole(path)


def test_a_log_line_that_was_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Target(path) as target:
        target.verify(nothing)
        target.begin(7, FILES)
        for piece in range(3):
            write_piece(target, piece)
    log = tmp_path / "out.partial" / "log"
    whole = log.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1, 7):
        log.write_bytes(whole[:-cut])
        with Target(path) as target:
            assert target.verify(nothing) == (7, 2)
        log.write_bytes(whole)
    with Target(path) as target:
        assert target.verify(nothing) == (7, 3)


def test_nothing_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Target(path) as target:
        target.verify(nothing)
        target.begin(7, FILES)
        path.mkdir()
        (path / "mine").touch()
        with pytest.raises(Refused, match="cannot be written") as caught:
            target.place()
    assert caught.value.code is StatusCode.DEVICE
    assert [each.name for each in path.iterdir()] == ["mine"]
    with pytest.raises(Refused, match="is there already"):
        Target(path)
