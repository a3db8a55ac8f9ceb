"""Starts the ranks of a program, and reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Daemon

TIMEOUT_S = 240
PROGRAMS = "tests.integration.rank_programs"


def run(
    daemon: Daemon,
    tmp_path: Path,
    name: str,
    *,
    world_size: int,
    killed: int | None = None,
    programs: str = PROGRAMS,
    **environ: str,
) -> list[Any]:
    """The output of each rank of a program; None of the one that is killed."""
    meeting = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    meeting.touch()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", programs, name, daemon.address, str(meeting)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        answers = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    errors = "".join(f"rank {rank}:\n{written}" for rank, (_, written) in enumerate(answers))
    for rank, process in enumerate(processes):
        assert process.returncode == (-9 if rank == killed else 0), errors
    return [
        json.loads(output.splitlines()[-1]) if rank != killed else None
        for rank, (output, _) in enumerate(answers)
    ]
