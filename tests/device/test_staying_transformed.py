"""torch.compile, torch.func and what asks no class, over models that stay on a device: torch's
bits, or a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, functionalize, grad, vjp, vmap

import memd_client
from memd_client import InvalidArgument
from tests.device.models import are_equal
from tests.device.offloaded import RATE, STEPS, batch
from tests.device.offloaded_models import build
from tests.device.staying import WrittenOut
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.staying import Stepped

    # Leaves a gradient in each parameter.
    Backward = Callable[[nn.Module, int], None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    torch._dynamo.reset()
    with connected(daemon, monkeypatch) as session:
        yield session


def there(number: int) -> Tensor:
    return batch(number).to("sim", non_blocking=True)


def plain(model: nn.Module, number: int) -> None:
    model(there(number)).backward()


def loss_of(model: nn.Module, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
    loss: Tensor = functional_call(model, parameters, (inputs,))
    return loss


def by_grad(model: nn.Module, number: int) -> None:
    """Gradients of a function, which the program puts in place."""
    parameters = dict(model.named_parameters())
    found = grad(lambda values: loss_of(model, values, there(number)))(parameters)
    for name, parameter in parameters.items():
        parameter.grad = found[name].detach()


def by_sample(model: nn.Module, number: int) -> None:
    """The mean of the gradients of each row by itself."""
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    of_one = grad(lambda values, row: loss_of(model, values, row.unsqueeze(0)))
    found = vmap(of_one, in_dims=(None, 0))(parameters, there(number))
    for name, parameter in model.named_parameters():
        parameter.grad = found[name].mean(0)


def trained(
    model: nn.Module, optimizer: Stepped, backward: Backward, used: nn.Module
) -> list[Tensor]:
    for step in range(STEPS):
        backward(used, step)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu() for each in model.parameters()]


def both(
    session: Session, backward: Backward, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """The values after training with memd, and those without."""
    found = []
    for is_reference in (False, True):
        model = build("mlp").to("sim")
        optimizer: Any
        if is_reference:
            optimizer = WrittenOut(list(model.parameters()))
        else:
            optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        found.append(trained(model, optimizer, backward, wrap(model)))
    return found[0], found[1]


def whole(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    return compiled


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("wrap", [whole, in_place])
def test_a_compiled_model_trains_with_the_bits_of_one_without_memd(
    session: Session, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    assert are_equal(*both(session, plain, wrap))


def test_it_is_compiled_once(session: Session) -> None:
    model = build("mlp").to("sim")
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
    compiled = whole(model)
    trained(model, optimizer, plain, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        trained(model, optimizer, plain, compiled)
    assert session.committed_step == 2 * STEPS


@pytest.mark.parametrize("backward", [by_grad, by_sample])
def test_gradients_of_functions_train_with_the_bits_of_a_model_without_memd(
    session: Session, backward: Backward
) -> None:
    assert are_equal(*both(session, backward, lambda model: model))


def of_inputs(model: nn.Module, number: int) -> None:
    """The function refers to the parameters."""
    grad(lambda inputs: model(inputs))(there(number))


def by_vjp(model: nn.Module, number: int) -> None:
    parameters = dict(model.named_parameters())
    vjp(lambda values: loss_of(model, values, there(number)), parameters)


def by_vmap(model: nn.Module, number: int) -> None:
    del number
    vmap(torch.square)(next(model.parameters()))


def by_functionalize(model: nn.Module, number: int) -> None:
    del number
    functionalize(torch.square)(next(model.parameters()))


class Plain(torch.Tensor):
    """A class that asks for nothing."""


def by_constructor(model: nn.Module, number: int) -> None:
    del number
    torch.tensor(next(model.parameters()))


def by_subclass(model: nn.Module, number: int) -> None:
    del number
    torch.Tensor._make_subclass(Plain, next(model.parameters())).sum()


def by_native_alias(model: nn.Module, number: int) -> None:
    """As extensions in C++ do."""
    del number
    torch.Tensor.as_subclass(next(model.parameters()), torch.Tensor).sum()


TRANSFORMED = (
    *(of_inputs, by_sample, by_grad, by_vjp, by_vmap, by_functionalize),
    *(by_constructor, by_subclass, by_native_alias),
)


@pytest.mark.parametrize("backward", TRANSFORMED)
def test_functions_of_values_that_wait_for_a_commit_are_refused(
    session: Session, backward: Backward
) -> None:
    model = build("mlp").to("sim")
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
    session.track(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    plain(model, 0)
    optimizer.step()
    with pytest.raises(InvalidArgument, match=r"step\(\) has taken the gradient"):
        backward(model, 1)
    session.commit()
    optimizer.zero_grad()
    backward(model, 1)
