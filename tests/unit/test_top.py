"""`memd top`: rates of two looks, and what is drawn."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import termios
import tty
from typing import TYPE_CHECKING

import pytest

from memd.top.rates import JobRates, Rates, VolumeRates, rates_between
from memd.top.screen import Pages, Screen
from memd.top.view import lines_of
from memd_proto.v1 import job_pb2, status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1 << 20
BEGIN, END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


def stall(reason: str, seconds: float, phase: str = "forward") -> job_pb2.Stall:
    return job_pb2.Stall(phase=phase, reason=reason, seconds=seconds)


def look(
    *,
    at_s: float,
    moved: int = 0,
    step: int = 0,
    job_id: int = 1,
    stalls: tuple[job_pb2.Stall, ...] = (),
) -> status_pb2.GetStatusResponse:
    """A daemon with a volume, of which `moved` was read and twice that written, and a job."""
    return status_pb2.GetStatusResponse(
        version="0.1.0",
        uptime_seconds=at_s,
        devices=[status_pb2.Device(path="/volume", read_bytes=moved, written_bytes=2 * moved)],
        jobs=[
            job_pb2.Job(
                job_id=job_id,
                name="gpt",
                committed_step=step,
                session_count=2,
                host_bytes_used=MIB,
                host_bytes=4 * MIB,
                counters=job_pb2.JobCounters(
                    fetched_bytes=3 * moved, spilled_bytes=4 * moved, stalls=stalls
                ),
            )
        ],
    )


def test_rates_are_what_came_between_two_looks_by_the_daemon_s_seconds() -> None:
    before = look(
        at_s=10, moved=MIB, step=5, stalls=(stall("disk", 1.0), stall("room", 2.0, "backward"))
    )
    after = look(
        at_s=12,
        moved=5 * MIB,
        step=6,
        stalls=(
            stall("disk", 2.0),
            stall("disk", 0.5, "step"),
            stall("room", 2.5, "backward"),
            stall("ring", 9.0, "other"),
        ),
    )
    rates = rates_between(before, after)
    assert rates.volumes == {"/volume": VolumeRates(read_bytes=2 * MIB, written_bytes=4 * MIB)}
    # Two sessions of 2 s each.
    assert rates.jobs == {
        1: JobRates(
            steps=0.5,
            fetched_bytes=6 * MIB,
            spilled_bytes=8 * MIB,
            stalled={"disk": 0.375, "room": 0.125},
        )
    }
    assert list(rates.jobs[1].stalled) == ["disk", "room"]


def test_a_daemon_or_job_that_came_between_has_no_rates_and_a_job_that_went_back_no_steps() -> None:
    before = look(at_s=10, moved=MIB, step=5)
    assert rates_between(before, look(at_s=3)) == Rates()
    come = rates_between(before, look(at_s=11, moved=MIB, job_id=2))
    assert come.jobs == {}
    assert come.volumes["/volume"].read_bytes == 0
    back = rates_between(before, look(at_s=11, moved=MIB, step=3))
    assert back.jobs[1].steps is None


def row(lines: list[str], first: str) -> list[str]:
    """The cells of the line that begins so."""
    line = next(line for line in lines if line.startswith(first))
    return re.split(r"  +", line)


def test_a_look_shows_status_and_rates_and_the_first_one_status_alone() -> None:
    before, after = look(at_s=1), look(at_s=3, moved=2 * MIB, step=3, stalls=(stall("disk", 1),))
    lines = lines_of(after, rates_between(before, after))
    assert lines[0].startswith("memd 0.1.0, up 3 s")
    assert row(lines, "/volume")[3:] == ["1 MiB/s", "2 MiB/s", "0", "0"]
    job = ["attached", "3", "1.50/s", "1 MiB / 4 MiB", "0 B / 0 B", "3 MiB/s", "4 MiB/s"]
    assert row(lines, "gpt")[2:] == [*job, "25%: disk 25%"]
    first = lines_of(after, Rates())
    assert row(first, "/volume")[3:] == ["-", "-", "0", "0"]
    assert row(first, "gpt")[2:5] == ["attached", "3", "-"]
    assert row(first, "gpt")[7:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"lost_shards": ["w"]}, "lost"),
        ({"unreadable_shards": ["w"]}, "unreadable"),
        ({"session_count": 0}, "idle"),
        ({}, "attached"),
    ],
)
def test_a_job_s_state_is_a_word(fields: dict[str, object], state: str) -> None:
    answer = look(at_s=1)
    job = answer.jobs[0]
    for name, value in fields.items():
        job.ClearField(name)
        job.MergeFrom(job_pb2.Job(**{name: value}))  # type: ignore[arg-type]
    assert row(lines_of(answer, Rates()), "gpt")[2] == state


def test_blocks_stand_apart_and_objects_do_not() -> None:
    for is_apart, said in ((True, "a\nb\n\nc\n"), (False, "a\nb\nc\n")):
        file = io.StringIO()
        pages = Pages(file, is_apart=is_apart)
        pages.show(["a", "b"])
        pages.show(["c"])
        assert file.getvalue() == said


_MARK = "\0"


class Terminal:
    """The far end of a terminal of 5 rows, and the end that a program has."""

    def __init__(self) -> None:
        self._far, near = pty.openpty()
        termios.tcsetwinsize(near, (5, 80))
        tty.setraw(near)
        self.near = os.fdopen(near, "w")

    def said(self) -> str:
        """The kernel hands over what was written when it likes: a mark behind it says that all has
        come."""
        self.near.write(_MARK)
        self.near.flush()
        found = ""
        while not found.endswith(_MARK):
            found += os.read(self._far, 1 << 16).decode()
        return found.removesuffix(_MARK)

    def close(self) -> None:
        self.near.close()
        os.close(self._far)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_a_screen_draws_in_place_what_has_room_and_is_restored(terminal: Terminal) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with Screen.of(terminal.near, is_colored=True) as screen:
        screen.show(["job  user", "a\x1b[2Jb"])
        said = terminal.said()
        assert said == f"{BEGIN}\x1b[H\x1b[1mjob  user\x1b[0m\x1b[K\na?[2Jb\x1b[J"
        screen.show([str(number) for number in range(7)])
        assert terminal.said().endswith("\n3\x1b[K\n3 more lines: the terminal is too low\x1b[J")
    assert terminal.said() == END
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_screen_is_restored_after_an_error_and_is_plain_without_color(terminal: Terminal) -> None:
    def fail() -> None:
        with Screen.of(terminal.near, is_colored=False) as screen:
            screen.show(["job  user"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert terminal.said() == f"{BEGIN}\x1b[Hjob  user\x1b[J{END}"
