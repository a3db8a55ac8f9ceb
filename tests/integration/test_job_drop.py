"""`memd job drop` asks a person on a terminal, and a program has to say --yes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

TIMEOUT_S = 60.0


@contextmanager
def terminal(typed: str) -> Iterator[int]:
    """A descriptor of a terminal where `typed` has been typed."""
    person, command = pty.openpty()
    try:
        os.write(person, typed.encode())
        yield command
    finally:
        os.close(command)
        os.close(person)


def memd(
    daemon: Daemon, *arguments: str, stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memd", *arguments, "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        stdin=stdin,
        env={key: value for key, value in os.environ.items() if not key.startswith("MEMD_")},
    )


def jobs(daemon: Daemon) -> list[str]:
    return [job["name"] for job in json.loads(memd(daemon, "job", "list", "--json").stdout)]


@pytest.fixture
def job(daemon: Daemon) -> str:
    with memd_client.connect(daemon.address, job="asked", host_bytes=16 << 20) as session:
        session.put("blob", torch.ones(8))
    return "asked"


def test_a_person_is_asked_and_may_say_no(daemon: Daemon, job: str) -> None:
    with terminal("n\n") as stdin:
        kept = memd(daemon, "job", "drop", job, stdin=stdin)
    assert kept.returncode == 1
    assert f"Drop job {job}? Its parameters, optimizer states and blobs are gone" in kept.stderr
    assert jobs(daemon) == [job]
    with terminal("y\n") as stdin:
        dropped = memd(daemon, "job", "drop", job, stdin=stdin)
    assert dropped.returncode == 0
    assert dropped.stdout == f"dropped {job}\n"
    assert jobs(daemon) == []


def test_a_program_says_yes(daemon: Daemon, job: str) -> None:
    for force in ((), ("--force",)):
        refused = memd(daemon, "job", "drop", job, *force)
        assert refused.returncode == 2
        assert "say --yes, or call this from a terminal" in refused.stderr
    assert jobs(daemon) == [job]
    assert memd(daemon, "job", "drop", job, "--yes").returncode == 0
    assert jobs(daemon) == []
