"""Ordinary training programs of a model on a device and its optimizer. Each returns what it has
computed.
"""

from __future__ import annotations

import copy
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.device.offloaded import batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.device.staying import Stepped

    Program = Callable[[nn.Module, Stepped], list[Tensor]]

_STEPS = 3


def inputs(number: int) -> Tensor:
    return batch(number).to("sim", non_blocking=True)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [each.grad for each in model.parameters()]
    return [each for each in found if each is not None]


def steps(
    model: nn.Module,
    optimizer: Stepped,
    *,
    count: int = _STEPS,
    first: int = 0,
    loss_of: Callable[[int], Tensor] | None = None,
    change: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Returns the losses. `change` is made between backward and step."""
    losses = []
    for number in range(first, first + count):
        loss = model(inputs(number)) if loss_of is None else loss_of(number)
        loss.backward()
        change()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def penalizes_gradients(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def loss_of(number: int) -> Tensor:
        there = inputs(number).requires_grad_()
        loss: Tensor = model(there)
        (slope,) = torch.autograd.grad(loss, there, create_graph=True)
        return loss + slope.square().sum()

    return steps(model, optimizer, loss_of=loss_of)


def penalizes_weights(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def loss_of(number: int) -> Tensor:
        squares = [each.square().sum() for each in model.parameters()]
        loss: Tensor = model(inputs(number))
        return loss + 1e-2 * torch.stack(squares).sum()

    return steps(model, optimizer, loss_of=loss_of)


def assigns_gradients(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = []
    for number in range(_STEPS):
        loss = model(inputs(number))
        found = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def scales_gradients_in_hooks(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return steps(model, optimizer)


def clamps_gradients_through_data(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def clamp() -> None:
        for gradient in gradients(model):
            gradient.data.clamp_(-1e-3, 1e-3)

    return steps(model, optimizer, change=clamp)


def copies_gradients_from_one_vector(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def copy_back() -> None:
        flat = torch.cat([each.reshape(-1) for each in gradients(model)]) * 0.5
        begin = 0
        for gradient in gradients(model):
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()

    return steps(model, optimizer, change=copy_back)


def keeps_gradients_over_a_step(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    model(inputs(0)).backward()
    kept = gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return [*steps(model, optimizer, first=1), *(each.clone() for each in kept)]


def skips_a_batch(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = []
    for number in range(_STEPS):
        model.zero_grad()
        loss = model(inputs(number))
        loss.backward()
        if number != 1:
            optimizer.step()
        losses.append(loss.detach())
    return losses


def computes_gradients_of_a_part(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    part = list(model.parameters())[4:]
    losses = []
    for number in range(_STEPS):
        loss = model(inputs(number))
        loss.backward(inputs=part)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def halves_values_through_data(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = steps(model, optimizer, count=1)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return [*losses, *steps(model, optimizer, first=1)]


def goes_back_to_older_values(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    older = {name: value.clone() for name, value in model.state_dict().items()}
    losses = steps(model, optimizer)
    model.load_state_dict(older)
    return [*losses, *steps(model, optimizer)]


def initializes_late(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return steps(model, optimizer)


def writes_one_vector(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    return steps(model, optimizer)


def freezes_and_thaws(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    first = next(model.parameters())
    losses = []
    for number in range(_STEPS):
        first.requires_grad_(number != 1)
        losses += steps(model, optimizer, count=1, first=number)
    return losses


def averages_values(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    average = AveragedModel(model)
    losses = []
    for number in range(_STEPS):
        losses += steps(model, optimizer, count=1, first=number)
        average.update_parameters(model)
    return [*losses, *(each.clone() for each in average.module.state_dict().values())]


def has_a_teacher(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = steps(model, optimizer)
    teacher = copy.deepcopy(model)
    losses += steps(model, optimizer)
    with torch.no_grad():
        return [*losses, teacher(inputs(9))]


def calls_with_other_values(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = steps(model, optimizer)
    others = {name: 2 * each.detach() for name, each in model.named_parameters()}
    with torch.no_grad():
        return [*losses, functional_call(model, others, (inputs(9),))]


def infers_between(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    found = []
    for number in range(_STEPS):
        with torch.inference_mode():
            found.append(model(inputs(9)))
        found += steps(model, optimizer, count=1, first=number)
    return [each.clone() for each in found]


def has_two_graphs_at_once(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    first, second = model(inputs(0)), model(inputs(1))
    first.backward()
    second.backward()
    optimizer.step()
    return [first.detach(), second.detach()]


def computes_forward_again(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def loss_of(number: int) -> Tensor:
        found: Tensor = checkpoint(model, inputs(number).requires_grad_(), use_reentrant=True)
        return found

    return steps(model, optimizer, loss_of=loss_of)


def takes_losses_to_the_host(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    def loss_of(number: int) -> Tensor:
        found: Tensor = model(inputs(number)).cpu()
        return found

    return steps(model, optimizer, loss_of=loss_of)


def goes_on_after_an_exception(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses = steps(model, optimizer, count=1)
    with suppress(RuntimeError):
        model(torch.ones(3, 5, device="sim"))
    return [*losses, *steps(model, optimizer, first=1)]


def trains_in_another_thread(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    losses: list[Tensor] = []
    thread = threading.Thread(target=lambda: losses.extend(steps(model, optimizer)))
    thread.start()
    thread.join()
    return losses


def trains_on_another_stream(model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    side, here = torch.Stream(device="sim"), torch.accelerator.current_stream()
    losses = []
    for number in range(_STEPS):
        there = inputs(number)
        side.wait_stream(here)
        with side:
            loss = model(there)
            loss.backward()
        here.wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


PROGRAMS: tuple[Program, ...] = (
    *(penalizes_gradients, penalizes_weights, assigns_gradients, scales_gradients_in_hooks),
    *(clamps_gradients_through_data, copies_gradients_from_one_vector),
    *(keeps_gradients_over_a_step, skips_a_batch, computes_gradients_of_a_part),
    *(halves_values_through_data, goes_back_to_older_values, initializes_late, writes_one_vector),
    *(freezes_and_thaws, averages_values, has_a_teacher, calls_with_other_values, infers_between),
    *(has_two_graphs_at_once, computes_forward_again, takes_losses_to_the_host),
    *(goes_on_after_an_exception, trains_in_another_thread, trains_on_another_stream),
)
