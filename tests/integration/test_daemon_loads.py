"""A job into which a session loads in place: who may do what meanwhile, and what a load leaves that
broke off. The native tests have the moments (load_test.cc, kill_test.cc, powercut_test.cc)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from memd_native import PROTOCOL_VERSION
from memd_proto.v1 import job_pb2, session_pb2, tensor_pb2, types_pb2
from tests.daemons import TIMEOUT_S, Attached, daemons
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

LOAD = "load/20261126T092228Z-0123456789ab"
OLD, NEW = b"old" * 1000, b"new" * 1000
SPEC = types_pb2.ShardSpec(
    name="blob",
    kind=types_pb2.SHARD_KIND_BLOB,
    dtype=types_pb2.D_TYPE_UINT8,
    shape=[len(OLD)],
    tier=types_pb2.TIER_NVME,
)


class Loading:
    """One process's session of a job that has one blob."""

    def __init__(self, client: Attached, job: str) -> None:
        self.client = client
        self.job = job
        self.session_id = client.attach(job).session_id

    def put(self, data: bytes) -> None:
        requests = [
            tensor_pb2.PutRequest(session_id=self.session_id, spec=SPEC),
            tensor_pb2.PutRequest(data=data),
        ]
        self.client.call(self.client.tensors.Put, iter(requests))

    def get(self) -> bytes:
        request = tensor_pb2.GetRequest(session_id=self.session_id, name="blob")
        return b"".join(part.data for part in self.client.call(self.client.tensors.Get, request))

    def sync(self) -> None:
        request = session_pb2.SyncRequest(session_id=self.session_id)
        self.client.call(self.client.sessions.Sync, request)

    def begin(self) -> None:
        self.put(OLD)
        self.sync()
        assert create(self.client, self.job, LOAD, session_id=self.session_id)
        self.put(NEW)
        self.sync()

    def end(self) -> None:
        drop(self.client, self.job, LOAD, session_id=self.session_id)

    def detach(self) -> None:
        request = session_pb2.DetachRequest(session_id=self.session_id)
        self.client.call(self.client.sessions.Detach, request)


def create(client: Attached, job: str, name: str, *, session_id: int = 0) -> bool:
    """Whether it is a load's."""
    request = job_pb2.CreateSnapshotRequest(job=job, name=name, number=7, session_id=session_id)
    made: bool = client.call(client.jobs.CreateSnapshot, request).is_load
    return made


def attach_impatiently(client: Attached, job: str) -> None:
    request = session_pb2.AttachRequest(
        job=job, protocol_version=PROTOCOL_VERSION, world_size=1, without_shared_memory=True
    )
    metadata = (("memd-token", client.welcome.token),)
    client.sessions.Attach(request, timeout=1.5, metadata=metadata)


def drop(client: Attached, job: str, name: str, *, session_id: int = 0) -> None:
    request = job_pb2.DropSnapshotRequest(job=job, name=name, session_id=session_id)
    client.call(client.jobs.DropSnapshot, request)


def snapshots(client: Attached, job: str) -> list[str]:
    listed = client.call(client.jobs.ListSnapshots, job_pb2.ListSnapshotsRequest(job=job))
    return [each.name for each in listed.snapshots]


@contextmanager
def refused(code: grpc.StatusCode, words: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as error:
        yield
    call: Any = error.value
    assert call.code() is code, call.details()
    assert words in call.details()


@pytest.fixture
def loading(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Loading]:
    with Attached(daemon.attach_socket) as client:
        made = Loading(client, request.node.name)
        yield made
        client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name=made.job, force=True))


def test_names_of_loads_are_for_sessions_that_load(loading: Loading) -> None:
    client, job, own = loading.client, loading.job, loading.session_id
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    with refused(invalid, "names that begin with load/"):
        create(client, job, "load/mine")
    with refused(invalid, "names that begin with load/"):
        create(client, job, LOAD)
    with refused(invalid, "12 hexadecimal digits"):
        create(client, job, "mine", session_id=own)
    with refused(grpc.StatusCode.ABORTED, ""):
        create(client, job, LOAD, session_id=own + 1000)
    other = Loading(client, job + ".other")
    with refused(invalid, "is attached to job"):
        create(client, job, LOAD, session_id=other.session_id)
    with refused(invalid, "is attached to job"):
        drop(client, job, LOAD, session_id=other.session_id)
    client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name=other.job, force=True))
    with refused(grpc.StatusCode.NOT_FOUND, LOAD):
        drop(client, job, LOAD, session_id=own)


