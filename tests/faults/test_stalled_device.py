"""A device that stops answering holds up neither the end of a daemon nor its start: each says on
what it waits."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd.client import DaemonClient
from memd.daemon import DRAIN_S
from tests.daemons import TIMEOUT_S, daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.daemons import Daemons

LIBRARY = Path(__file__).parents[2] / "build/release/libstalled_device.so"


@pytest.fixture
def made() -> Iterator[Daemons]:
    with daemons() as made:
        yield made


def environ_of(flag: Path) -> dict[str, str]:
    """Volumes do not answer for as long as `flag` exists."""
    return {
        "LD_PRELOAD": str(LIBRARY),
        "STALLED_WHILE": str(flag),
        "MEMD_IO_ENGINE": "threads",
        "MEMD_HOLDER_SECONDS": "0",
    }


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.more
def test_sigterm_ends_a_daemon_whose_device_does_not_answer_a_sync(
    made: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    flag = tmp_path / "stalled"
    daemon = made.start(environ=environ_of(flag))
    session = memd_client.connect(daemon.address, job="stalled")
    session.put("blob", torch.arange(100_000))
    flag.touch()
    ended: list[BaseException] = []

    def close() -> None:
        try:
            session.close()  # syncs
        except memd_client.MemdError as error:
            ended.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    with DaemonClient(daemon.attach_socket) as client:
        wait_until(lambda: any(each.kind == "write" for each in client.in_flight().activities))
    daemon.process.send_signal(signal.SIGTERM)
    # What it may take, and the end of the interpreter.
    assert daemon.process.wait(DRAIN_S + 5) == 1
    said = daemon.log.read_text()
    for part in (
        "the daemon stops without what a device does not finish; every job is on disk as of its "
        "last commit: ",
        str(daemon.data / "memd.volume"),
    ):
        assert part in said
    closing.join(TIMEOUT_S)
    assert ended


def test_a_start_whose_superblocks_are_not_answered_names_the_volumes_and_is_ended_by_sigterm(
    made: Daemons, tmp_path: Path
) -> None:
    flag = tmp_path / "stalled"
    first = made.start(environ=environ_of(flag))
    assert first.stop() == 0
    flag.touch()
    log = tmp_path / "log"
    with log.open("w") as stderr:
        starting = subprocess.Popen(
            made.command(),
            env=os.environ | environ_of(flag),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    made.started.append(starting)
    wait_until(lambda: "opening the volumes" in log.read_text())
    assert str(first.data) in log.read_text().splitlines()[-1]
    starting.terminate()
    assert starting.wait(TIMEOUT_S) == -signal.SIGTERM
