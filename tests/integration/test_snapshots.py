"""Snapshots: a job keeps committed steps and trains on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd.client import DaemonClient
from memd_native import check_volumes
from tests.daemons import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon, Daemons

HOST_BYTES = 40 << 20
BLOCK_BYTES = 4096


def memd(daemon: Daemon, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMD_")}
    answer = subprocess.run(
        [sys.executable, "-m", "memd", *arguments, "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    assert answer.returncode == status, answer
    return answer


def answer_of(daemon: Daemon, *arguments: str, status: int = 0) -> Any:
    return json.loads(memd(daemon, *arguments, "--json", status=status).stdout)


def read_alone(daemon: Daemon, *arguments: str, status: int = 0) -> str:
    """Runs a command on the volumes of a daemon that has ended, and returns its output."""
    answer = subprocess.run(
        [sys.executable, "-m", "memd", *arguments, "--data", str(daemon.data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode == status, answer
    return answer.stdout


def damage_catalogue(data: Path, snapshot: str) -> None:
    """Damages the one catalogue on disk that this snapshot alone names."""
    volume = data / "memd.volume"
    found = volume.read_bytes()
    for at in range(0, len(found), BLOCK_BYTES):
        if not found.startswith(b"memd-job", at):
            continue
        for byte in (found[at + 99] ^ 1, found[at + 99]):  # and back, if it is another's
            with volume.open("r+b") as file:
                file.seek(at + 99)
                file.write(bytes([byte]))
            if [each.snapshot for each in check_volumes([str(data)]).findings] == [snapshot]:
                return
    raise AssertionError(f"no catalogue of {snapshot}")


@contextmanager
def job_of(daemon: Daemon, name: str, **settings: Any) -> Iterator[Training]:
    """Its memory is free for the next test afterwards."""
    training = Training(daemon, name, **settings)
    try:
        yield training
    finally:
        training.session.close()
        with DaemonClient(daemon.attach_socket) as client:
            client.drop_job(name, force=True)


class Training:
    """A small model in one job; its numbers depend on nothing but how many steps it made."""

    def __init__(self, daemon: Daemon, job: str, **settings: Any) -> None:
        self.job = job
        self.session = memd_client.connect(
            daemon.address, job=job, host_bytes=HOST_BYTES, nvme_bytes=64 << 20, **settings
        )
        torch.manual_seed(0)
        self.model = memd_client.offload(
            torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.Linear(600, 8)), self.session
        )
        self.optimizer = memd_client.AdamW(self.model.parameters(), lr=1e-2, session=self.session)
        self.step = self.session.resume()

    def values(self) -> list[torch.Tensor]:
        with memd_client.gather(self.model):
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.step)
        self.model(torch.randn(4, 64, generator=generator)).square().mean().backward()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


@pytest.fixture
def training(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Training]:
    with job_of(daemon, request.node.name) as made:
        yield made


def test_a_session_keeps_its_last_step_and_goes_on(daemon: Daemon, training: Training) -> None:
    training.train(2)
    assert training.session.snapshot("second") == 2
    training.train()
    assert training.session.committed_step == 3
    listed = answer_of(daemon, "snapshot", "list", training.job)
    assert [(each["job"], each["name"], each["step"]) for each in listed] == [
        (training.job, "second", 2)
    ]
    assert listed[0]["bytes"] > 64 * 600 * 12
    assert not listed[0]["is_lost"]
    told = answer_of(daemon, "job", "show", training.job)["job"]
    assert told["snapshot_count"] == 1
    assert told["snapshot_bytes"] == listed[0]["bytes"]
    assert told["nvme_bytes_used"] > told["snapshot_bytes"]
    metrics = daemon.get("/metrics")
    assert f'memd_job_snapshots{{memd_job="{training.job}"}} 1.0' in metrics
    kept = re.search(r"^memd_snapshots_kept_bytes (\S+)$", metrics, re.MULTILINE)
    assert kept is not None
    assert float(kept[1]) > 64 * 600 * 12
    table = memd(daemon, "snapshot", "list").stdout
    assert "second" in table
    assert "whole" in table


def test_the_command_line_makes_and_drops_one_while_the_job_trains(
    daemon: Daemon, training: Training
) -> None:
    training.train()
    refused = memd(daemon, "snapshot", "create", training.job, "by hand", status=1).stderr
    assert "a snapshot's name has 1 to 128 letters" in refused
    text = memd(daemon, "snapshot", "create", training.job, "by-hand").stdout
    assert text == f"{training.job}: snapshot by-hand of step 1\n"
    training.train()
    refused = memd(daemon, "snapshot", "drop", training.job, "by-hand", status=2).stderr
    assert "--yes" in refused
    memd(daemon, "snapshot", "drop", training.job, "by-hand", "--yes")
    assert answer_of(daemon, "snapshot", "list", training.job) == []
    training.train()


def test_a_wrong_snapshot_is_one_clear_error(daemon: Daemon, training: Training) -> None:
    training.train()
    training.session.snapshot("first")
    with pytest.raises(
        memd_client.InvalidArgument, match="has a snapshot first already, of step 1"
    ):
        training.session.snapshot("first")
    with pytest.raises(memd_client.InvalidArgument, match="a snapshot's name has 1 to 128"):
        training.session.snapshot("no spaces")
    # Sessions drop what begins so.
    with pytest.raises(memd_client.InvalidArgument, match=r"dcp.async_save makes and drops"):
        training.session.snapshot("async_save/20261126T010203Z-0123456789ab")
    refused = memd(daemon, "snapshot", "create", training.job, "async_save/best", status=1).stderr
    assert "names that begin with async_save/" in refused
    none = memd(daemon, "snapshot", "drop", training.job, "second", "--yes", status=1).stderr
    assert "has no snapshot second; it has first" in none
    missing = memd(daemon, "snapshot", "create", "nobody", "x", status=1).stderr
    assert "there is no job 'nobody'" in missing
    training.train()
    assert training.session.committed_step == 2


def test_none_is_made_between_step_and_commit(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="tracked", host_bytes=HOST_BYTES) as session:
        torch.manual_seed(0)
        model = memd_client.offload(torch.nn.Linear(16, 4), session)
        optimizer = memd_client.AdamW(model.parameters(), session=session)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        session.track(scheduler=scheduler)
        session.resume()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        with pytest.raises(memd_client.InvalidArgument, match="commit"):
            session.snapshot("too-early")
        session.commit()
        assert session.snapshot("in-time") == 1
    memd(daemon, "job", "drop", "tracked", "--force", "--yes")


def test_a_quota_that_does_not_hold_one_state_more_refuses_it(daemon: Daemon) -> None:
    with memd_client.connect(
        daemon.address, job="narrow", host_bytes=HOST_BYTES, nvme_bytes=5 << 20
    ) as session:
        session.put("blob", torch.zeros(3 << 20, dtype=torch.uint8))
        with pytest.raises(memd_client.CapacityError, match=r"\(snapshots\); nvme_bytes 5242880"):
            session.snapshot("first")
        assert session.get("blob").sum() == 0
        session.put("more", torch.ones(1 << 20, dtype=torch.uint8))
    assert answer_of(daemon, "snapshot", "list", "narrow") == []
    memd(daemon, "job", "drop", "narrow", "--yes")


@pytest.mark.parametrize("durability", ["every:4", "none"])
def test_what_is_newer_in_memory_is_written_first(daemon: Daemon, durability: str) -> None:
    with job_of(daemon, f"memory-{durability}", durability=durability) as training:
        training.train(3)
        assert training.session.snapshot("third") == 3
        training.train(2)
        report = answer_of(daemon, "check", "--job", training.job)
        assert not report["lost"]
        assert [each["step"] for each in report["jobs"][0]["snapshots"]] == [3]
        assert report["jobs"][0]["snapshots"][0]["extents"] > 0


@pytest.mark.parametrize("durability", ["step", "every:4", "none"])
def test_a_job_that_goes_back_trains_on_with_the_same_bits(daemon: Daemon, durability: str) -> None:
    name = f"back-{durability}"
    first = Training(daemon, name, durability=durability)
    first.train(2)
    first.session.snapshot("second")
    first.train(3)
    fifth = first.values()
    used = memd(daemon, "snapshot", "restore", name, "second", "--yes", status=1).stderr
    assert "is in use; end its trainers first" in used
    first.train()
    first.session.close()
    asks = memd(daemon, "snapshot", "restore", name, "second", status=2).stderr
    assert "--yes" in asks
    text = memd(daemon, "snapshot", "restore", name, "second", "--yes").stdout
    assert text == f"{name} is at step 2, of snapshot second\n"
    with job_of(daemon, name) as second:
        assert second.step == 2
        second.train(3)
        assert all(torch.equal(a, b) for a, b in zip(second.values(), fifth, strict=True))
        report = answer_of(daemon, "check", "--job", name)
        assert report["findings"] == []


def test_a_job_with_snapshots_is_dropped_only_with_force(daemon: Daemon) -> None:
    training = Training(daemon, "kept")
    training.train()
    training.session.snapshot("first")
    training.session.close()
    refused = memd(daemon, "job", "drop", "kept", "--yes", status=1).stderr
    assert "has snapshots; drop them first (memd snapshot drop)" in refused
    assert refused.rstrip().endswith("first")
    with pytest.raises(memd_client.MemdError, match="has snapshots"):
        memd_client.connect(daemon.address, job="kept", host_bytes=HOST_BYTES, fresh=True)
    memd(daemon, "job", "drop", "kept", "--force", "--yes")
    assert "kept" not in [each["name"] for each in answer_of(daemon, "job", "list")]


def test_the_next_daemon_has_them_and_each_check_reads_them(daemons: Daemons) -> None:
    daemon = daemons.start(name="killed", environ={"MEMD_SCRUB": "0"})
    training = Training(daemon, "job")
    training.train(2)
    training.session.snapshot("second")
    training.train()
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait(TIMEOUT_S)
    daemon = daemons.start(name="killed", environ={"MEMD_SCRUB": "0"})
    training.train()
    assert training.session.snapshot("fourth") == 4
    training.session.close()
    online = answer_of(daemon, "check")
    assert daemon.stop() == 0
    offline = json.loads(read_alone(daemon, "check", "--json"))
    for report in (online, offline):
        assert not report["lost"]
        assert report["findings"] == []
        kept = report["jobs"][0]["snapshots"]
        assert [(each["snapshot"], each["step"]) for each in kept] == [("second", 2), ("fourth", 4)]
    assert online["jobs"] == offline["jobs"]


def test_a_lost_snapshot_is_named_by_each_check_and_its_job_stays_known(
    daemons: Daemons, tmp_path: Path
) -> None:
    daemon = daemons.start(name="damaged", environ={"MEMD_SCRUB": "0"})
    training = Training(daemon, "job")
    training.train()
    training.session.snapshot("first")
    training.train()
    training.session.snapshot("second")
    training.train()
    training.session.close()
    assert daemon.stop() == 0
    damage_catalogue(daemon.data, "first")
    text = read_alone(daemon, "check", status=3)
    assert "LOST: job/snapshot first the snapshot's catalogue: " in text
    assert "  snapshot first: LOST, step 1: its catalogue is damaged; `memd snapshot drop" in text
    assert "  snapshot second: all right, step 2" in text
    listed = json.loads(read_alone(daemon, "volume", "list", "--json"))
    assert listed["jobs_unknown"] == ""
    assert "2, first is lost" in read_alone(daemon, "volume", "list")
    offline = json.loads(read_alone(daemon, "check", "--json", status=3))
    daemon = daemons.start(name="damaged", environ={"MEMD_SCRUB": "0"})
    online = answer_of(daemon, "check", status=3)
    for report in (listed, offline, online):
        kept = report["jobs"][0]["snapshots"]
        assert [(each["snapshot"], each["step"], each["lost"]) for each in kept] == [
            ("first", 1, True),
            ("second", 2, False),
        ]
    assert "  snapshot first: LOST, step 1" in memd(daemon, "check", status=3).stdout
    for command, argument in (("restore", "--yes"), ("export", str(tmp_path / "exported"))):
        refused = memd(daemon, "snapshot", command, "job", "first", argument, status=3).stderr
        assert "snapshot first of job job is not whole any more" in refused
    memd(daemon, "snapshot", "drop", "job", "first", "--yes")
    training = Training(daemon, "job")
    training.train()
    training.session.close()
    assert not answer_of(daemon, "check")["lost"]
