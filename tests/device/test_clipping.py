"""Gradients that are clipped after they have left their device, with a real daemon."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import memd_client
from memd_client import CapacityError, MemdError
from memd_client.core.leases import Leases
from memd_client.device import departed_gradients
from memd_client.device.departures import Departures
from tests.device.models import are_equal
from tests.device.offloaded import RATE, batch, published
from tests.device.offloaded_models import MODELS, Mlp, build
from tests.device.simulation import SIM
from tests.device.test_waited_for import held_until_waited_for, leases_of
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memd_client import Session
    from memd_client.connection.shard import Shard
    from tests.daemons import Daemon

    Clip = Callable[..., Tensor]
    # Runs between backward and step, with the function that clips; returns the tensors it sees.
    Program = Callable[[nn.Module, Clip], list[Tensor]]

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))
STEPS = 3
_ROOMY_BYTES = 1 << 20
NORM = 0.001  # below that of the gradients of these models


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


class Plain:
    """A model on the device, without memd: torch clips there, and updates copies on the host."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._trained = [each for each in self.model.parameters() if each.requires_grad]
        self._exact = [each.detach().cpu().float().requires_grad_() for each in self._trained]
        self._optimizer = torch.optim.AdamW(self._exact, lr=RATE, fused=True)

    def clip(self, *args: Any, **kwargs: Any) -> Tensor:
        norm: Tensor = nn.utils.clip_grad_norm_(self._trained, *args, **kwargs)
        return norm

    def step(self) -> None:
        for one, other in zip(self._trained, self._exact, strict=True):
            other.grad = one.grad.cpu().float() if one.grad is not None else None
            one.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for one, other in zip(self._trained, self._exact, strict=True):
                one.copy_(published(other.detach(), one.dtype))


def offloaded(model: str, session: Session, **settings: Any) -> nn.Module:
    return memd_client.offload(build(model), session, device="sim", **settings)


def optimizer_of(model: nn.Module, session: Session) -> memd_client.AdamW:
    trained = [each for each in model.parameters() if each.requires_grad]
    return memd_client.AdamW(trained, lr=RATE, session=session)


def with_memd(session: Session) -> tuple[nn.Module, Clip, Callable[[], object]]:
    model = offloaded("mlp", session, device_bytes=_ROOMY_BYTES)
    optimizer = optimizer_of(model, session)
    return model, optimizer.clip_grad_norm_, optimizer.step


def backward(model: nn.Module, number: int) -> None:
    model(batch(number).to("sim", non_blocking=True)).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def found_in(
    model: nn.Module, program: Program, clip: Clip, step: Callable[[], object]
) -> list[Tensor]:
    """Tensors that the program sees, and the values after some steps, on the host."""
    found: list[Tensor] = []
    for number in range(STEPS):
        backward(model, number)
        found += program(model, clip)
        step()
    return [each.cpu() for each in (*found, *model.state_dict().values())]


def assert_same(
    session: Session,
    program: Program,
    model: str = "mlp",
    step: Callable[[memd_client.AdamW], object] = memd_client.AdamW.step,
) -> None:
    plain = Plain(build(model).to("sim"))
    expected = found_in(plain.model, program, plain.clip, plain.step)
    module = offloaded(model, session)
    optimizer = optimizer_of(module, session)
    found = found_in(module, program, optimizer.clip_grad_norm_, partial(step, optimizer))
    assert are_equal(found, expected)


def once(model: nn.Module, clip: Clip) -> list[Tensor]:
    return [clip(NORM)]


def twice(model: nn.Module, clip: Clip) -> list[Tensor]:
    return [clip(NORM), clip(NORM / 2), clip(NORM / 3, math.inf)]


def not_at_all(model: nn.Module, clip: Clip) -> list[Tensor]:
    """The norm is below the bound."""
    return [clip(1e6)]


def read_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    return [clip(NORM), *gradients(model), clip(NORM)]


@torch.no_grad()
def changed_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3)
    return [first, clip(NORM)]


@torch.no_grad()
def changed_before(model: nn.Module, clip: Clip) -> list[Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3)
    return [clip(NORM)]


def added_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    backward(model, 7)
    return [first, clip(NORM)]


def added_before(model: nn.Module, clip: Clip) -> list[Tensor]:
    backward(model, 7)
    return [clip(NORM)]


