"""A program that uses more parameters at once than its largest module has."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client.device.copies import DeviceCopies
from memd_client.errors import CapacityError
from tests.device.models import are_equal
from tests.device.offloaded import batch
from tests.device.offloaded_models import MODELS, build
from tests.device.simulation import SIM
from tests.device.test_budget import ALL_BYTES, LEAST_BYTES, Deep, copies
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from memd_client import Session
    from memd_client.device.device_range import DeviceRange
    from tests.daemons import Daemon


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "deep", Deep)


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def offloaded(session: Session, **settings: Any) -> nn.Module:
    return memd_client.offload(build("deep"), session, device="sim", **settings)


def penalty_gradients(model: nn.Module, device: str) -> list[Tensor]:
    """Those of a loss with a gradient in it, whose backward uses every layer twice."""
    inputs = batch(0).to(device).requires_grad_()
    loss = model(inputs)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().sum()).backward()
    found = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
    assert len(found) == sum(1 for _ in model.parameters())
    model.zero_grad()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_nobody_has_chosen_grows_while_leases_are_held(session: Session, seed: int) -> None:
    expected = penalty_gradients(build("deep").to("sim"), "sim")
    SIM.seed(seed)
    model = offloaded(session)
    assert copies(session).size_bytes == LEAST_BYTES
    for _ in range(2):
        assert are_equal(penalty_gradients(model, "sim"), expected)
        assert LEAST_BYTES < copies(session).size_bytes < 2 * ALL_BYTES
    gc.collect()
    assert copies(session).held_bytes == copies(session).size_bytes  # no older range stays


def test_a_size_that_the_program_has_chosen_is_refused_in_a_sentence(session: Session) -> None:
    model = offloaded(session, device_bytes=LEAST_BYTES)
    with pytest.raises(CapacityError, match=r"used at once .* offload with device_bytes=\d+ or"):
        penalty_gradients(model, "sim")
    assert copies(session).size_bytes == LEAST_BYTES


def test_a_device_without_room_is_refused_in_the_same_sentence(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is lost: with room the same batch runs."""
    expected = penalty_gradients(build("deep").to("sim"), "sim")
    model, plain = offloaded(session), DeviceCopies._range_of

    def range_of(found: DeviceCopies, size_bytes: int) -> DeviceRange:
        if size_bytes > LEAST_BYTES:
            raise torch.OutOfMemoryError("no memory")
        return plain(found, size_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(DeviceCopies, "_range_of", range_of)
        with pytest.raises(CapacityError, match="used at once"):
            penalty_gradients(model, "sim")
    model.zero_grad()
    gc.collect()
    assert copies(session).size_bytes == LEAST_BYTES
    assert are_equal(penalty_gradients(model, "sim"), expected)
