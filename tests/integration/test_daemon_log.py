"""The log of a real daemon: what operators look for is there, one event a line."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from memd_proto.v1 import job_pb2, session_pb2
from tests.daemons import TIMEOUT_S, Attached
from tests.golden import image
from tests.integration.failing_reads import JOB, stored_blobs
from tests.integration.test_scrub import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.daemons import Daemons

Event = dict[str, Any]
BLOCK = 4096


def events(log: Path) -> list[Event]:
    """Each line is an event; a last one that is being written is not."""
    text = log.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(log: Path, is_it: Callable[[Event], bool]) -> Event:
    end = time.monotonic() + TIMEOUT_S
    while not (found := [event for event in events(log) if is_it(event)]):
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return found[0]


def test_a_job_s_life_is_told_with_who_did_it(daemons: Daemons) -> None:
    daemon = daemons.start("--log-format", "json", name="life")
    with Attached(daemon.attach_socket) as client:
        session = client.attach("gpt", durability="every:3").session_id
        client.call(client.sessions.Detach, session_pb2.DetachRequest(session_id=session))
        client.attach("gpt", fresh=True)
        client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="gpt", force=True))
    assert daemon.stop() == 0
    told = events(daemon.log)
    start = told[0]
    assert start["event"] == "starting"
    assert (start["host"], start["nvme"], start["log_format"]) == ("64MiB", "128MiB", "json")
    assert start["scrub"] == "16MiB"
    of_job = [event for event in told if event.get("job") == "gpt"]
    assert [event["event"] for event in of_job] == [
        "job created",
        "session attached",
        "session detached",
        "job dropped",
        "job created",
        "session attached",
        "job dropped",
    ]
    assert of_job[0]["durability"] == "every:3"
    assert of_job[3]["reason"] == "connect(fresh=True)"
    assert of_job[1]["session"] == of_job[2]["session"] == session
    for event in of_job:
        assert event["user"] == getpass.getuser()
        assert (event["uid"], event["pid"]) == (os.getuid(), os.getpid())
        assert event["level"] == "info"


def test_a_lost_shard_and_the_scrub_that_found_it_are_told(daemons: Daemons) -> None:
    volume, nvme = unpacked(daemons, "flipped-log")
    data = bytearray(volume.read_bytes())
    block = image.pattern("blob", image.UINT8, BLOCK)
    at = next(at for at in range(2 << 20, len(data), BLOCK) if data[at : at + BLOCK] == block)
    data[at + 5] ^= 1
    volume.write_bytes(data)
    daemon = daemons.start(
        "--log-format", "json", name="flipped-log", nvme=nvme, environ={"MEMD_SCRUB": "1GiB"}
    )
    damage = wait_for(daemon.log, lambda event: event["event"] == "scrub found damage")
    assert damage["level"] == "error"
    assert f"{volume} at {at}, " in damage["reason"]
    lost = wait_for(daemon.log, lambda event: event["event"].startswith("shards lost"))
    assert (lost["job"], lost["shards"], lost["count"]) == (image.JOB, "blob", 1)
    ended = wait_for(daemon.log, lambda event: event["event"] == "scrub pass ended")
    assert ended["errors"] == 1
    assert daemon.stop() == 0


@pytest.mark.more
def test_an_unreadable_shard_is_told_and_that_it_can_be_read_again(daemons: Daemons) -> None:
    with stored_blobs(daemons, "whole", "failing", name="unreadable-log") as job:
        log = job.daemon.log
        with job.failing_from("failing"):
            assert "can't be read now, though they may be whole" in job.failure_of("failing")
            told = wait_for(log, lambda event: event["event"].startswith("shards unreadable"))
        assert told["level"] == "warning"
        assert (told["job"], told["shards"], told["count"]) == (JOB, "failing", 1)
        assert job.failure_of("whole") == job.failure_of("failing") == ""
        again = wait_for(log, lambda event: event["event"] == "shards readable again")
        assert (again["level"], again["shards"]) == ("info", "failing")
        assert "shards lost" not in log.read_text()


def test_a_takeover_and_a_holder_s_end_are_told_in_the_same_format(daemons: Daemons) -> None:
    # A busy machine takes seconds to start the second daemon.
    settings = ("--log-format", "json", "--holder-seconds", "8")
    first = daemons.start(*settings, name="taken")
    with Attached(first.attach_socket) as client:
        client.attach("gpt")
        first.process.kill()
        first.process.wait(TIMEOUT_S)
        second = daemons.start(*settings, name="taken")
        taken = wait_for(second.log, lambda event: "is taken over" in event["event"])
        assert taken["kept_bytes"] > 0
        assert (taken["jobs"], taken["sessions"]) == (1, 1)
        second.process.kill()
        second.process.wait(TIMEOUT_S)
    # The first daemon started the holder, which writes where that did.
    end = wait_for(first.log, lambda event: event["logger"] == "memd.holder")
    assert end["event"] == "ended, and with it the memory that it kept"
    assert end["reason"] == "no daemon came for 8 s"
    assert end["descriptors"] > 0


def test_why_a_daemon_does_not_start_is_the_last_event(daemons: Daemons, tmp_path: Path) -> None:
    file = tmp_path / "memd.toml"

    def end_of(text: str, **settings: str) -> tuple[int, Event]:
        file.write_text(text)
        answer = subprocess.run(
            daemons.command("--config", str(file), name="wrong", **settings),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        lines = [json.loads(line) for line in answer.stderr.splitlines()]
        assert lines[-1]["level"] == "critical"
        return answer.returncode, lines[-1]

    status, event = end_of('log_format = "json"\nmax_job = 5\n')
    assert status == 2
    assert "did you mean 'max_jobs'?" in event["reason"]
    status, event = end_of('log_format = "json"\n', data="/nowhere/at/all")
    assert status == 1
    assert "does not exist; create it" in event["reason"]
    volume, nvme = unpacked(daemons, "damaged")
    length = volume.stat().st_size
    with volume.open("r+b") as data:
        for at in (0, 1 << 20, length - (2 << 20), length - (1 << 20)):  # all superblocks
            data.seek(at + 100)
            data.write(b"damage")
    status, event = end_of('log_format = "json"\n', data=str(volume.parent), nvme=nvme)
    assert status == 3
    assert str(volume) in event["reason"]


def serve_wrongly(*arguments: str, **environ: str) -> str:
    """The lines of its log."""
    answer = subprocess.run(
        [sys.executable, "-m", "memd", "serve", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, **environ},
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    return answer.stderr


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (("--bogus",), "No such option"),
        (("--bogus=5",), "No such option"),
        (("extra", "words"), "Got unexpected extra arguments (extra words)"),
        (("--parent-pid", "none"), "'none' is not a valid integer"),
        (("--socket",), "Option '--socket' requires an argument"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_use_is_a_fatal_event(wrong: tuple[str, ...], reason: str) -> None:
    event = json.loads(serve_wrongly("--log-format", "json", *wrong))
    assert (event["level"], event["event"]) == ("critical", "cannot serve")
    assert reason in event["reason"]
    assert event["reason"].endswith("See `memd serve --help`.")


def test_wrong_use_is_told_in_the_format_that_was_chosen(tmp_path: Path) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('log_format = "json"\n')
    for said in (
        serve_wrongly("--bogus", "--log-format=json"),
        serve_wrongly("--bogus", MEMD_LOG_FORMAT="json"),
        serve_wrongly("--bogus", "--config", str(file)),
    ):
        assert json.loads(said)["event"] == "cannot serve"
    (line,) = serve_wrongly("--bogus", "--config", str(file), "--log-format", "text").splitlines()
    assert 'level=critical event="cannot serve"' in line
    assert "Usage:" not in line


# `memd serve`, with a pipe's end for reading where the server thread's eventfd was: nobody can wake
# that thread any more.
WITHOUT_WAKING = """
import os, sys
import memd.daemon
from memd.cli import main