def dropped_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    model.zero_grad()
    backward(model, 7)
    return [first, clip(NORM * 2)]


def dropped_after_and_not_clipped(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    model.zero_grad()
    backward(model, 7)
    return [first]


def set_to_zero_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    model.zero_grad(set_to_none=False)
    return [first, clip(NORM)]


def replaced_after(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.full(parameter.shape, 3.0, device=parameter.device)
    return [first, clip(NORM)]


def replaced_and_held(model: nn.Module, clip: Clip) -> list[Tensor]:
    held = []
    for parameter in model.parameters():
        held.append(torch.full(parameter.shape, 3.0, device=parameter.device))
        parameter.grad = held[-1]
    return [clip(NORM), *held]


def dropped_in_part(model: nn.Module, clip: Clip) -> list[Tensor]:
    first = clip(NORM)
    next(model.parameters()).grad = None
    return [first, clip(NORM / 2)]


PROGRAMS = (
    *(once, twice, not_at_all, read_after, changed_after, changed_before, added_after),
    *(added_before, dropped_after, dropped_after_and_not_clipped, set_to_zero_after),
    *(replaced_after, replaced_and_held, dropped_in_part),
)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_clips_has_the_bits_of_torch_on_the_device(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, program: Program, seeds: int
) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert_same(session, program)


@pytest.mark.parametrize("norm_type", [2, 1.0, 3.5, 0.0, math.inf, -math.inf])
def test_each_type_of_norm(session: Session, norm_type: float) -> None:
    assert_same(session, lambda model, clip: [clip(NORM, norm_type), clip(NORM / 2, norm_type)])


class HalvedInPart(nn.Module):
    """Gradients of two types, of which torch's factor has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 64), nn.Linear(64, 8).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).to(torch.bfloat16)
        loss: Tensor = self.second(x).float().square().mean()
        return loss


@pytest.mark.parametrize("model", ["experts", "lora", "bf16", "in part"])
def test_other_models(session: Session, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Some parameters have no gradient, are frozen, or are of another type."""
    monkeypatch.setitem(MODELS, "in part", HalvedInPart)
    assert_same(session, twice, model)


def test_a_step_that_commit_closes(session: Session) -> None:
    session.track(rng=True)

    def step(optimizer: memd_client.AdamW) -> None:
        optimizer.step()
        optimizer.zero_grad()
        session.commit()

    assert_same(session, twice, step=step)


class Parts(nn.Module):
    """On several devices. Returns the last one's loss, when the others have had their backward."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.devices = devices
        self.parts = nn.ModuleList(Mlp() for _ in devices)

    def forward(self, x: Tensor) -> Tensor:
        losses = [part(x.to(to)) for to, part in zip(self.devices, self.parts, strict=True)]
        last: Tensor = losses.pop()
        for loss in losses:
            loss.backward()
        return last


@pytest.mark.parametrize(
    "devices", [("sim:0", "cpu"), ("cpu", "sim:0"), ("sim:0", "sim:1")], ids=" and ".join
)
def test_several_devices(session: Session, devices: tuple[str, str]) -> None:
    """Also one part that is not offloaded."""
    there, module = Parts(devices), Parts(devices)
    for name, device in enumerate(devices):
        there.parts[name].to(device)
        if device != "cpu":
            holder = nn.ModuleDict({str(name): module.parts[name]})
            memd_client.offload(holder, session, device=device, device_bytes=_ROOMY_BYTES)
    plain = Plain(there)
    expected = found_in(there, twice, plain.clip, plain.step)
    optimizer = memd_client.AdamW(module.named_parameters(), lr=RATE, session=session)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    assert are_equal(found_in(module, twice, optimizer.clip_grad_norm_, step), expected)


def test_a_norm_that_is_not_finite(session: Session) -> None:
    model = offloaded("mlp", session)
    optimizer = optimizer_of(model, session)
    (model(batch(0).to("sim")) * math.inf).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(NORM, error_if_nonfinite=True)
    assert not optimizer.clip_grad_norm_(NORM).isfinite().cpu()


def test_nothing_waits_that_does_not_wait_without_memd(session: Session) -> None:
    """The first gradients come back to the device for their norms, and later ones do not."""
    plain = Plain(build("mlp").to("sim"))
    made = with_memd(session)
    thread = leases_of(made[0])._departures._thread
    waits = []
    for model, clip, step in ((plain.model, plain.clip, plain.model.zero_grad), made):
        SIM.host_waits()
        before = session.statistics().waited_for
        for number in range(STEPS):
            with held_until_waited_for(session, thread):
                backward(model, number)
                clip(NORM)
                clip(NORM / 2)
                step()
        waits.append((SIM.host_waits(), Counter(session.statistics().waited_for) - Counter(before)))
    assert waits == [({}, {}), ({}, {})]


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often gradients came back for one, and how many were computed."""
    counts = Counter[str]()
    plain_back, plain_norm = Departures.bring_back, departed_gradients.norm_of

    def bring_back(*args: Any) -> Tensor:
        counts["back"] += 1
        return plain_back(*args)

    def norm_of(*args: Any) -> Tensor:
        counts["norms"] += 1
        return plain_norm(*args)

    monkeypatch.setattr(Departures, "bring_back", bring_back)
    monkeypatch.setattr(departed_gradients, "norm_of", norm_of)
    return counts


def test_norms_are_computed_where_the_last_step_clipped(
    session: Session, norms: Counter[str]
) -> None:
    model, clip, step = with_memd(session)
    count = sum(1 for _ in model.parameters())
    found = []
    for number, clips in enumerate((False, True, True, False, False, True)):
        norms.clear()
        backward(model, number)
        if clips:
            clip(NORM)
        step()
        found.append((norms["back"], norms["norms"]))
    once, both = (0, count), (count, count)
    assert found == [(0, 0), both, once, once, (0, 0), both]


def test_a_sum_expects_no_norm(session: Session, norms: Counter[str]) -> None:
    """The one that leaves is a part of it."""
    model, clip, step = with_memd(session)
    count = sum(1 for _ in model.parameters())
    for number in range(STEPS):
        norms.clear()
        backward(model, number)
        backward(model, number)
        clip(NORM)
        step()
    assert norms == {"back": count, "norms": count}


def test_a_gradient_that_was_dropped_is_not_multiplied(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clip, step = with_memd(session)
    backward(model, 0)
    clip(NORM)
    names = [name for name, _ in model.named_parameters()]
    next(model.parameters()).grad = None
    multiplied = []
    leased = Leases.gradient_before_step

    def noting(leases: Leases, shard: Shard) -> Tensor:
        multiplied.append(shard.label)
        return leased(leases, shard)

    monkeypatch.setattr(Leases, "gradient_before_step", noting)
    step()
    session.commit(wait=True)
    assert sorted(multiplied) == sorted(names[1:])


def test_a_step_that_is_repeated_has_multiplied_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain(build("mlp").to("sim"))
    expected = found_in(plain.model, once, plain.clip, plain.step)
    model = offloaded("mlp", session)
    optimizer = optimizer_of(model, session)

    def refuse(request: object) -> None:
        del request
        raise MemdError("refused")

    def step() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(session.transaction.job.control, "begin_step", refuse)
            optimizer.step()
            with pytest.raises(MemdError, match="refused"):
                _ = session.committed_step
        optimizer.step()

    assert are_equal(found_in(model, once, optimizer.clip_grad_norm_, step), expected)


def test_a_gradient_that_cannot_be_multiplied_ends_the_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain(build("mlp").to("sim"))
    expected = found_in(plain.model, once, plain.clip, plain.step)
    model = offloaded("mlp", session)
    optimizer = optimizer_of(model, session)

    def refuse(shard: object) -> None:
        del shard
        raise CapacityError("no room")

    backward(model, 0)
    optimizer.clip_grad_norm_(NORM)
    with monkeypatch.context() as patched:
        patched.setattr(session.leases, "gradient_before_step", refuse)
        optimizer.step()
        with pytest.raises(CapacityError, match=r"could not be scaled.*zero_grad.*no room"):
            _ = session.committed_step
    optimizer.step()
    with pytest.raises(CapacityError, match="could not be scaled"):
        _ = session.committed_step
    optimizer.zero_grad()
    found = found_in(model, once, optimizer.clip_grad_norm_, optimizer.step)
    assert are_equal(found, expected)
