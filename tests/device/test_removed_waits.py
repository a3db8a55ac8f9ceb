"""Each wait, event and `record_stream` of the device path is missed when it is taken out."""

from __future__ import annotations

import ast
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

import memd_client
from memd_client.device import (
    copies,
    departures,
    device_range,
    event_thread,
    filled_memory,
)
from memd_client.parameters import gradients, lazy
from tests.device.offloaded import LOOPS, MIXED_LOOPS, batch, build
from tests.device.removed_statements import Statement, removed, statements
from tests.device.simulation import SIM
from tests.device.trained import connected, trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

SEEDS = (2, pytest.param(10, marks=pytest.mark.more))
_CALLS = ("wait_event", "wait_stream", "record", "record_stream", "synchronize")
_DEVICE_BYTES = 48 << 10
_STREAMS = 32  # of the simulation's pool


def _orders(call: ast.Call) -> bool:
    """`event.synchronize` is also passed on as a function."""
    parts = [call.func, *call.args]
    return any(isinstance(part, ast.Attribute) and part.attr in _CALLS for part in parts)


WAITS = [
    statement
    for module in (copies, departures, device_range, event_thread, filled_memory, gradients)
    for statement in statements(module, _orders)
]


def train(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    trained(daemon, patch, "mlp", "least", LOOPS[1])


def leave(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """The session ends while kernels that use its parameters are queued, and others get the
    memory."""
    with connected(daemon, patch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
        with torch.no_grad():
            model(batch(0).to("sim", non_blocking=True))
        del model
        gc.collect()
    del session
    gc.collect()
    for _ in range(_STREAMS):
        with torch.Stream(device="sim"):
            torch.empty(_DEVICE_BYTES, dtype=torch.uint8, device="sim")


def scale(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """A GradScaler copies its numbers to pinned memory, which operations on gradients read."""

    def announced(leaves: list[Any], structure: Any) -> Any:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_pinned():
                SIM.host_touches(leaf, writes=False)
        return tree_unflatten(leaves, structure)

    with patch.context() as patched:
        patched.setattr(lazy, "tree_unflatten", announced)  # just before the operation
        trained(daemon, patch, "mlp", "least", MIXED_LOOPS[1])


def share_casts(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """A second stream uses casts of autocast that the first has made again, and the first gets
    their memory."""
    with connected(daemon, patch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim", device_bytes="1MiB")
        cast_bytes = {each.numel() * 2 for each in model.parameters()}
        there, side = batch(0).to("sim"), torch.Stream(device="sim")
        with torch.autocast("sim", torch.bfloat16):
            model(there)
            side.wait_stream(torch.accelerator.current_stream())
            with memd_client.gather(model), side:
                model(there)
            for size_bytes in cast_bytes:
                torch.full((size_bytes,), 7, dtype=torch.uint8, device="sim")
        torch.accelerator.synchronize()


def race_of(daemon: Daemon, patch: pytest.MonkeyPatch) -> str:
    for scenario in (train, leave, scale, share_casts):
        try:
            scenario(daemon, patch)
        except Exception as error:  # noqa: BLE001 # whoever misses it
            return str(error)
        finally:
            torch.accelerator.synchronize()
    return ""


def test_the_waits_are_found() -> None:
    assert len(WAITS) == 13


@pytest.mark.parametrize("seeds", SEEDS)
def test_nothing_races(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        assert race_of(daemon, monkeypatch) == ""


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_removed_wait_is_missed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, wait: Statement, seeds: int
) -> None:
    with removed(wait):
        for seed in range(seeds):
            SIM.seed(seed)
            assert "race: " in race_of(daemon, monkeypatch)
