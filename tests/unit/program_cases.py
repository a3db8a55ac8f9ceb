"""Whole programs, once plain and once with memd: the same figures, bit for bit, or one sentence.
Run as client_cases.py is."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memd_client
from tests.unit.client_cases import leases_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session

    Program = Callable[["Run"], None]

WIDTH = 32


class Run:
    """One run of a program, with memd if there is a session. `found` is compared."""

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self.found: list[Any] = []
        # Any: torch's stubs know little of what these programs call.
        self.model: Any = self.perceptron()

    @staticmethod
    def perceptron() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    @property
    def weight(self) -> Any:
        """The first of the model's parameters."""
        return next(self.model.parameters())

    def offload(self, model: Any = None) -> None:
        self.model = self.model if model is None else model
        if self.session is not None:
            memd_client.offload(self.model, self.session)

    def adam(self, parameters: Any = None) -> Any:
        parameters = self.model.parameters() if parameters is None else parameters
        if self.session is not None:
            return memd_client.AdamW(parameters, lr=1e-2)
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def note(self, *values: Any) -> None:
        self.found += [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]

    def loss(self, index: int, forward: Callable[[Any], Any] | None = None) -> torch.Tensor:
        output: torch.Tensor = (forward or self.model)(batch(index))
        return output.square().mean()

    def train(self, optimizer: Any, forward: Callable[[Any], Any] | None = None) -> None:
        for index in range(2):
            loss = self.loss(index, forward)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.note(loss)

    def note_state(self, optimizer: Any = None) -> None:
        self.note(*self.model.state_dict().values())
        if optimizer is not None:
            state = optimizer.state_dict()["state"]
            self.note(*(state[i][name] for i in sorted(state) for name in sorted(state[i])))