def test_nobody_else_has_the_job_meanwhile_and_half_of_it_never_counts(
    daemon: Daemon, loading: Loading, tmp_path: Path
) -> None:
    loading.begin()
    busy = grpc.StatusCode.FAILED_PRECONDITION
    with Attached(daemon.attach_socket) as other:
        with refused(busy, "another session loads a checkpoint into it"):
            attach_impatiently(other, loading.job)
        with refused(busy, "half a load would count"):
            drop(other, loading.job, LOAD)
        with refused(busy, "a checkpoint is being loaded into it"):
            create(other, loading.job, "half")
        export = ["snapshot", "export", loading.job, LOAD, str(tmp_path / "out")]
        assert "export another one" in memd(daemon, *export, status=1).stderr
        with refused(grpc.StatusCode.ABORTED, ""):
            drop(other, loading.job, LOAD, session_id=loading.session_id)
    with refused(busy, "a step would be of half of that"):
        step = session_pb2.StepRequest(session_id=loading.session_id)
        loading.client.call(loading.client.sessions.Step, step)
    assert snapshots(loading.client, loading.job) == [LOAD]
    loading.end()
    assert snapshots(loading.client, loading.job) == []
    assert loading.get() == NEW
    assert not create(loading.client, loading.job, "after")
    with refused(grpc.StatusCode.NOT_FOUND, LOAD):
        loading.end()


def test_a_session_that_ends_leaves_what_was_there_and_the_log_says_so(
    daemon: Daemon, loading: Loading
) -> None:
    loading.begin()
    loading.detach()
    with refused(grpc.StatusCode.ABORTED, ""):
        loading.end()  # NOT_FOUND would say that it counts
    after = Loading(loading.client, loading.job)
    assert after.get() == OLD
    assert snapshots(loading.client, loading.job) == []
    wanted = f"job {loading.job} went back to what it was before, snapshot {LOAD}"
    until = time.monotonic() + TIMEOUT_S
    while wanted not in daemon.log.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_job_is_dropped_right_after_its_load_broke_off(loading: Loading) -> None:
    loading.begin()
    loading.detach()
    loading.client.call(loading.client.jobs.DropJob, job_pb2.DropJobRequest(name=loading.job))
    Loading(loading.client, loading.job)  # anew


KILLED = """
import sys, time
from pathlib import Path
from tests.daemons import Attached
from tests.integration.test_daemon_loads import Loading

with Attached(Path(sys.argv[1])) as client:
    Loading(client, sys.argv[2]).begin()
    print("loads", flush=True)
    time.sleep(600)
"""


def killed_in_a_load(daemon: Daemon, job: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(daemon.attach_socket), job],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "loads\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)


def test_whoever_attaches_right_after_a_kill_finds_what_was_there(daemon: Daemon) -> None:
    killed_in_a_load(daemon, "killed")
    with Attached(daemon.attach_socket) as client:
        after = Loading(client, "killed")
        assert after.get() == OLD
        assert snapshots(client, "killed") == []
        client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="killed", force=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_daemon_and_of_its_memory_leaves_what_was_there(
    number: signal.Signals,
) -> None:
    with daemons() as made:
        daemon = made.start("--holder-seconds", "0")
        with Attached(daemon.attach_socket) as client:
            loading = Loading(client, "job")
            loading.begin()
            status = daemon.stop(number)
            assert status == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        daemon = made.start("--holder-seconds", "0")
        with Attached(daemon.attach_socket) as client:
            assert Loading(client, "job").get() == OLD
            assert snapshots(client, "job") == []
        assert daemon.stop() == 0
