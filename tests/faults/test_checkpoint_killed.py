"""A process that is killed while it loads or saves a checkpoint leaves all of it or nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import memd_client
from memd_client.checkpoints.checkpoint_files import CheckpointFile
from memd_client.connection.reattach import ReattachingControl
from tests.faults.killed_checkpoint import NEW, OLD, Model, seed_of

if TYPE_CHECKING:
    from tests.daemons import Daemon
    from tests.faults.restarts import Restarts

ROOT = Path(__file__).parents[2]
# A stride leaves out some kills, and meets both sides of the commit all the same.
LOADS = [
    ("load", 40),
    ("state", 25),
    *(
        pytest.param(what, stride, marks=pytest.mark.soak)
        for what, stride in (("load", 4), ("state", 4), ("dcp-load", 6))
    ),
]


def kill(
    daemon: Daemon, folder: Path, what: str, stride: int, program: str = "killed_checkpoint"
) -> dict[str, int]:
    command = [sys.executable, "-m", f"tests.faults.{program}", daemon.address, str(folder)]
    found = subprocess.run(
        [*command, what, str(stride)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    return {name: int(count) for name, count in re.findall(r"([a-z_]+)=(\d+)", found.stdout)}


@pytest.mark.parametrize(("what", "stride"), LOADS)
def test_a_killed_load_leaves_the_old_state_or_the_new_one(
    daemon: Daemon, tmp_path: Path, what: str, stride: int
) -> None:
    """Loads a model from safetensors, an optimizer, or both from a distributed checkpoint."""
    seen = kill(daemon, tmp_path, what, stride)
    assert seen["old"] > 0
    assert seen["new"] > 0
    if stride < 10:
        assert seen["old"] + seen["new"] >= 10
        assert seen["killed_again"] > 0


# Six moments in a row lie between the first shard's name and the last one's.
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_save_leaves_the_old_files_or_the_new_ones_or_no_index(
    daemon: Daemon, tmp_path: Path, stride: int
) -> None:
    seen = kill(daemon, tmp_path, "save", stride)
    assert seen["old"] > 0
    assert seen["absent"] > 0
    if stride == 1:
        assert seen["new"] > 0
        assert seen["old"] + seen["new"] + seen["absent"] >= 10


@pytest.mark.parametrize("stride", [40, pytest.param(5, marks=pytest.mark.soak)])
def test_a_killed_distributed_save_leaves_the_earlier_checkpoint_or_the_new_one(
    daemon: Daemon, tmp_path: Path, stride: int
) -> None:
    seen = kill(daemon, tmp_path, "dcp-save", stride)
    assert seen["old"] > 0
    if stride < 10:
        assert seen["new"] > 0
        assert seen["old"] + seen["new"] >= 10


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "stride"),
    [("accelerate", 8), pytest.param("lightning", 2, marks=pytest.mark.soak)],
)
def test_a_killed_save_of_a_library_leaves_the_earlier_checkpoint_or_the_new_one(
    daemon: Daemon, tmp_path: Path, library: str, stride: int
) -> None:
    seen = kill(daemon, tmp_path, library, stride, "killed_library_save")
    assert seen["old"] > 0
    assert seen["new"] > 0
    assert seen["old"] + seen["new"] >= 10


@pytest.mark.more
@pytest.mark.parametrize("killed", ["trainer", "daemon"])
@pytest.mark.parametrize(
    "what",
    [
        "dcp-save",
        "load",
        *(
            pytest.param(what, marks=pytest.mark.soak)
            for what in ("save", "async-save", "dcp-load", "state")
        ),
    ],
)
def test_ten_kills_at_random_moments_leave_all_of_it_or_nothing(
    tmp_path: Path, what: str, killed: str
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.soak.checkpoint_kills", "--what", what]
    command += ["--killed", killed, "--count", "10", "--json", str(report)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    outcome = json.loads(report.read_text())
    assert outcome["kills"] == outcome["old"] + outcome["new"] == 10


def killing(restarts: Restarts, number: int, *, with_memory: bool, monkeypatch: Any) -> list[str]:
    """The daemon is killed at this of a load's moments: a read of the file, or the end. Says what
    had happened by then."""
    moments: list[str] = []

    def note(what: str) -> None:
        moments.append(what)
        if len(moments) == number:
            kill_daemon(restarts, with_memory=with_memory)

    read, drop = CheckpointFile.read, ReattachingControl.drop_snapshot

    def noted_read(file: CheckpointFile, begin: int, into: memoryview) -> None:
        note("read")
        read(file, begin, into)

    def noted_drop(control: ReattachingControl, request: Any) -> Any:
        note("end")
        return drop(control, request)

    monkeypatch.setattr(CheckpointFile, "read", noted_read)
    monkeypatch.setattr(ReattachingControl, "drop_snapshot", noted_drop)
    return moments


def kill_daemon(restarts: Restarts, *, with_memory: bool) -> None:
    if not with_memory:
        os.kill(restarts.holder_process_id(), signal.SIGKILL)
    restarts.kill_and_begin_start()


@pytest.mark.parametrize(("number", "moment"), [(3, "read"), (7, "end")])
def test_a_load_goes_on_when_the_daemon_is_killed(
    restarts: Restarts, tmp_path: Path, number: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memd_client.save_safetensors(Model(NEW), tmp_path / "a.safetensors")
    session = memd_client.connect(restarts.daemon.address, job="checkpoint")
    model = memd_client.offload(Model(OLD), session)
    moments = killing(restarts, number, with_memory=True, monkeypatch=monkeypatch)
    memd_client.load_safetensors(model, tmp_path / "a.safetensors", session)
    monkeypatch.undo()
    assert moments[number - 1] == moment
    restarts.settle()
    assert seed_of(model.state_dict()) == NEW
    session.close()


@pytest.mark.parametrize("number", [3, 7])
def test_a_job_goes_back_when_the_daemon_s_memory_is_lost_before_a_load_counts(
    restarts: Restarts, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memd_client.save_safetensors(Model(NEW), tmp_path / "a.safetensors")
    session = memd_client.connect(restarts.daemon.address, job="checkpoint")
    model = memd_client.offload(Model(OLD), session)
    killing(restarts, number, with_memory=False, monkeypatch=monkeypatch)
    with pytest.raises(memd_client.SessionFenced):
        memd_client.load_safetensors(model, tmp_path / "a.safetensors", session)
    monkeypatch.undo()
    assert_stored(restarts, session, OLD)


def test_a_load_that_has_returned_is_on_disk(restarts: Restarts, tmp_path: Path) -> None:
    memd_client.save_safetensors(Model(NEW), tmp_path / "a.safetensors")
    session = memd_client.connect(restarts.daemon.address, job="checkpoint")
    model = memd_client.offload(Model(OLD), session)
    memd_client.load_safetensors(model, tmp_path / "a.safetensors", session)
    kill_daemon(restarts, with_memory=False)
    assert_stored(restarts, session, NEW)


def test_first_values_are_on_disk_when_offload_has_returned(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="checkpoint")
    memd_client.offload(Model(OLD), session)
    kill_daemon(restarts, with_memory=False)
    assert_stored(restarts, session, OLD)


def assert_stored(restarts: Restarts, session: memd_client.Session, seed: int) -> None:
    """In the job of a session whose daemon's memory is gone."""
    daemon = restarts.settle()
    with suppress(memd_client.SessionFenced):
        session.close()
    with memd_client.connect(daemon.address, job="checkpoint") as again:
        model = memd_client.offload(Model(3), again)
        assert seed_of(model.state_dict()) == seed
        names = [shard.spec.name for shard in again.transaction.job.shards.list_all()]
        assert not [name for name in names if name.startswith("@load/")]
