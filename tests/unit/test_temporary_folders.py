"""The next start removes what a killed embedded daemon left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from memd_client.connection.temporary_folders import TemporaryFolder, remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "embedded-"


def abandoned(parent: Path) -> Path:
    """A folder whose process is gone."""
    folder = TemporaryFolder(parent, prefix=PREFIX)
    (folder.path / "memd.volume").write_bytes(b"x")
    folder.hand_over()
    return folder.path


def test_the_next_start_removes_a_folder_that_nobody_uses(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    folder = TemporaryFolder(tmp_path, prefix=PREFIX)
    assert not left.exists()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_stays_while_its_maker_or_the_daemon_lives(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path, prefix=PREFIX)
    remove_abandoned(tmp_path, prefix=PREFIX)
    assert folder.path.exists()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder.lock]
    ) as daemon:
        folder.hand_over()
        remove_abandoned(tmp_path, prefix=PREFIX)
        assert folder.path.exists()
        daemon.kill()
    remove_abandoned(tmp_path, prefix=PREFIX)
    assert not folder.path.exists()


def test_what_is_not_of_memd_stays(tmp_path: Path) -> None:
    target = abandoned(tmp_path)
    moved = target.rename(tmp_path / "other")
    (tmp_path / (PREFIX + "link")).symlink_to(moved)
    unmarked = tmp_path / (PREFIX + "unmarked")
    unmarked.mkdir()
    (tmp_path / (PREFIX + "file")).touch()
    linked = tmp_path / (PREFIX + "linked")
    linked.mkdir()
    (linked / ".memd-temporary").symlink_to(moved / ".memd-temporary")
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path, prefix=PREFIX)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [".", ".memd-temporary"])
def test_another_user_s_folder_stays(tmp_path: Path, name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    left = abandoned(tmp_path)
    os.chown(left / name, 65534, 65534)
    remove_abandoned(tmp_path, prefix=PREFIX)
    assert left.exists()
