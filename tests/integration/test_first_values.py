"""Values that are stored for the first time: those of a killed trainer do not count, whoever else
is attached and whatever fails."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.core import blobs
from memd_client.core.leases import Leases
from tests.daemons import TIMEOUT_S, Attached, Daemon, running_daemon
from tests.forks import shared_forks
from tests.unit.client_cases import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.connection.shard import Shard
    from memd_proto.v1 import session_pb2

# Argument 2 is the job. It is killed before it has written the value number argument 3.
_KILLED = """
import os, signal, sys
import torch
import memd_client
from memd_client.core.leases import Leases

write, count = Leases.write, 0

def killed_write(self, shard, value):
    global count
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    write(self, shard, value)

session = memd_client.connect(sys.argv[1], job=sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
Leases.write = killed_write
"""
_OFFLOADED = "memd_client.offload(model, session)"
_OPTIMIZED = "memd_client.AdamW(model.named_parameters(), session=session)"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="64MiB", nvme="256MiB") as daemon:
        yield daemon


@contextmanager
def dropped(session: memd_client.Session) -> Iterator[memd_client.Session]:
    try:
        yield session
    finally:
        session.drop_job()


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.requires_grad_(False)  # no step counts them
    model.get_buffer("1.running_mean").fill_(seed)
    return model


def kill_within(daemon: Daemon, job: str, count: int, program: str = _OFFLOADED) -> None:
    """Returns when the daemon has ended its session too."""
    with Attached(daemon.attach_socket) as client:
        before = client.session_count(job)
        trainers = shared_forks("memd_client")
        status, said = trainers.run(_KILLED + program, daemon.address, job, str(count))
        assert status == -signal.SIGKILL, said
        ended = time.monotonic()
        while client.session_count(job) > before:
            assert time.monotonic() < ended + TIMEOUT_S


def list_names(session: memd_client.Session) -> list[str]:
    listed = session.transaction.job.shards.list_all()
    return [shard.spec.name for shard in listed if shard.spec.name.startswith("@offload/")]


@pytest.mark.parametrize("count", [2, 6], ids=["of the parameters", "of the buffers"])
def test_what_a_killed_trainer_has_left_waits_until_nobody_else_is_attached(
    daemon: Daemon, count: int
) -> None:
    with memd_client.connect(daemon.address, job="evaluated") as evaluator:
        kill_within(daemon, "evaluated", count)
        session = memd_client.connect(daemon.address, job="evaluated")
        for _ in range(2):
            with pytest.raises(memd_client.InvalidArgument, match="close the job's other sessions"):
                memd_client.offload(make(2), session)
        evaluator.close()
    model = memd_client.offload(make(2), session)
    assert_same_state(model, make(2))
    assert list_names(session) == []
    session.close()
    with dropped(memd_client.connect(daemon.address, job="evaluated")) as session:
        assert_same_state(memd_client.offload(make(3), session), make(2))


@pytest.mark.parametrize("count", [2, 6], ids=["half", "all but one"])
def test_what_a_killed_trainer_leaves_later_is_found_by_the_next_offload(
    daemon: Daemon, count: int
) -> None:
    with dropped(memd_client.connect(daemon.address, job="later")) as session:
        with pytest.raises(memd_client.UnknownName):
            session.get("nothing")
        first = memd_client.offload(nn.ModuleDict({"first": make(4)}), session, strict=False)
        kill_within(daemon, "later", count, "memd_client.offload(model, session, strict=False)")
        model = memd_client.offload(make(2), session, strict=False)
        assert_same_state(model, make(2))
        assert_same_state(first, nn.ModuleDict({"first": make(4)}))
        assert list_names(session) == []


def test_two_sessions_do_not_store_the_same_values_at_a_time(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = Leases.write, []

    def look(leases: Leases, shard: Shard, value: torch.Tensor) -> None:
        monkeypatch.undo()
        with (
            memd_client.connect(daemon.address, job="two") as other,
            pytest.raises(memd_client.InvalidArgument, match="one may be storing them"),
        ):
            memd_client.offload(make(3), other)
        refused.append(shard)
        write(leases, shard, value)

    with dropped(memd_client.connect(daemon.address, job="two")) as session:
        monkeypatch.setattr(Leases, "write", look)
        model = memd_client.offload(make(2), session)
        assert refused
        assert_same_state(model, make(2))
        with memd_client.connect(daemon.address, job="two") as other:
            assert_same_state(memd_client.offload(make(3), other), make(2))


@pytest.mark.parametrize("other", ["has stored them", "has begun to store them", "is killed"])
def test_of_two_sessions_that_begin_together_one_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    begun: list[str] = []
    with dropped(memd_client.connect(daemon.address, job="together")) as session:
        first = session.transaction.job.held_names.first_values
        declare = first._declare_list

        def begin_other(data: torch.Tensor) -> Shard:
            monkeypatch.undo()
            begun.append(other)
            if other == "is killed":
                kill_within(daemon, "together", 0)
            else:
                with memd_client.connect(daemon.address, job="together") as second:
                    if other == "has stored them":
                        memd_client.offload(make(3), second)
                    else:
                        # As long as the second one has not ended.
                        second.transaction.job.held_names.first_values._declare_list(data)
            return declare(data)

        monkeypatch.setattr(first, "_declare_list", begin_other)
        with pytest.raises(memd_client.InvalidArgument, match="at this moment; call again"):
            memd_client.offload(make(2), session)
        assert begun
        model = memd_client.offload(make(2), session)
        assert_same_state(model, make(3 if other == "has stored them" else 2))
        assert list_names(session) == []


@pytest.mark.parametrize("failing", [1, 2], ids=["of a killed trainer", "of its own"])
def test_a_list_that_could_not_be_deleted_is_deleted_by_the_next_offload(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    kill_within(daemon, "deleted", 2)
    session = memd_client.connect(daemon.address, job="deleted")
    control = session.transaction.job.control
    delete, calls = control.delete, []

    def fail(request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse:
        calls.append(request)
        if len(calls) == failing:
            raise memd_client.DaemonUnavailable("it went away")
        return delete(request)

    monkeypatch.setattr(control, "delete", fail)
    model = make(2)
    with pytest.raises(memd_client.DaemonUnavailable):
        memd_client.offload(model, session)
    with memd_client.connect(daemon.address, job="deleted"):
        memd_client.offload(model, session)
    assert_same_state(model, make(2))
    assert list_names(session) == []
    session.close()
    with dropped(memd_client.connect(daemon.address, job="deleted")) as session:
        assert_same_state(memd_client.offload(make(3), session), make(2))


@pytest.mark.parametrize(
    ("program", "count"), [(_OPTIMIZED, 1), (_OPTIMIZED, 3), (_OFFLOADED, 2), (_OFFLOADED, 4)]
)
def test_parameters_that_stay_in_the_process_are_stored_all_or_none(
    daemon: Daemon, program: str, count: int
) -> None:
    def optimized(model: nn.Module, session: memd_client.Session) -> dict[str, torch.Tensor]:
        memd_client.AdamW(model.named_parameters(), session=session)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    kill_within(daemon, "stay", count, program)
    session = memd_client.connect(daemon.address, job="stay")
    stored = optimized(make(2), session)
    torch.testing.assert_close(stored, dict(make(2).named_parameters()), rtol=0, atol=0)
    session.close()
    with dropped(memd_client.connect(daemon.address, job="stay")) as session:
        found = optimized(make(3), session)
        torch.testing.assert_close(found, stored, rtol=0, atol=0)


def test_a_model_that_stays_is_not_refused_for_one_that_was_stored_half(daemon: Daemon) -> None:
    kill_within(daemon, "other", 1, _OPTIMIZED)
    with dropped(memd_client.connect(daemon.address, job="other")) as session:
        other = nn.ModuleDict({"other": make(2)})
        memd_client.AdamW(other.named_parameters(), session=session)
        session.commit()


def test_names_of_lists_are_memd_s_own(daemon: Daemon) -> None:
    with dropped(memd_client.connect(daemon.address, job="names")) as session:
        for prefix in ("@offload/", "@scratch/"):
            with pytest.raises(memd_client.InvalidArgument, match=f"{prefix} .*are memd's own"):
                session.put(f"{prefix}config", torch.ones(1))
        session.put("memd.offload.config", torch.ones(2))
        memd_client.offload(make(2), session)
        assert torch.equal(session.get("memd.offload.config"), torch.ones(2))


def test_a_parameter_may_be_named_as_a_list(daemon: Daemon) -> None:
    for _ in range(2):
        with memd_client.connect(daemon.address, job="parameter") as session:
            parameter = nn.Parameter(torch.ones(3))
            memd_client.AdamW([("@offload/1.0", parameter)], session=session)
    with dropped(memd_client.connect(daemon.address, job="parameter")) as session:
        assert torch.equal(session.get("@offload/1.0"), torch.ones(3))


UNREADABLE = {
    "another dtype": torch.ones(3),
    "a scalar": torch.tensor(49, dtype=torch.uint8),
    "no text": torch.full((4,), 255, dtype=torch.uint8),
    "too deep": torch.full((100_000,), ord("["), dtype=torch.uint8),
    "no list": torch.tensor(list(b'{"a": 1}'), dtype=torch.uint8),
    "no names": torch.tensor(list(b"[[]]"), dtype=torch.uint8),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_a_list_that_cannot_be_read_is_named(
    daemon: Daemon, data: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memd_client.connect(daemon.address, job="unreadable") as session:
        monkeypatch.setattr(blobs, "_OWN_PREFIXES", ("another",))
        session.put("@offload/9.9", data)
    with dropped(memd_client.connect(daemon.address, job="unreadable")) as session:
        with pytest.raises(memd_client.MemdError, match=r"'@offload/9\.9' should list"):
            memd_client.offload(make(2), session)
        assert list_names(session) == ["@offload/9.9"]
        session.delete("@offload/9.9")
        assert_same_state(memd_client.offload(make(2), session), make(2))
