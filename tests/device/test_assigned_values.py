"""Values and gradients that a program writes between steps, with a real daemon."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import RATE, batch
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from memd_client import Session
    from tests.daemons import Daemon

    # Does something to a model before or after backward; returns what the program sees then.
    Change = Callable[[nn.Module], list[Tensor]]

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))
STEPS = 3
# Room for all of a gathered model.
_DEVICE_BYTES = 1 << 20


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def there(shape: torch.Size, number: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return values.to("sim", non_blocking=True)


def writing(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which a program may write parameters; without memd it may anywhere."""
    is_in_memd = type(next(model.parameters())) is not nn.Parameter
    return memd_client.gather(model, write=True) if is_in_memd else nullcontext()


def write_in_place(model: nn.Module) -> list[Tensor]:
    with writing(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
            parameter[0].fill_(0.25)
    return []


def write_data(model: nn.Module) -> list[Tensor]:
    """One is changed through `.data`, and one gets other memory: what shows it stays as it is."""
    first, *rest = model.parameters()
    second = min(rest, key=Tensor.numel)
    with writing(model):
        first.data.add_(0.5)
        before = second.detach()
        second.data = there(second.shape, 1)
        return [first.detach().sum(), second.detach().sum(), before]


def keep_a_view(model: nn.Module) -> list[Tensor]:
    """A view outlives the context in which its parameter is written."""
    parameter = next(model.parameters())
    with writing(model), torch.no_grad():
        view = parameter.detach()
        parameter.mul_(0.5)
    with torch.no_grad():
        parameter.add_(0.25)
    return [view.sum()]


def assign_data(model: nn.Module) -> list[Tensor]:
    first, second, *_ = model.parameters()
    first.data = first.data * 0.5
    given = there(second.shape, 2)
    second.data = given
    with torch.no_grad():
        second.mul_(2)
    return [given.clone()]


def assign_gradients(model: nn.Module) -> list[Tensor]:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = there(parameter.shape, number)
    return []


def change_assigned_gradients(model: nn.Module) -> list[Tensor]:
    """Backward adds to those from before it."""
    gradients = []
    for number, parameter in enumerate(model.parameters()):
        given = there(parameter.shape, number)
        parameter.grad = given
        given.add_(1)
        given.mul_(0.5)
        gradients.append(given)
    return gradients


def add_to_an_assigned_gradient(model: nn.Module) -> list[Tensor]:
    """Backward adds to it, and the program sees that."""
    parameter = next(model.parameters())
    given = there(parameter.shape, 3)
    parameter.grad = given
    model(batch(9).to("sim")).backward()
    return [given.clone()]


def halve_gradients(model: nn.Module) -> list[Tensor]:
    """memd's are in host memory, and so are these."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    return []


CHANGES = (
    write_in_place,
    write_data,
    keep_a_view,
    assign_data,
    assign_gradients,
    change_assigned_gradients,
    add_to_an_assigned_gradient,
    halve_gradients,
)


def train(model: nn.Module, session: Session, change: Change) -> list[Tensor]:
    optimizer = memd_client.AdamW(model.parameters(), lr=RATE, session=session)
    found: list[Tensor] = []
    for step in range(STEPS):
        found += change(model)
        loss = model(batch(step).to("sim", non_blocking=True))
        loss.backward()
        found += [loss.detach(), *change(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [each.cpu() for each in (*found, *model.state_dict().values())]


def reference(model: str, change: Change) -> list[Tensor]:
    on_device, host = build(model).to("sim"), build(model)
    optimizer = torch.optim.AdamW(host.parameters(), lr=RATE, fused=True)
    found: list[Tensor] = []
    for step in range(STEPS):
        found += change(on_device)
        loss = on_device(batch(step).to("sim"))
        loss.backward()
        found += [loss.detach(), *change(on_device)]
        with torch.no_grad():
            for one, other in zip(on_device.parameters(), host.parameters(), strict=True):
                other.copy_(one)
                other.grad = one.grad.cpu() if one.grad is not None else None
                one.grad = None
            optimizer.step()
            for one, other in zip(on_device.parameters(), host.parameters(), strict=True):
                one.copy_(other)
    return [each.cpu() for each in (*found, *on_device.state_dict().values())]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("change", CHANGES)
def test_programs_that_write_have_the_bits_of_plain_pytorch(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    model: str,
    seeds: int,
) -> None:
    expected = reference(model, change)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            module = build(model)
            memd_client.offload(module, session, device="sim", device_bytes=_DEVICE_BYTES)
            assert are_equal(train(module, session, change), expected)


def test_a_write_of_one_module_needs_room_for_that_alone(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim")
    expected = [each.detach().cpu() * 2 for each in model.parameters()]
    for module in model.modules():
        with memd_client.gather(module.parameters(recurse=False), write=True), torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.mul_(2)
    assert are_equal([each.detach().cpu() for each in model.parameters()], expected)


def test_an_exception_leaves_what_was_written_before(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
    parameter = next(model.parameters())
    before = parameter.detach().cpu()

    def write() -> None:
        with memd_client.gather(parameter, write=True), torch.no_grad():
            parameter.mul_(2)
            parameter.data = torch.ones(3, device="sim")

    with pytest.raises(memd_client.NotResident, match="cannot become"):
        write()
    assert torch.equal(parameter.detach().cpu(), before * 2)


@pytest.mark.parametrize("writes", [False, True])
def test_a_refused_change_leaves_no_bytes_on_the_device(session: Session, writes: bool) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
    parameter = next(model.parameters())
    before = parameter.detach().cpu()

    def change() -> None:
        with memd_client.gather(parameter, write=writes), torch.no_grad():
            parameter.mul_(2)
            # torch's stub does not have this form of set_.
            parameter.set_(torch.ones(3, device="sim"))  # type: ignore[call-overload]

    with pytest.raises(memd_client.NotResident, match="cannot become"):
        change()
    assert torch.equal(parameter.detach().cpu(), before)


def test_a_write_beside_a_reading_use_is_refused(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
    with (
        memd_client.gather(model),
        pytest.raises(memd_client.MemdError, match="in use for reading"),
        memd_client.gather(model, write=True),
    ):
        pass


def test_values_that_were_written_are_kept_though_the_device_has_no_room(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
    expected = [each.cpu() * 1.5 for each in model.state_dict().values()]
    with SIM.limit(0), memd_client.gather(model, write=True), torch.no_grad():
        torch.accelerator.empty_cache()
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert are_equal(list(model.state_dict().values()), expected)


def test_a_value_that_could_not_be_written_is_written_at_the_next_use(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
    expected = [each.cpu() * 1.5 for each in model.state_dict().values()]

    def fail(*_: object) -> None:
        raise memd_client.MemdError("the daemon is away")

    def write(patched: pytest.MonkeyPatch) -> None:
        with memd_client.gather(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
            patched.setattr(session.leases, "write", fail)

    with monkeypatch.context() as patched, pytest.raises(memd_client.MemdError, match="is away"):
        write(patched)
    with torch.no_grad():
        model(batch(0).to("sim"))
    assert are_equal(list(model.state_dict().values()), expected)
