"""Starts the ranks of a program, and reads what they print."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tests.forks import shared_forks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Daemon

TIMEOUT_S = 240
PROGRAMS = "tests.integration.rank_programs"
# Ranks are forks of a process that has imported them all: each would take seconds for it.
IMPORTED = (
    PROGRAMS,
    "tests.integration.rank_failures",
    "tests.integration.rank_fsdp",
    "tests.integration.rank_groups",
)


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
    template = shared_forks(*IMPORTED)
    arguments = (programs, name, daemon.address, str(meeting))
    world = {**os.environ, "WORLD_SIZE": str(world_size), **environ}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(template.start(*arguments, environ={**world, "RANK": str(rank)}))
            for rank in range(world_size)
        ]
        answers = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    errors = "".join(f"rank {rank}:\n{written}" for rank, (_, written) in enumerate(answers))
    for rank, process in enumerate(processes):
        assert process.returncode == (-9 if rank == killed else 0), errors
    return [
        json.loads(output.splitlines()[-1]) if rank != killed else None
        for rank, (output, _) in enumerate(answers)
    ]
