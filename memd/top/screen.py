"""Looks are shown in place on a terminal, and one after the other elsewhere."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

# The terminal's second screen, without cursor, where long lines are cut; and back.
_BEGIN = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_END = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_HEADINGS = ("volume  ", "job  ")
# For a terminal that does not know its size.
_ROWS = 24
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Output(Protocol):
    def show(self, lines: Sequence[str]) -> None: ...


class Pages:
    """One block after the other, with an empty line before each but the first if `is_apart`."""

    def __init__(self, file: TextIO, *, is_apart: bool) -> None:
        self._file = file
        self._is_apart = is_apart
        self._count = 0

    def show(self, lines: Sequence[str]) -> None:
        apart = "\n" if self._is_apart and self._count else ""
        self._count += 1
        self._file.write(apart + "".join(f"{line}\n" for line in lines))
        self._file.flush()


class Screen:
    """`with Screen.of(file) as screen`: the terminal is as it was at the end, whatever ends it."""

    def __init__(self, file: TextIO, *, is_colored: bool) -> None:
        self._file = file
        self._is_colored = is_colored

    @classmethod
    @contextmanager
    def of(cls, file: TextIO, *, is_colored: bool) -> Iterator[Screen]:
        before = {number: signal.signal(number, _end) for number in _ENDING}
        try:
            file.write(_BEGIN)
            yield cls(file, is_colored=is_colored)
        finally:
            file.write(_END)
            file.flush()
            for number, handler in before.items():
                signal.signal(number, handler)

    def show(self, lines: Sequence[str]) -> None:
        rows = os.get_terminal_size(self._file.fileno()).lines or _ROWS
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            lines = [*lines[: rows - 1], f"{hidden} more lines: the terminal is too low"]
        drawn = f"{_REST_OF_LINE}\n".join(self._drawn(line) for line in lines)
        self._file.write(f"{_HOME}{drawn}{_REST_OF_SCREEN}")
        self._file.flush()

    def _drawn(self, line: str) -> str:
        # A path may hold whatever its file system takes.
        text = "".join(each if each.isprintable() else "?" for each in line)
        is_heading = self._is_colored and line.startswith(_HEADINGS)
        return f"{_BOLD}{text}{_PLAIN}" if is_heading else text


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
