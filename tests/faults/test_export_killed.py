"""Exports that are disturbed: the target is whole or absent, and the same command goes on."""

from __future__ import annotations

import signal
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.exports import (
    LARGE_BLOBS,
    PACE_S,
    begun,
    bytes_of,
    drop_job,
    export,
    kill_commands,
    kill_daemons,
    make_job,
    partial_of,
    read_bytes,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon
    from tests.faults.restarts import Restarts

pytestmark = pytest.mark.timeout(300)

KILLS = [
    ("safetensors", 3),
    *(pytest.param(name, 10, marks=pytest.mark.soak) for name in ("safetensors", "dcp")),
]


@pytest.fixture
def job(daemon: Daemon) -> Iterator[Daemon]:
    make_job(daemon)
    yield daemon
    drop_job(daemon)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_written_is_not_read_again(
    job: Daemon, tmp_path: Path, number: signal.Signals
) -> None:
    export(job, tmp_path / "whole")
    whole_bytes = read_bytes(job)
    path = tmp_path / "out"
    with begun(job, path, pieces=10) as process:
        process.send_signal(number)
        _, text = process.communicate(timeout=60)
    assert ("the same command goes on" in text) == (number == signal.SIGINT)
    assert not path.exists()
    assert partial_of(path).is_dir()
    before = read_bytes(job)
    assert "goes on where an earlier export ended" in export(job, path)
    assert read_bytes(job) - before < whole_bytes * 0.6
    assert bytes_of(path) == bytes_of(tmp_path / "whole")
    assert not partial_of(path).exists()


def test_a_part_whose_bytes_are_not_those_that_were_synced_is_written_again(
    job: Daemon, tmp_path: Path
) -> None:
    export(job, tmp_path / "whole")
    path = tmp_path / "out"
    with begun(job, path, pieces=10) as process:
        process.kill()
    blobs = partial_of(path) / "files" / "blobs.safetensors"
    with blobs.open("r+b") as file:  # as a file system may leave what was never synced
        file.seek(5 << 20)
        file.write(bytes(4096))
    export(job, path)
    assert bytes_of(path) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["log", "header", "missing", "other files"])
def test_a_part_that_cannot_be_gone_on_with_is_begun_anew(
    job: Daemon, tmp_path: Path, damage: str
) -> None:
    export(job, tmp_path / "whole")
    path = tmp_path / "out"
    given = ["--max-file", "2MiB"] if damage == "other files" else []
    with begun(job, path, *given, pieces=10) as process:
        process.kill()
    files = partial_of(path) / "files"
    if damage == "log":
        (partial_of(path) / "log").write_bytes(b"0123456789abcdef {}\n")
    elif damage == "header":
        with (files / "blobs.safetensors").open("r+b") as file:
            file.write(bytes(8))
    elif damage == "missing":
        (files / "model.safetensors").unlink()
    export(job, path)
    assert bytes_of(path) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize(("file_format", "count"), KILLS)
def test_a_killed_command_leaves_the_folder_whole_or_absent(
    job: Daemon, tmp_path: Path, file_format: str, count: int
) -> None:
    seen = kill_commands(job, tmp_path, count=count, seed=7, file_format=file_format)
    assert seen["absent"] > 0


@pytest.mark.parametrize(("file_format", "count"), KILLS)
def test_a_command_waits_for_the_next_daemon_and_goes_on(
    restarts: Restarts, tmp_path: Path, file_format: str, count: int
) -> None:
    seen = kill_daemons(restarts, tmp_path, count=count, seed=8, file_format=file_format)
    assert seen["waited"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_in_the_middle_is_waited_for(
    restarts: Restarts, tmp_path: Path, number: signal.Signals
) -> None:
    make_job(restarts.daemon, blobs=LARGE_BLOBS)
    export(restarts.daemon, tmp_path / "whole")
    path = tmp_path / "out"
    with begun(restarts.daemon, path, pace_s=PACE_S) as process:
        wait_for(partial_of(path) / "files" / "blobs.safetensors")
        restarts.daemon.stop(number)
        restarts.begin_start()
        _, text = process.communicate(timeout=120)
    restarts.settle()
    assert process.returncode == 0, text
    assert "waits for the daemon" in text
    assert bytes_of(path) == bytes_of(tmp_path / "whole")


def test_a_command_that_stands_still_does_not_hold_up_the_end_of_the_daemon(
    restarts: Restarts, tmp_path: Path
) -> None:
    make_job(restarts.daemon, blobs=LARGE_BLOBS)
    path = tmp_path / "out"
    with begun(restarts.daemon, path, pace_s=PACE_S) as process:
        wait_for(partial_of(path) / "files" / "blobs.safetensors")
        process.send_signal(signal.SIGSTOP)
        restarts.daemon.process.terminate()
        # Other calls that are under way have 20 s.
        assert restarts.daemon.process.wait(15) == 0
        process.send_signal(signal.SIGCONT)
        restarts.begin_start()
        _, text = process.communicate(timeout=120)
    restarts.settle()
    assert process.returncode == 0, text


def test_the_memory_of_a_killed_command_is_that_of_the_next_ones(
    job: Daemon, tmp_path: Path
) -> None:
    with begun(job, tmp_path / "killed", pieces=2) as process:
        assert memory_of_exports(job)
        process.kill()
        process.wait(60)
    # Its last reads may be in flight while the next command begins.
    end = time.monotonic() + 60
    for number in count():
        before = len(memory_of_exports(job))
        export(job, tmp_path / f"whole{number}")
        if len(memory_of_exports(job)) == before:
            break
        assert time.monotonic() < end
    assert before <= 8
    assert "memd_snapshot_exports 0.0" in job.get("/metrics")


def memory_of_exports(daemon: Daemon) -> list[str]:
    """Mappings of the daemon."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    return [line for line in maps.splitlines() if "memd-export" in line]
