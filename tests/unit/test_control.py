"""The control plane: a channel that another thread closes, and requests that take several calls."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest
import torch

import memd_client
from memd_client.connection.control import Control
from memd_proto.v1 import job_pb2, session_pb2, tensor_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = "unix:///nowhere/memd.sock"


@pytest.mark.parametrize(
    "name",
    ["list_shards", "get", "begin_step", "begin_sync", "put", "begin_put_moments", "drop_job"],
)
def test_a_call_over_a_channel_that_was_renewed_meanwhile_is_one_without_a_daemon(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    control = Control(address=ADDRESS, token="old")
    opened = control._open

    def open_and_renew() -> Any:
        channel = opened()
        # As another thread may, at any moment after this one has the channel.
        control.renew(address=ADDRESS, token="new")
        return channel

    monkeypatch.setattr(control, "_open", open_and_renew)
    calls: dict[str, Callable[[], Any]] = {
        "list_shards": lambda: control.list_shards(session_pb2.ListShardsRequest()),
        "get": lambda: list(control.get(tensor_pb2.GetRequest())),
        "begin_step": lambda: control.begin_step(session_pb2.StepRequest()),
        "begin_sync": lambda: control.begin_sync(session_pb2.SyncRequest()),
        "put": lambda: control.put(iter(())),
        "begin_put_moments": lambda: control.begin_put_moments([]),
        "drop_job": lambda: control.drop_job(job_pb2.DropJobRequest()),
    }
    with pytest.raises(memd_client.DaemonUnavailable, match="closed before this call was sent"):
        calls[name]()


@pytest.mark.parametrize("name", ["list_shards", "get", "read_snapshot", "begin_sync", "put"])
def test_a_handled_error_of_a_call_keeps_nothing_of_its_callers(name: str) -> None:
    """Without the garbage collector: gRPC raises the call object, whose frames refer to it."""
    control = Control(address=ADDRESS, token="token")
    calls: dict[str, Callable[[], Any]] = {
        "list_shards": lambda: control.list_shards(session_pb2.ListShardsRequest()),
        "get": lambda: list(control.get(tensor_pb2.GetRequest())),
        "read_snapshot": lambda: list(control.read_snapshot(job_pb2.ReadSnapshotRequest())),
        "begin_sync": lambda: control.begin_sync(session_pb2.SyncRequest()).result(),
        "put": lambda: control.put(iter(())),
    }

    def caller() -> ref[torch.Tensor]:
        leased = torch.ones(1)
        with suppress(memd_client.DaemonUnavailable):
            calls[name]()
            pytest.fail("no daemon answers")
        return ref(leased)

    gc.collect()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
        control.close()


@pytest.mark.parametrize("answered", [0, 4, 5])
def test_a_session_of_another_version_than_was_agreed_on_is_not_used(
    monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    control = Control(address=ADDRESS, token="token")
    answer = session_pb2.AttachResponse(session_id=7, protocol_version=answered)
    monkeypatch.setattr(control, "_call", lambda *_: answer)
    request = session_pb2.AttachRequest(protocol_version=4)
    try:
        if answered != 5:  # an older daemon does not say it
            assert control.attach(request).session_id == 7
            return
        with pytest.raises(memd_client.InvalidArgument, match="version 5, and this client in 4"):
            control.attach(request)
    finally:
        control.close()


def test_shards_are_declared_in_as_many_calls_as_it_takes_and_listed_page_by_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = Control(address=ADDRESS, token="token")
    calls: list[tuple[int, int, bool]] = []
    declarations: set[int] = set()

    def answer(method: object, request: Any, timeout_s: float) -> Any:
        del method, timeout_s
        if isinstance(request, session_pb2.DeclareRequest):
            calls.append((len(request.shards), request.shards_before, request.more_follows))
            declarations.add(request.declaration)
            if request.more_follows:
                return session_pb2.DeclareResponse()
            shards = [types_pb2.Shard(spec=spec) for spec in request.shards]
            # The daemon says it of all that is declared by then.
            fit = request.shards_before + len(shards) <= 4096
            return session_pb2.DeclareResponse(shards=shards, gradients_fit=fit)
        first = request.page_first
        page = session_pb2.ListShardsResponse(shards=[types_pb2.Shard(shard_id=first)])
        page.page_next = first + 5 if first < 10 else 0
        return page

    monkeypatch.setattr(control, "_call", answer)
    names = [f"shard {i}" for i in range(5000)]
    specs = [types_pb2.ShardSpec(name=name) for name in names]
    declared = control.declare(session_pb2.DeclareRequest(shards=specs))
    # All of it is declared with the third call; the others tell what the first two declared.
    assert calls == [
        (2048, 0, True),
        (2048, 2048, True),
        (904, 4096, False),
        (2048, 0, False),
        (2048, 0, False),
    ]
    assert len(declarations) == 2
    assert [shard.spec.name for shard in declared.shards] == names
    assert not declared.gradients_fit
    calls.clear()
    assert control.declare(session_pb2.DeclareRequest(shards=specs[:1])).gradients_fit
    listed = control.list_shards(session_pb2.ListShardsRequest())
    assert [shard.shard_id for shard in listed.shards] == [0, 5, 10]
    control.close()


def test_nothing_is_declared_where_a_call_of_a_declaration_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = Control(address=ADDRESS, token="token")
    declared: list[str] = []
    gathered: list[str] = []

    def answer(method: object, request: Any, timeout_s: float) -> Any:
        del method, timeout_s
        names = [spec.name for spec in request.shards]
        gathered.extend(names)
        if "bad" in names:
            raise memd_client.InvalidArgument("a bad one")
        if not request.more_follows:
            declared.extend(names)
        return session_pb2.DeclareResponse()

    monkeypatch.setattr(control, "_call", answer)
    specs = [types_pb2.ShardSpec(name=f"shard {i}") for i in range(4999)]
    specs.append(types_pb2.ShardSpec(name="bad"))
    with pytest.raises(memd_client.InvalidArgument):
        control.declare(session_pb2.DeclareRequest(shards=specs))
    assert len(gathered) == 5000
    assert declared == []
    control.close()
