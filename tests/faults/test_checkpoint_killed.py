"""A process that is killed while it loads or saves a checkpoint leaves all of it or nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
# A stride leaves out moments, and meets both sides of the commit all the same.
STRIDES = [40, pytest.param(4, marks=pytest.mark.more)]


def kill(daemon: Daemon, folder: Path, what: str, stride: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.faults.killed_checkpoint", daemon.address, str(folder)]
    found = subprocess.run(
        [*command, what, str(stride)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    return {name: int(count) for name, count in re.findall(r"([a-z_]+)=(\d+)", found.stdout)}


@pytest.mark.parametrize("stride", STRIDES)
def test_a_killed_load_leaves_the_old_values_or_the_new_ones(
    daemon: Daemon, tmp_path: Path, stride: int
) -> None:
    seen = kill(daemon, tmp_path, "load", stride)
    assert seen["old"] > 0
    assert seen["new"] > 0
    if stride < 10:
        assert seen["old"] + seen["new"] >= 10
        assert seen["killed_again"] > 0


@pytest.mark.parametrize("stride", STRIDES)
def test_a_killed_save_leaves_the_old_files_or_the_new_ones_or_no_index(
    daemon: Daemon, tmp_path: Path, stride: int
) -> None:
    seen = kill(daemon, tmp_path, "save", stride)
    assert seen["old"] > 0
    if stride < 10:
        assert seen["new"] > 0
        assert seen["old"] + seen["new"] + seen.get("absent", 0) >= 10
