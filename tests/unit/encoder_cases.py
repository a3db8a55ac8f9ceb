"""torch's encoder layer leaves its one kernel if a child has hooks: run as client_cases.py is."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.unit.client_cases import LENGTH, WIDTH, assert_same_gradients, build, leases_held

if TYPE_CHECKING:
    from memd_client import Session


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True).eval()


def evaluated(module: nn.Module, *, padded: bool = True, autocast: bool = False) -> torch.Tensor:
    inputs = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    padding = torch.arange(LENGTH).expand(3, LENGTH) >= torch.tensor([[4], [9], [LENGTH]])
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=autocast):
        output: torch.Tensor = module(inputs, src_key_padding_mask=padding if padded else None)
    return output


def note(seen: list[str], name: str) -> Any:
    return lambda *_: seen.append(name)


class TestEncoderLayer:
    @pytest.mark.parametrize(("padded", "autocast"), [(True, False), (False, True), (True, True)])
    def test_an_evaluation_takes_the_kernel_that_plain_torch_takes(
        self, session: Session, *, padded: bool, autocast: bool
    ) -> None:
        model, reference = memd_client.offload(build(layer), session), build(layer)
        output = evaluated(model, padded=padded, autocast=autocast)
        expected = evaluated(reference, padded=padded, autocast=autocast)
        assert output.dtype == expected.dtype
        assert torch.equal(output, expected)
        reference.get_submodule("linear1").register_forward_hook(note([], ""))
        other = evaluated(reference, padded=padded, autocast=autocast)
        assert not torch.equal(other, expected), "or it does not matter which"
        assert leases_held(session) == 0

    def test_a_hook_of_the_user_runs_and_chooses_the_kernel_as_in_torch(
        self, session: Session
    ) -> None:
        model, reference = build(layer), build(layer)
        seen: list[str] = []
        handles = [
            each.get_submodule("linear1").register_forward_hook(note(seen, "before"))
            for each in (model, reference)
        ]
        memd_client.offload(model, session)
        later = model.get_submodule("linear2").register_forward_pre_hook(note(seen, "later"))
        assert torch.equal(evaluated(model), evaluated(reference))
        assert seen == ["before", "later", "before"]
        later.remove()
        for handle in handles:
            handle.remove()
        assert torch.equal(evaluated(model), evaluated(reference))
        assert seen == ["before", "later", "before"]

    def test_copies_and_pickled_copies_take_it_too(self, session: Session) -> None:
        model = memd_client.offload(build(layer), session)
        expected = evaluated(build(layer))
        duplicate = copy.deepcopy(model)
        assert torch.equal(evaluated(duplicate), expected)
        file = io.BytesIO()
        torch.save(duplicate, file)
        file.seek(0)
        assert torch.equal(evaluated(torch.load(file, weights_only=False)), expected)

    def test_a_layer_that_trains_has_the_gradients_of_plain_torch(self, session: Session) -> None:
        model, reference = memd_client.offload(build(layer), session), build(layer)
        inputs = torch.randn(3, LENGTH, WIDTH)
        for module in (model.train(), reference.train()):
            torch.manual_seed(5)
            module(inputs).square().mean().backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0