def batch(index: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


EQUAL: dict[str, Program] = {}
REFUSED: dict[str, tuple[Program, str]] = {}


def equal(program: Program) -> Program:
    EQUAL[program.__name__.replace("_", " ")] = program
    return program


def refused(match: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        REFUSED[program.__name__.replace("_", " ")] = program, match
        return program

    return add


def trained_around(change: Callable[[Run, Any], Any]) -> Program:
    """Trains, changes something, and trains on."""

    def program(run: Run) -> None:
        run.offload()
        optimizer = run.adam()
        run.train(optimizer)
        change(run, optimizer)
        run.train(optimizer)
        run.note_state(optimizer)

    return program


def for_all(change: Callable[[Any], Any]) -> Program:
    return trained_around(lambda run, _: [change(p) for p in run.model.parameters()])


# The value of a parameter through `.data`.
EQUAL["data is clamped"] = for_all(lambda p: p.data.clamp_(-0.05, 0.05))
EQUAL["data is scaled by another value"] = for_all(lambda p: p.data.mul_(p.data.norm()))
EQUAL["data is assigned"] = for_all(lambda p: setattr(p, "data", p.data * 0.5))
EQUAL["data is assigned to itself"] = for_all(lambda p: setattr(p, "data", p.data))
EQUAL["data is assigned a part"] = for_all(lambda p: p.data.__setitem__(0, 0.5))


@equal
def values_are_swapped_by_reference(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    parameters = list(run.model.parameters())
    kept, other = [p.data for p in parameters], [p.detach() * 0.5 for p in parameters]
    for parameter, value in zip(parameters, other, strict=True):
        parameter.data = value
    run.note(run.model(batch(5)), *kept)
    run.train(optimizer)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data = value
    run.train(optimizer)
    run.note(*kept, *other)
    run.note_state(optimizer)


@equal
def memory_that_is_assigned_follows(run: Run) -> None:
    run.offload()
    value = torch.full((WIDTH, WIDTH), 0.1)
    run.weight.data = value
    run.train(run.adam())
    run.note(value)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def scripted(parameter: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        function = torch.jit.script(doubled)
    return function(parameter)


class Frozen(nn.Module):
    """Operators that save a parameter itself, and not a view of it, between trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GroupNorm(2, WIDTH)
        )
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.frozen.requires_grad_(requires_grad=False)
        self.convolution.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(self.frozen(self.first(x)).unsqueeze(1)).squeeze(1)
        output: torch.Tensor = self.last(x)
        return output


@equal
def frozen_parameters_in_a_checkpoint(run: Run) -> None:
    torch.manual_seed(1)
    run.offload(Frozen())
    optimizer = run.adam([p for p in run.model.parameters() if p.requires_grad])
    run.train(optimizer, lambda x: checkpoint(run.model, x, use_reentrant=False))
    run.note_state()
    assert not run.model.convolution.weight.requires_grad


@equal
def a_model_is_quantized_in_place(run: Run) -> None:
    run.offload()
    run.train(run.adam())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        torch.ao.quantization.quantize_dynamic(run.model.eval(), {nn.Linear}, inplace=True)
    run.note(run.model(batch(1)))


@contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@refused(r"'0\.weight' can't be swapped with another.*set it to False after offload\(\)")
def a_conversion_that_swaps_parameters(run: Run) -> None:
    run.offload()
    with swapping():
        run.model.float()


@refused(r"'tensor' is a TwoTensor, which is made of others; give it to an optimizer of torch")
def an_optimizer_gets_a_tensor_that_is_made_of_others(run: Run) -> None:
    parameter: Any = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    memd_client.AdamW([("tensor", parameter)], session=run.session)


@refused(r"'0\.weight' was written")
def memory_that_is_assigned_is_written(run: Run) -> None:
    run.offload()
    value = torch.full((WIDTH, WIDTH), 0.1)
    run.weight.data = value
    value.mul_(2)
    run.note(run.model(batch(0)))


@refused(r"a view of parameter '0\.weight'.*clone")
def a_view_is_held_while_data_is_assigned(run: Run) -> None:
    run.offload()
    view = run.weight[0]
    run.weight.data = torch.ones(WIDTH, WIDTH)
    run.note(view)


class Signs(nn.Linear):
    """Computes with its signs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.weight.data
        self.weight.data = value.sign() * 0.1
        output = functional.linear(x, self.weight, self.bias)
        self.weight.data = value
        return output


class KeptSigns(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = self.weight.data
        self.weight.data = self.value.sign() * 0.1
        return functional.linear(x, self.weight, self.bias)


@equal
def a_module_swaps_its_value(run: Run) -> None:
    run.offload(nn.Sequential(Signs(WIDTH, WIDTH), nn.Tanh(), Signs(WIDTH, WIDTH)))
    optimizer = run.adam()
    run.train(optimizer)
    run.note_state(optimizer)


@refused(r"a view of parameter '0\.weight'")
def a_module_keeps_the_value_that_it_replaces(run: Run) -> None:
    run.offload(nn.Sequential(KeptSigns(WIDTH, WIDTH)))
    run.note(run.model(batch(0)))
    run.note(run.model[0].value)


@refused(r"'0\.weight' is in memd, and sharing it by \.data.*clone")
def another_tensor_gets_the_data(run: Run) -> None:
    """It would have no memory, which ended the process."""
    run.offload()
    tensor = torch.ones(WIDTH, WIDTH)
    tensor.data = run.weight.data
    run.note(tensor.sum())


@refused(r"the gradient of '0\.weight' is in memd, and sharing")
def another_tensor_gets_the_gradient(run: Run) -> None:
    run.offload()
    run.loss(0).backward()
    tensor = torch.ones(WIDTH, WIDTH)
    tensor.data = run.weight.grad
    run.note(tensor.sum())


@refused(r"'0\.weight' is in memd, and nn\.Parameter.*before offload\(\)")
def a_parameter_is_made_of_the_data(run: Run) -> None:
    run.offload()
    run.note(nn.Parameter(run.weight.data))


# Tensors that shared memory with a parameter before it was offloaded.
@equal
def a_state_dict_from_before_follows(run: Run) -> None:
    state = run.model.state_dict()
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    run.note(*state.values())
    state["0.weight"].mul_(0.5)
    run.train(optimizer)
    run.note(*state.values())
    run.note_state(optimizer)


@equal
def a_part_from_before_follows(run: Run) -> None:
    part = run.weight.detach().view(-1)[3:7]
    run.offload()
    run.train(run.adam())
    run.note(part)


@equal
def a_buffer_over_a_parameter_follows(run: Run) -> None:
    run.model.register_buffer("shared", run.weight.data)
    run.offload()
    run.train(run.adam(), lambda x: run.model(x) @ run.model.shared)
    run.note_state()


@equal
def parameters_of_a_flat_tensor_keep_it_current(run: Run) -> None:
    flat = torch.linspace(-0.1, 0.1, 2 * WIDTH * WIDTH)
    for layer, part in zip((run.model[0], run.model[2]), flat.chunk(2), strict=True):
        layer.weight = nn.Parameter(part.view(WIDTH, WIDTH))
    run.offload()
    run.train(run.adam())
    run.note(flat)


@refused(r"'0\.weight' was written")
def data_from_before_is_written(run: Run) -> None:
    data = run.weight.data
    run.offload()
    data.mul_(0.5)
    run.note(run.model(batch(0)))


@refused(r"'0\.weight' and '2\.weight' share memory")
def two_parameters_share_memory(run: Run) -> None:
    run.model[2].weight = nn.Parameter(run.weight.data)
    run.offload()


# All parameters as one vector.
@equal
def a_vector_of_all_parameters(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(
        optimizer,
        lambda x: run.model(x) * nn.utils.parameters_to_vector(run.model.parameters()).norm(),
    )
    vector = nn.utils.parameters_to_vector(run.model.parameters())
    run.note(*torch.autograd.grad(vector.pow(3).sum(), list(run.model.parameters())))
    nn.utils.vector_to_parameters(vector.detach() * 0.5, run.model.parameters())
    run.train(optimizer)
    run.note_state(optimizer)


@equal
def flat_views_are_changed(run: Run) -> None:
    run.offload()
    with torch.no_grad():
        run.weight.view(-1)[3:9] = 0.5
        run.weight.flatten()[0] = 1.0
        run.weight.reshape(4, -1).mul_(0.9)
    run.note(run.weight.view(torch.int32), run.model(batch(0)))
    run.note_state()


@equal
def an_average_that_is_offloaded(run: Run) -> None:
    average = AveragedModel(run.model).requires_grad_(False)
    both = nn.ModuleDict({"model": run.model, "average": average})
    model = run.model
    run.offload(both)
    optimizer = run.adam(model.parameters())
    for _ in range(3):
        run.train(optimizer, model)
        average.update_parameters(model)
    run.note_state()


# Derivatives.
@equal
def parameters_as_vectors_of_a_product(run: Run) -> None:
    run.offload()
    parameters = list(run.model.parameters())
    gradients = torch.autograd.grad(run.loss(0), parameters, create_graph=True)
    run.note(*torch.autograd.grad(gradients, parameters, grad_outputs=parameters))


@equal
def zeros_in_the_place_of_absent_gradients(run: Run) -> None:
    run.offload()
    loss = run.loss(0, run.model[2])
    parameters = list(run.model.parameters())
    run.note(*torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True))
    run.note(*torch.autograd.grad(loss, parameters, materialize_grads=True))


@equal
def a_selective_checkpoint_that_saves_all(run: Run) -> None:
    """Its dispatch mode saw what memd computes, and did not find it again in backward."""
    run.offload()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(
            lambda *_, **__: CheckpointPolicy.MUST_SAVE, allow_cache_entry_mutation=True
        )

    optimizer = run.adam()
    run.train(
        optimizer, lambda x: checkpoint(run.model, x, use_reentrant=False, context_fn=contexts)
    )
    run.note_state(optimizer)


@equal
def a_thread_trains_while_another_evaluates_in_inference_mode(run: Run) -> None:
    """It got the evaluation's inference tensors."""
    run.offload()
    optimizer = run.adam()
    is_inside, may_end = threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.inference_mode():
            run.model(batch(0))

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            is_inside.set()
            may_end.wait(60)

    handle = run.model[2].register_forward_pre_hook(wait)
    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        assert is_inside.wait(60)
        loss = run.loss(1)
        loss.backward()
    finally:
        may_end.set()
        thread.join()
        handle.remove()
    optimizer.step()
    run.note(loss)
    run.note_state(optimizer)


@equal
def views_from_inference_mode_are_ordinary(run: Run) -> None:
    run.offload()
    with torch.inference_mode():
        view = run.weight.t()
    run.note(view.is_inference(), view)


@equal
def dual_numbers_over_a_flat_view(run: Run) -> None:
    run.offload()
    run.note(
        torch.func.jvp(lambda w: w.view(-1).sin().sum(), (torch.ones(3),), (torch.ones(3),))[1]
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(WIDTH**2), torch.ones(WIDTH**2))
        product = dual * run.weight.view(-1)
        run.note(torch.autograd.forward_ad.unpack_dual(product).tangent)


@refused("traced.*'0.*deepcopy")
def a_graph_by_make_fx(run: Run) -> None:
    run.offload()
    run.note(make_fx(run.model)(batch(0))(batch(1)))


@refused("traced.*'0.*deepcopy")
def a_linear_map(run: Run) -> None:
    run.offload()
    run.note(torch.func.linearize(run.model, batch(0))[1](batch(1)))


def compiled(function: Callable[[torch.Tensor], Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")(batch(0))


@refused("transform of torch.func.*without torch.compile")
def a_gradient_inside_a_compiled_function(run: Run) -> None:
    run.offload()
    run.note(compiled(lambda x: torch.func.grad(lambda y: run.model(y).sum())(x)))


@refused("transform of torch.func.*without torch.compile")
def a_gradient_over_parameters_inside_a_compiled_function(run: Run) -> None:
    run.offload()
    parameters = dict(run.model.named_parameters())
    compiled(
        lambda x: torch.func.grad(lambda p: functional_call(run.model, p, (x,)).sum())(parameters)
    )


# Optimizers.
@equal
def hooks_change_a_state_that_is_loaded(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)

    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        run.note("before")
        moments = {
            index: {**each, "exp_avg": each["exp_avg"] * 0.5}
            for index, each in state["state"].items()
        }
        return {**state, "state": moments}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda it: run.note(
            "after", *(each["exp_avg"] for each in it.state_dict()["state"].values())
        )
    )
    optimizer.load_state_dict(optimizer.state_dict())
    run.train(optimizer)
    run.note_state(optimizer)


@equal
def a_default_dtype_of_float64(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        run.note_state(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


@equal
def a_gradient_that_is_assigned_and_changed(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    gradient = torch.ones(WIDTH, WIDTH)
    run.model[0].weight.grad = gradient
    gradient.mul_(3)
    run.note(run.weight.grad)
    run.model[2].weight.grad = gradient
    gradient.add_(1)
    optimizer.step()
    run.note_state(optimizer)


@equal
def gradients_that_are_assigned_from_a_list_are_clipped(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    gradients = torch.autograd.grad(run.loss(0), list(run.model.parameters()))
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    run.note(nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3))
    optimizer.step()
    run.note_state(optimizer)


@equal
def a_gradient_and_what_was_assigned_change(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    gradient = torch.ones(WIDTH, WIDTH)
    run.weight.grad = gradient
    run.weight.grad.mul_(2)
    run.note(gradient)
    gradient.add_(1)
    run.loss(0).backward()
    run.note(gradient)
    optimizer.step()
    run.note_state(optimizer)


@equal
def a_view_of_a_flat_buffer_is_assigned(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    parameters = list(run.model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(
        parameters, flat.split([each.numel() for each in parameters]), strict=True
    ):
        parameter.grad = part.view(parameter.shape)
    flat.fill_(3.0)
    run.loss(0).backward()
    run.note(flat)
    flat.mul_(0.5)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.note(flat)
    optimizer.step()
    run.note_state(optimizer)


@equal
def a_gradient_is_assigned_after_another(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.loss(0).backward()
    gradient = torch.ones(WIDTH, WIDTH)
    run.model[0].weight.grad = gradient
    run.model[0].weight.grad = run.model[2].weight.grad
    gradient.zero_()
    optimizer.step()
    run.note_state(optimizer)


@refused(r"the gradient of '0\.weight' and the tensor that was assigned")
def the_memory_of_a_gradient_and_what_was_assigned_change(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    gradient = torch.ones(WIDTH, WIDTH)
    run.weight.grad = gradient
    memory = run.weight.grad.numpy()
    memory *= 2
    del memory
    gradient.add_(1)
    optimizer.step()


REFUSED["a state is cleared"] = (
    trained_around(lambda _, optimizer: optimizer.state.clear()),
    r"reset_state\(\)",
)


@refused(r"cleared.*reset_state\(\)")
def groups_and_states_are_cleared_and_made_anew(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    optimizer.param_groups.clear()
    optimizer.state.clear()
    optimizer.add_param_group({"params": list(run.model.parameters())})


@equal
def groups_alone_are_cleared_and_made_anew(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(run.model.parameters())})
    run.train(optimizer)
    run.note_state(optimizer)


REFUSED["a state is replaced"] = (
    trained_around(lambda _, optimizer: setattr(optimizer, "state", defaultdict(dict))),
    r"reset_state\(\)",
)
REFUSED["a state is written"] = (
    trained_around(
        lambda run, optimizer: optimizer.state[run.weight].update(exp_avg=torch.zeros(3))
    ),
    r"load_state_dict\(\)",
)
REFUSED["a moment is read"] = (
    trained_around(lambda run, optimizer: optimizer.state[run.weight]["exp_avg"].clone()),
    r"has no 'exp_avg'.*state_dict\(\)",
)


@refused(r"param_groups was put there by hand.*add_param_group\(\)")
def a_parameter_in_a_group_is_replaced(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    run.train(optimizer)
    other = nn.Parameter(torch.ones(WIDTH, WIDTH))
    run.model[2].weight = other
    optimizer.param_groups[0]["params"][2] = other
    run.train(optimizer)


@refused("'0.weight' is in a group twice")
def a_parameter_is_given_twice(run: Run) -> None:
    run.model[2].weight = run.weight
    run.offload()
    run.adam([each for _, each in run.model.named_parameters(remove_duplicate=False)])


@refused("module '0' is a ScriptModule")
def a_scripted_child(run: Run) -> None:
    run.offload(nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH))))


# Others that had torch's bits from the beginning.
def parametrized(name: str, register: Callable[[Any], Any]) -> None:
    def before(run: Run) -> None:
        register(run.model[0])
        run.offload()
        optimizer = run.adam()
        run.train(optimizer)
        with parametrize.cached():
            loss = run.loss(7) + run.loss(8)
        loss.backward()
        optimizer.step()
        run.note(loss)
        run.note_state(optimizer)

    EQUAL[f"{name} before offload"] = before


parametrized("weight_norm", parametrizations.weight_norm)
parametrized("spectral_norm", parametrizations.spectral_norm)
parametrized("orthogonal", parametrizations.orthogonal)
parametrized("old weight_norm", nn.utils.weight_norm)
parametrized("old spectral_norm", nn.utils.spectral_norm)
parametrized("pruning", partial(prune.l1_unstructured, name="weight", amount=0.5))


def halve_gradient(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def decay_by_hand(optimizer: Any, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.add_(parameter.detach(), alpha=0.01)


@equal
def hooks_of_every_kind(run: Run) -> None:
    run.offload()
    optimizer = run.adam()
    first, _, last = run.model
    last.register_full_backward_hook(lambda _, found, __: (found[0] * 2,))
    last.register_full_backward_pre_hook(lambda _, found: tuple(each * 3 for each in found))
    first.register_forward_hook(lambda module, _, output: output * module.weight.mean())
    last.register_forward_pre_hook(lambda _, given: (given[0] + first.weight[0],), prepend=True)
    handle = last.weight.register_hook(lambda gradient: gradient * 2)
    first.weight.register_post_accumulate_grad_hook(halve_gradient)
    optimizer.register_step_pre_hook(decay_by_hand)
    run.train(optimizer)
    handle.remove()
    run.train(optimizer)
    run.note_state(optimizer)


@equal
def two_networks_against_each_other(run: Run) -> None:
    both = nn.ModuleDict({"one": run.perceptron(), "other": run.perceptron()})
    run.offload(both)
    one, other = both["one"], both["other"]
    ours, theirs = run.adam(one.parameters()), run.adam(other.parameters())
    for index in range(3):
        made = one(batch(index))
        for optimizer, loss in (
            (theirs, other(batch(9)).mean() - other(made.detach()).mean()),
            (ours, None),
        ):
            found = -other(made).mean() if loss is None else loss
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            run.note(found)
        for parameter in other.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    run.note_state(ours)


@equal
def a_target_network_follows_slowly(run: Run) -> None:
    model = run.model
    target = copy.deepcopy(model).requires_grad_(False)
    run.offload(nn.ModuleDict({"model": model, "target": target}))
    optimizer = run.adam(model.parameters())
    for _ in range(2):
        run.train(optimizer, lambda x: model(x) - target(x.flip(0)) + 1)
        for theirs, ours in zip(target.parameters(), model.parameters(), strict=True):
            theirs.data.mul_(0.9)
            theirs.data.add_(ours.data, alpha=0.1)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.1)
    run.note_state(optimizer)


class TestPrograms:
    @pytest.mark.parametrize("name", EQUAL)
    @pytest.mark.filterwarnings("ignore:.*is deprecated")
    def test_a_program_has_the_figures_that_it_has_without_memd(
        self, session: Session, name: str
    ) -> None:
        runs = Run(session), Run(None)
        for run in runs:
            torch.manual_seed(2)
            EQUAL[name](run)
        ours, plain = (run.found for run in runs)
        assert len(ours) == len(plain)
        for found, expected in zip(ours, plain, strict=True):
            if isinstance(expected, torch.Tensor):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
            else:
                assert found == expected
        gc.collect()  # graphs of hooks have cycles
        assert leases_held(session) == 0

    @pytest.mark.parametrize("name", REFUSED)
    @pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:.*duplicate parameters")
    def test_a_program_that_can_not_is_told_so(self, session: Session, name: str) -> None:
        program, match = REFUSED[name]
        with pytest.raises(memd_client.MemdError, match=match):
            program(Run(session))

    @pytest.mark.parametrize(
        ("program", "message"),
        [
            (lambda p: torch.utils.swap_tensors(p, torch.ones(WIDTH, WIDTH)), "has weakref"),
            (lambda p: torch._C._to_dlpack(p.detach()), "Cannot access data pointer"),
            (scripted, r"(?s)NotResident: .*'0\.weight'.*in memd"),
        ],
        ids=["swap_tensors", "to_dlpack", "ScriptFunction"],
    )
    def test_a_program_of_which_memd_hears_nothing_ends_as_the_failure_model_says(
        self, session: Session, program: Callable[[Any], Any], message: str
    ) -> None:
        run = Run(session)
        run.offload()
        value = run.weight.detach().clone()
        with pytest.raises(RuntimeError, match=message):
            program(run.weight)
        assert torch.equal(run.weight.detach(), value)

    def test_loading_by_a_swap_ends_in_torchs_error_with_the_reason(self, session: Session) -> None:
        run = Run(session)
        run.offload()
        with swapping(), pytest.raises(RuntimeError, match="set it to False after offload"):
            run.model.load_state_dict(Run.perceptron().state_dict())
