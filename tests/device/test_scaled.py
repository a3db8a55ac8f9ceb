"""A GradScaler over gradients that have left their device, with a real daemon."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import RATE, batch
from tests.device.offloaded_models import MODELS, build
from tests.device.simulation import SIM
from tests.device.test_clipping import NORM, HalvedInPart, Plain, gradients
from tests.device.test_waited_for import held_until_waited_for, leases_of
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.test_clipping import Clip

    # Runs between backward and update, with the model, its optimizer and the function that clips;
    # returns the tensors that the program sees.
    Program = Callable[[torch.amp.GradScaler, nn.Module, Any, Clip], list[Tensor]]

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))
STEPS = 5
INFINITE = 1, 3  # the steps whose gradients are infinite
SCALE = 2.0**12
_ROOMY_BYTES = 1 << 20


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def backward(model: nn.Module, scaler: torch.amp.GradScaler, number: int) -> None:
    loss = model(batch(number).to("sim", non_blocking=True))
    scaler.scale(loss * math.inf if number in INFINITE else loss).backward()


def found_in(model: nn.Module, optimizer: Any, clip: Clip, program: Program) -> list[Tensor]:
    """Tensors that the program sees, scales, and the values after some steps, on the host."""
    scaler = torch.amp.GradScaler("sim", init_scale=SCALE, growth_interval=2)
    found: list[Tensor] = []
    for number in range(STEPS):
        backward(model, scaler, number)
        found += program(scaler, model, optimizer, clip)
        scaler.update()
        optimizer.zero_grad()
        found.append(torch.tensor(scaler.get_scale()))
    return [each.cpu() for each in (*found, *model.state_dict().values())]


def assert_same(session: Session, program: Program, model: str = "mlp") -> None:
    plain = Plain(build(model).to("sim"))
    holder: Any = torch.optim.SGD(plain.model.parameters())
    holder.step = plain.step
    expected = found_in(plain.model, holder, plain.clip, program)
    module = memd_client.offload(build(model), session, device="sim", device_bytes=_ROOMY_BYTES)
    optimizer = memd_client.AdamW(module.parameters(), lr=RATE, session=session)
    found = found_in(module, optimizer, optimizer.clip_grad_norm_, program)
    assert are_equal(*([each.nan_to_num(nan=7.0) for each in seen] for seen in (found, expected)))


def stepped(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaler.step(optimizer)
    return []


def unscaled(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return []


def clipped(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaler.unscale_(optimizer)
    norms = [clip(NORM), clip(NORM / 2)]
    scaler.step(optimizer)
    return norms


def read(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaler.unscale_(optimizer)
    found = gradients(model)
    scaler.step(optimizer)
    return found


def accumulated(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    backward(model, scaler, 0)
    return clipped(scaler, model, optimizer, clip)


def skipped_by_the_program(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    """The scaler learns of infinite gradients although nobody steps."""
    scaler.unscale_(optimizer)
    norm = clip(NORM)
    if norm.isfinite():
        scaler.step(optimizer)
    return [norm]


PROGRAMS = (stepped, unscaled, clipped, read, accumulated, skipped_by_the_program)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_a_scaler_has_the_bits_of_torch_on_the_device(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, program: Program, seeds: int
) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert_same(session, program)


@pytest.mark.parametrize("program", [stepped, clipped])
def test_gradients_of_two_types(
    session: Session, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    monkeypatch.setitem(MODELS, "in part", HalvedInPart)
    assert_same(session, program, "in part")


@pytest.mark.parametrize("program", [stepped, unscaled, clipped])
def test_nothing_waits_that_does_not_wait_without_memd(session: Session, program: Program) -> None:
    """For found_inf, once a step."""
    plain = build("mlp").to("sim")
    module = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_ROOMY_BYTES)
    optimizer = memd_client.AdamW(module.parameters(), lr=RATE, session=session)
    waits = []
    for model, made, clip in (
        (plain, torch.optim.SGD(plain.parameters()), Plain(plain).clip),
        (module, optimizer, optimizer.clip_grad_norm_),
    ):
        scaler = torch.amp.GradScaler("sim", init_scale=SCALE)
        SIM.host_waits()
        before = Counter(session.statistics().waited_for)
        for _ in range(STEPS):
            with held_until_waited_for(session, leases_of(module)._departures._thread):
                backward(model, scaler, 0)
                program(scaler, model, made, clip)
                scaler.update()
            model.zero_grad()
        waited_for = Counter(session.statistics().waited_for) - before
        waits.append((SIM.host_waits(), waited_for))
    assert waits == [({"aten::_local_scalar_dense": STEPS}, {})] * 2


def test_host_gradients_beside_them(session: Session) -> None:
    """They change what is found on the host, so that waits."""
    holder = nn.ModuleDict({"there": build("mlp"), "here": nn.Linear(2, 2)})
    memd_client.offload(holder["there"], session, device="sim", device_bytes=_ROOMY_BYTES)
    optimizer = memd_client.AdamW(holder.named_parameters(), lr=RATE, session=session)
    scaler = torch.amp.GradScaler("sim", init_scale=SCALE)
    for is_there, is_here in ((False, False), (True, False), (False, True)):
        backward(holder["there"], scaler, INFINITE[0] if is_there else 0)
        (holder["here"](torch.ones(2)).sum() * (math.inf if is_here else 1)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (scaler.get_scale() < before) == (is_there or is_here)
