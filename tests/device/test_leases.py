"""Copies between a device and the memory of a real daemon."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.core.leases import MODE_WRITE
from memd_client.parameters.parameter import streamed
from tests.device.announced_leases import announced_leases
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session
    from tests.daemons import Daemon

SEEDS = range(10)
SIZE = 4096
# Gradients of this size are copied below a lease, which Python sees.
WIDTH = 1100


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with memd_client.connect(daemon.address, job="device", host_bytes="32MiB") as session:
        yield session
        session.drop_job()


def upload(session: Session, name: str, *, wait: bool) -> torch.Tensor:
    """Copies a lease's bytes, ends the lease, and unregisters its memory."""
    lease, copied = session.get(name), torch.Event(device="sim")
    host = session.leases.registration.host(lease, torch.device("sim"))
    address = host.data_ptr()
    SIM.pin(address, host.nbytes)
    there = host.to("sim", non_blocking=True)
    copied.record()
    if wait:
        copied.synchronize()
    del lease, host
    torch.accelerator.synchronize()
    SIM.unpin(address)
    return there


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lease_that_ends_before_its_copy_is_a_race(
    session: Session, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    session.put("x", torch.arange(float(SIZE)))
    SIM.seed(seed)
    with announced_leases(session, monkeypatch) as races:
        there = upload(session, "x", wait=True)
        assert torch.equal(there.cpu(), torch.arange(float(SIZE)))
        assert not races
        upload(session, "x", wait=False)
        assert len(races) == 1
        assert "race: the host" in races[0]
        assert "that copy to device (stream 0 of sim:0) reads" in races[0]


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_gradient_that_is_sealed_before_its_copy_is_a_race(
    session: Session, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = memd_client.offload(nn.Linear(WIDTH, WIDTH, bias=False), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
    entry = streamed(model.weight)
    assert entry is not None
    SIM.seed(seed)
    with announced_leases(session, monkeypatch) as races:
        model(torch.ones(2, WIDTH)).sum().backward()
        slot = session.leases.gradient(entry.shard, MODE_WRITE)
        SIM.pin(slot.data_ptr(), slot.nbytes)
        copied = torch.Event(device="sim")
        slot.copy_(torch.full((WIDTH, WIDTH), 2.0, device="sim"), non_blocking=True)
        copied.record()
        with pytest.raises(RuntimeError, match=r"race: the host .* reads bytes that copy to host"):
            optimizer.step()
        copied.synchronize()
        SIM.unpin(slot.data_ptr())
        assert slot.unique().tolist() == [2.0]
        del slot
        gc.collect()
        optimizer.step()
        assert not races
