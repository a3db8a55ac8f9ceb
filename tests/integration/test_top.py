"""`memd top` beside a daemon: in a pipe, on a terminal, and while the daemon is away."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from tests.daemons import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from tests.daemons import Daemon, Daemons

BEGIN, END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


def command(daemon: Daemon, *arguments: str) -> list[str]:
    flags = ("--socket", str(daemon.socket), "--interval", "0.1")
    return [sys.executable, "-m", "memd", "top", *flags, *arguments]


def test_two_blocks_in_a_pipe_of_which_the_second_has_rates(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="watched", host_bytes=16 << 20) as session:
        session.put("blob", torch.zeros(1 << 20))
        arguments = command(daemon, "--count", "2")
        said = subprocess.run(
            arguments, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        ).stdout
        session.drop_job()
    first, second = said.split("\n\nmemd ")
    for block in (f"\n{first}", f"\nmemd {second}"):
        assert re.search(r"\nmemd \S+, up \d+ s, I/O by ", block)
        assert re.search(r"\nwatched +\S+ +attached +0 +", block)
    assert re.search(r"\nwatched .* -  +-  +-\n", f"{first}\n")
    assert re.search(r"\nwatched .* 0\.00/s .* [\d.]+ \w+/s +[\d.]+ \w+/s +\d+%", second)
    assert re.search(r"memd\.volume .* [\d.]+ \w+/s +[\d.]+ \w+/s +0 ", second)
    assert "\x1b" not in said


class OnTerminal:
    """The command with a terminal of its own as standard output."""

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        self._far, near = pty.openpty()
        termios.tcsetwinsize(near, (40, 200))
        self._near = near
        self.modes_before = self.modes()
        self.process = subprocess.Popen(arguments, stdout=near, env={**os.environ, **environ})
        self.said = ""

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._near)

    def read_until(self, wanted: str) -> None:
        while wanted not in self.said:
            self.said += os.read(self._far, 1 << 16).decode()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait(TIMEOUT_S)
        self.read_until(END)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._near)
        os.close(self._far)


@pytest.mark.parametrize(
    ("number", "status", "environ"),
    [(signal.SIGINT, 0, {"NO_COLOR": "1"}), (signal.SIGTERM, 128 + signal.SIGTERM, {})],
)
def test_a_terminal_is_drawn_on_in_place_and_as_it_was_after_a_signal(
    daemon: Daemon, number: signal.Signals, status: int, environ: dict[str, str]
) -> None:
    shown = OnTerminal(command(daemon), environ)
    try:
        shown.read_until(BEGIN)
        shown.read_until("/s  ")  # the second look
        assert shown.end(number) == status
        assert shown.said.startswith(BEGIN)
        assert shown.said.endswith(END)
        assert shown.modes() == shown.modes_before
        assert ("\x1b[1m" in shown.said) == (not environ)
    finally:
        shown.close()


def objects(output: IO[str]) -> Iterator[dict[str, Any]]:
    for line in output:
        yield json.loads(line)


def test_a_daemon_that_is_away_is_said_and_the_view_goes_on_with_the_next(
    daemons: Daemons,
) -> None:
    daemon = daemons.start("--holder-seconds", "0", name="away")
    with subprocess.Popen(command(daemon, "--json"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = objects(process.stdout)
        assert next(seen)["rates"] == {"volumes": {}, "jobs": {}}
        assert next(seen)["rates"]["volumes"]
        daemon.stop()
        away = next(each for each in seen if "away" in each)
        assert away["away"]
        daemon = daemons.start("--holder-seconds", "0", name="away")
        back = next(each for each in seen if "status" in each)
        assert back["rates"] == {"volumes": {}, "jobs": {}}
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    daemon.stop()


def test_a_daemon_that_is_away_at_the_last_look_exits_with_4(daemons: Daemons) -> None:
    daemon = daemons.start("--holder-seconds", "0", name="gone")
    with subprocess.Popen(
        command(daemon, "--count", "20"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("memd ")
        daemon.stop(signal.SIGKILL)
        said, wrong = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 4
        assert "; waiting for it\n" in said
        assert "no daemon answers at" in wrong
