"""Programs over an offloaded parameter or module have plain PyTorch's result or are refused by
name: run as client_cases.py is."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import memd_client
from tests.unit.client_cases import WIDTH, Mlp, assert_same_state, batch, build, leases_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

    # Any: torch's stubs know little of what these programs call.
    Program = Callable[[Any], Any]


def called(change: Callable[[Any], object]) -> Program:
    """The module's output after `change`."""

    def program(model: Any) -> torch.Tensor:
        change(model)
        output: torch.Tensor = model(batch(model))
        return output.detach()

    return program


def functional(model: nn.Module, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = functional_call(model, parameters, (batch(model),)).square().mean()
    return loss


def tangents(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones(value.shape) for name, value in model.named_parameters()}


def forward_over_parameters(model: Mlp) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional(model, parameters)

    tangent: torch.Tensor = torch.func.jvp(
        loss, (dict(model.named_parameters()),), (tangents(model),)
    )[1]
    return tangent.detach()


def gradient_over_parameters(model: Mlp) -> Any:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional(model, parameters)

    return torch.func.grad(loss)(dict(model.named_parameters()))


SAME: dict[str, Program] = {
    "a buffer of it": lambda model: nn.Buffer(model.first.weight).detach().clone(),
    "another of its type": lambda model: type(model.first.weight)(torch.ones(3)).detach(),
    "a parameter of a copy": lambda model: nn.Parameter(model.first.weight.detach().clone()).data,
    "dlpack of what is detached": lambda model: torch.utils.dlpack.from_dlpack(
        model.first.weight.detach()
    ),
    "numpy of what is detached": lambda model: torch.tensor(model.first.weight.detach().numpy()),
    "half": lambda model: model.first.weight.half(),
    "functional_call": lambda model: functional(model, dict(model.named_parameters())).detach(),
    "jvp over parameters": forward_over_parameters,
    "grad over the input": lambda model: torch.func.grad(lambda x: model(x).sum())(batch(model)),
    "jacobian of the module": lambda model: torch.func.jacrev(model)(batch(model)[0, :1]).detach(),
    "vmap of the module": lambda model: torch.func.vmap(model)(batch(model)).detach(),
    "pruning": called(lambda model: prune.l1_unstructured(model.first, "weight", 0.5)),
    "pruning for good": called(
        lambda model: prune.remove(prune.random_unstructured(model.first, "weight", 0.5), "weight")
    ),
    "orthogonal": called(lambda model: parametrizations.orthogonal(model.first)),
    "spectral_norm": called(lambda model: parametrizations.spectral_norm(model.first)),
    "old spectral_norm": called(lambda model: spectral_norm(model.first)),
    "the same dtype": called(lambda model: model.to(torch.float32)),
    "_apply that keeps the dtype": called(lambda model: model._apply(lambda value: value * 2)),
    "trace of a copy": lambda model: torch.jit.trace(copy.deepcopy(model), batch(model))(
        batch(model)
    ).detach(),
}
REFUSED: dict[str, tuple[Program, str]] = {
    "a parameter over it": (
        lambda model: nn.Parameter(model.first.weight),
        r"detach\(\)\.clone\(\)",
    ),
    "weight_norm": (lambda model: parametrizations.weight_norm(model.first), r"before offload\(\)"),
    "old weight_norm": (lambda model: weight_norm(model.first), r"detach\(\)\.clone\(\)"),
    "numpy": (lambda model: np.asarray(model.first.weight), r"detach\(\)\.clone\(\)"),
    "dlpack": (
        lambda model: torch.utils.dlpack.from_dlpack(model.first.weight),
        r"detach\(\)\.clone\(\)",
    ),
    "gradient of parameters": (gradient_over_parameters, "gather"),
    "trace": (lambda model: torch.jit.trace(model, batch(model)), "copy.deepcopy"),
    "pickle": (lambda model: pickle.dumps(model.first.weight), r"state_dict\(\)"),
    "torch.save": (lambda model: torch.save(model.first.weight, io.BytesIO()), r"state_dict\(\)"),
    "torch.save of the module": (lambda model: torch.save(model, io.BytesIO()), r"state_dict\(\)"),
    "copy.copy": (lambda model: copy.copy(model.first.weight), r"detach\(\)\.clone\(\)"),
    "sharing": (lambda model: model.first.weight.share_memory_(), r"detach\(\)\.clone\(\)"),
    "sharing the module": (lambda model: model.share_memory(), r"detach\(\)\.clone\(\)"),
    "half module": (lambda model: model.half(), r"before offload\(\)"),
    "double module": (lambda model: model.double(), r"before offload\(\)"),
    "to bfloat16": (lambda model: model.to(torch.bfloat16), r"before offload\(\)"),
    "_apply to double": (lambda model: model._apply(lambda value: value.double()), "offload"),
    "storage": (lambda model: model.first.weight.untyped_storage(), r"detach\(\)\.clone\(\)"),
    "data_ptr": (lambda model: model.first.weight.data_ptr(), r"detach\(\)\.clone\(\)"),
    "resize_": (lambda model: model.first.weight.resize_(3), r"detach\(\)\.clone\(\)"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*is deprecated")
class TestRefusals:
    @pytest.mark.parametrize("name", SAME)
    def test_a_program_has_the_bits_that_it_has_without_memd(
        self, session: Session, name: str
    ) -> None:
        model: Any = memd_client.offload(build(Mlp), session)
        results = []
        for each in (model, build(Mlp)):
            torch.manual_seed(1)
            results.append(SAME[name](each))
        assert torch.equal(*results)
        del results
        assert leases_held(session) == 0

    @pytest.mark.parametrize("name", REFUSED)
    def test_a_program_that_can_not_is_told_the_parameter_and_what_to_do(
        self, session: Session, name: str
    ) -> None:
        program, cure = REFUSED[name]
        model: Any = memd_client.offload(build(Mlp), session)
        with pytest.raises(memd_client.NotResident, match=rf"'layers\.0\.\w+'.*{cure}"):
            program(model)
        assert leases_held(session) == 0

    def test_a_refused_parametrization_leaves_the_module_as_it_was(self, session: Session) -> None:
        model: Any = memd_client.offload(build(Mlp), session)
        for within in (False, True):
            with (
                memd_client.gather(model if within else []),
                pytest.raises(memd_client.NotResident, match="weight_norm"),
            ):
                parametrizations.weight_norm(model.first)
        assert_same_state(model, build(Mlp))

    def test_scripting_is_refused_for_the_module_and_its_copies(self, session: Session) -> None:
        model: Any = memd_client.offload(build(Mlp), session)
        for module in (model, model.layers[0], copy.deepcopy(model)):
            with pytest.raises(memd_client.NotResident, match="compiles hooks"):
                torch.jit.script(module)

    def test_one_made_of_its_type_can_be_printed(self, session: Session) -> None:
        model: Any = memd_client.offload(build(Mlp), session)
        for gathered in (False, True):
            with memd_client.gather(model if gathered else []):
                made = type(model.first.weight)(torch.zeros(WIDTH), requires_grad=False)
            assert type(made) is nn.Parameter
            assert not made.requires_grad
            assert "Parameter containing" in repr(made)