def eventfds():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventfd]":
                found.add(int(name))
        except FileNotFoundError:
            pass
    return found

def make_broken(**settings):
    before = eventfds()
    server = make(**settings)
    reading_end, _ = os.pipe2(os.O_NONBLOCK)
    for fd in eventfds() - before:
        os.dup2(reading_end, fd)
    return server

make, memd.daemon.Server = memd.daemon.Server, make_broken
sys.argv = ["memd", *sys.argv[sys.argv.index("serve"):]]
main()
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_native_check_that_fails_is_told_in_the_same_format(
    daemons: Daemons, log_format: str
) -> None:
    settings = ("--log-format", log_format, "--holder-seconds", "0")
    before = (sys.executable, "-c", WITHOUT_WAKING)
    line = daemons.refusal(*settings, name="broken", before=before, status=-signal.SIGABRT)
    if log_format == "json":
        told = json.loads(line)
        assert list(told)[:4] == ["time", "level", "event", "logger"]
        assert datetime.fromisoformat(told["time"]).tzinfo == UTC
        assert (told["level"], told["logger"]) == ("critical", "memd_native")
        assert told["event"] == "ended by a check that failed, which is a bug"
        assert told["check"].startswith("write(wake_")
        assert told["values"] == "(-1 against 8)"
        assert re.search(r"\.cc:\d+$", told["place"])
    else:
        assert re.match(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 level=critical ", line)
        assert ' event="ended by a check that failed, which is a bug" logger=memd_native ' in line
        assert ' check="write(wake_' in line
        assert ' values="(-1 against 8)" place=' in line
