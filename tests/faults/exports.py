"""A job with a snapshot, and the command that exports it, for tests that disturb it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import memd_client
from memd.client import DaemonClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon
    from tests.faults.restarts import Restarts

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
JOB = "exported"
# One that goes on to the end: no snapshot of these tests has so many pieces.
NEVER = 10**6
# An export that is to be killed takes so long for each of its pieces, of which it has more than 12.
PACE_S = 0.04
MOMENTS_S_MAX = 0.6
# gRPC takes some MiB more than its caller has read. If a snapshot is larger, the daemon still reads
# while the command does.
LARGE_BLOBS = 40
LARGE_MOMENTS_S_MAX = 2.5


def make_job(daemon: Daemon, *, blobs: int = 12) -> None:
    """Parameters with moments, and blobs of a MiB each; the snapshot `first` of step 1."""
    session = memd_client.connect(daemon.address, job=JOB, fresh=True, host_bytes=40 << 20)
    torch.manual_seed(0)
    model = memd_client.offload(
        torch.nn.Sequential(torch.nn.Linear(512, 700), torch.nn.Linear(700, 64)), session
    )
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
    for number in range(blobs):
        session.put(f"blob{number}", torch.randn(1 << 18))
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert session.snapshot("first") == 1
    session.close()


def drop_job(daemon: Daemon) -> None:
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_job(JOB, force=True)


@contextmanager
def begun(
    daemon: Daemon, path: Path, *arguments: str, pieces: int = NEVER, pace_s: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """The command, which stands still behind `pieces`, and takes `pace_s` for each at least."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMD_")}
    command = [sys.executable, "-m", "tests.faults.paused_export", str(pieces), str(pace_s)]
    command += ["snapshot", "export", JOB, "first", str(path), "--socket", str(daemon.socket)]
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if pieces != NEVER:
                assert has_begun(process), process.communicate()
                assert process.stdout is not None
                assert process.stdout.readline() == "stands still\n", process.communicate()
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def export(daemon: Daemon, path: Path, *arguments: str, status: int = 0) -> str:
    """Runs the command to its end, and returns its stderr."""
    with begun(daemon, path, *arguments) as process:
        _, text = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, text
    return text


def bytes_of(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def read_bytes(daemon: Daemon) -> float:
    """Bytes of snapshots that the daemon has read for exports since its start."""
    found = re.search(
        r"^memd_snapshot_export_bytes_total (\S+)$", daemon.get("/metrics"), re.MULTILINE
    )
    assert found
    return float(found[1])


def wait_for(path: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.002)


def has_begun(process: subprocess.Popen[str]) -> bool:
    """Waits until the command is about to write, or has ended."""
    assert process.stdout is not None
    return process.stdout.readline() == "begun\n"


def kill_commands(
    daemon: Daemon, folder: Path, *, count: int, seed: int, file_format: str = "safetensors"
) -> Counter[str]:
    """Kills the command at random moments, whose successor goes on. Returns how many left what."""
    form = ("--format", file_format)
    export(daemon, folder / "whole", *form)
    wanted = bytes_of(folder / "whole")
    moments = random.Random(seed)
    path = folder / "out"
    seen: Counter[str] = Counter()
    for _ in range(count):
        with begun(daemon, path, *form, pace_s=PACE_S) as process:
            assert has_begun(process), process.communicate()
            time.sleep(moments.uniform(0, MOMENTS_S_MAX))
            process.kill()
            process.wait(TIMEOUT_S)
        if not path.exists():
            seen["absent"] += 1
            continue
        seen["whole"] += 1
        assert bytes_of(path) == wanted
        shutil.rmtree(path)
    export(daemon, path, *form)
    assert bytes_of(path) == wanted
    assert not partial_of(path).exists()
    return seen


def kill_daemons(
    restarts: Restarts, folder: Path, *, count: int, seed: int, file_format: str = "safetensors"
) -> Counter[str]:
    """Kills the daemon at random moments of a command, which waits for the next one."""
    form = ("--format", file_format)
    make_job(restarts.daemon, blobs=LARGE_BLOBS)
    export(restarts.daemon, folder / "whole", *form)
    wanted = bytes_of(folder / "whole")
    moments = random.Random(seed)
    path = folder / "out"
    seen: Counter[str] = Counter()
    for _ in range(count):
        with begun(restarts.daemon, path, *form, pace_s=PACE_S) as process:
            assert has_begun(process), process.communicate()
            time.sleep(moments.uniform(0, LARGE_MOMENTS_S_MAX))
            restarts.kill()
            assert not path.exists() or bytes_of(path) == wanted
            restarts.begin_start()
            _, text = process.communicate(timeout=TIMEOUT_S)
        daemon = restarts.settle()
        waited = "waits for the daemon" in text
        seen["waited" if waited else "done"] += 1
        assert process.returncode == 0, text
        assert bytes_of(path) == wanted
        shutil.rmtree(path)
        with DaemonClient(daemon.attach_socket) as client:
            *_, last = client.check(JOB)
        assert not last.findings
    return seen
