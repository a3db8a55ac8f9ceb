"""Each wait, event and `record_stream` of the device path is missed when it is taken out."""

from __future__ import annotations

import ast
import gc
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd_client.device import copies, device_leases, event_thread
from tests.device.offloaded import LOOPS, batch, build
from tests.device.removed_statements import Statement, removed, statements
from tests.device.simulation import SIM
from tests.device.trained import connected, trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

SEEDS = (2, pytest.param(10, marks=pytest.mark.more))
_CALLS = ("wait_event", "record", "record_stream", "synchronize")
_DEVICE_BYTES = 48 << 10
_STREAMS = 32  # of the simulation's pool


def _orders(call: ast.Call) -> bool:
    """`event.synchronize` is also passed on as a function."""
    parts = [call.func, *call.args]
    return any(isinstance(part, ast.Attribute) and part.attr in _CALLS for part in parts)


WAITS = [
    statement
    for module in (copies, device_leases, event_thread)
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


def race_of(daemon: Daemon, patch: pytest.MonkeyPatch) -> str:
    for scenario in (train, leave):
        try:
            scenario(daemon, patch)
        except Exception as error:  # noqa: BLE001 # whoever misses it
            return str(error)
        finally:
            torch.accelerator.synchronize()
    return ""


def test_the_waits_are_found() -> None:
    assert len(WAITS) == 10


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
