"""Host registration with the driver of a real device: `pytest -m gpu`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.core.registration import HostRegistration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session
    from tests.daemons import Daemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

COUNT = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with memd_client.connect(daemon.address, job="gpu", host_bytes="32MiB") as session:
        yield session
        session.drop_job()


def works(device: torch.device) -> bool:
    """No error of an earlier call shows at a kernel."""
    three = torch.ones(3, device=device) + 1
    torch.cuda.synchronize()
    return three.sum().item() == 6.0


def test_copies_each_way_have_their_bits_from_memory_that_the_driver_has_pinned(
    session: Session, device: torch.device
) -> None:
    model = memd_client.offload(nn.Linear(700, 700, bias=False), session)
    registration = session.leases.registration
    shard = session.find_shard("weight")
    lease = session.leases.value(shard)
    host = registration.host(lease, device)
    assert host.is_pinned()
    assert not lease.is_pinned(), "its mapping is private"
    there = torch.empty(host.shape, device=device)
    stream = torch.Stream(device=device)
    with stream:
        registration.copy(there, host)
    stream.synchronize()
    assert torch.equal(there.cpu(), model.weight)
    slot = registration.host(session.leases.gradient(shard, MODE_OVERWRITE), device)
    with stream:
        registration.copy(slot, there * 2)
    stream.synchronize()
    assert torch.equal(slot, model.weight * 2)


def test_after_the_end_nothing_is_pinned(session: Session, device: torch.device) -> None:
    session.put("x", torch.ones(COUNT))
    registration = HostRegistration(session.leases.plane)
    host = registration.host(session.get("x"), device)
    assert host.is_pinned()
    registration.close()
    assert not host.is_pinned()
    registration = HostRegistration(session.leases.plane)
    assert registration.host(session.get("x"), device).is_pinned()
    del registration
    gc.collect()
    assert not host.is_pinned()


def test_a_copy_over_two_registrations_has_all_its_bytes(
    session: Session, device: torch.device
) -> None:
    segment = session.leases.plane.segment_bytes
    value = torch.arange(segment // 4 * 5 // 4, dtype=torch.int32)
    session.put("long", value)
    registration = HostRegistration(session.leases.plane, piece_bytes_max=segment)
    host = registration.host(session.get("long"), device)
    assert registration.registered_bytes > segment
    there = torch.empty(host.shape, dtype=host.dtype, device=device)
    registration.copy(there, host)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), value)
    there.add_(1)
    slot = torch.zeros_like(value).pin_memory()
    registration.copy(slot, there)
    torch.cuda.synchronize()
    assert torch.equal(slot, value + 1)
    registration.close()


def test_a_refusal_leaves_no_error_behind_and_copies_are_right(
    session: Session, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    value = torch.arange(float(COUNT))
    session.put("x", value)
    first, second = (HostRegistration(session.leases.plane) for _ in range(2))
    first.host(session.get("x"), device)
    host = second.host(session.get("x"), device)  # the driver registers nothing twice
    assert second.refused_count == 1
    assert works(device)
    assert "refuses to register" in caplog.text
    first.close()
    assert not host.is_pinned()
    there = torch.empty(host.shape, device=device)
    second.copy(there, host)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), value)
    second.close()
    assert works(device)
