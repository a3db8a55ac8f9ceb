"""torch's own optimizers train offloaded parameters, and channels_last is refused: run as
client_cases.py is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.unit.client_cases import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session

with warnings.catch_warnings():
    # It would like to have hypothesis.
    warnings.simplefilter("ignore", ImportWarning)
    from torch.testing._internal.common_optimizers import optim_db

INFOS: dict[str, Any] = {getattr(info.optim_cls, "__name__", ""): info for info in optim_db}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


def settings_of(info: Any) -> Iterator[dict[str, Any]]:
    """All of torch's table, and each implementation with the first of them."""
    table = [entry.kwargs for entry in info.optim_inputs_func(device="cpu")]
    yield from table
    for name in {"foreach", "fused"}.intersection(info.supported_impls):
        yield {**table[0], name: True}


def train(info: Any, settings: dict[str, Any], model: nn.Module) -> list[torch.Tensor]:
    parameters = [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 or info.optim_cls is not torch.optim.Muon
    ]
    optimizer = info.optim_cls(parameters, **settings)
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        if info.step_requires_closure:
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
    return losses


class TestTorchOptimizers:
    @pytest.mark.parametrize("name", sorted(INFOS.keys() - {"SparseAdam"}))
    def test_each_one_trains_offloaded_parameters_with_the_same_bits(
        self, session: Session, name: str
    ) -> None:
        model = memd_client.offload(Small(), session)
        initial = Small().state_dict()
        for settings in settings_of(INFOS[name]):
            reference = Small()
            model.load_state_dict(initial)
            ours, plain = (train(INFOS[name], settings, each) for each in (model, reference))
            assert all(map(torch.equal, ours, plain)), settings
            assert_same_state(model, reference)
            model.zero_grad()

    def test_sparse_gradients_are_refused(self, session: Session) -> None:
        model = memd_client.offload(nn.Embedding(8, 4, sparse=True), session)
        optimizer = torch.optim.SparseAdam(model.parameters())
        with pytest.raises(memd_client.InvalidArgument, match=r"'weight' is sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert torch.count_nonzero(model.weight.detach()) == 32


class TestChannelsLast:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Conv2d(3, 8, 3),
            lambda: nn.Conv2d(8, 4, 1),
            lambda: nn.Conv2d(8, 8, 3, groups=8),
            lambda: nn.Conv3d(8, 4, 1),
        ],
        ids=["3x3", "1x1", "depthwise", "3d"],
    )
    def test_channels_last_is_refused_before_and_after(
        self, session: Session, make: Callable[[], nn.Module]
    ) -> None:
        """A 1x1 weight is contiguous too, so its strides were lost without a word."""
        module: Any = make()
        last = torch.channels_last if module.weight.ndim == 4 else torch.channels_last_3d
        module.to(memory_format=last)
        with pytest.raises(memd_client.InvalidArgument, match="'weight' is not contiguous, or ch"):
            memd_client.offload(module, session)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        expected = module.weight.detach().clone()
        memd_client.offload(module, session)
        with pytest.raises(memd_client.NotResident, match=r"'weight' is contiguous.*strides"):
            module.to(memory_format=last)
        assert torch.equal(module.weight.detach(), expected)
        module.to(memory_format=torch.contiguous_format)
