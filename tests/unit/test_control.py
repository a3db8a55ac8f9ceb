"""The control plane's channel: what a call meets where another thread closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import memd_client
from memd_client.control import Control
from memd_proto.v1 import job_pb2, session_pb2, tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = "unix:///nowhere/memd.sock"


@pytest.mark.parametrize("name", ["list_shards", "get", "begin_step", "put", "drop_job"])
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
        "put": lambda: control.put(iter(())),
        "drop_job": lambda: control.drop_job(job_pb2.DropJobRequest()),
    }
    with pytest.raises(memd_client.DaemonUnavailable, match="closed before this call was sent"):
        calls[name]()
