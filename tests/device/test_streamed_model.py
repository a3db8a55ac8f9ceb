"""A whole step with parameters that come and go is right, and misses each of its waits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.models import Transformer, are_equal, words
from tests.device.simulation import SIM
from tests.device.streamed_model import WAITS, StreamedModel

SEEDS = (5, pytest.param(50, marks=pytest.mark.soak))


def plain_step() -> list[torch.Tensor]:
    """The loss and the gradients, in the order of modules."""
    torch.manual_seed(0)
    model = Transformer()
    with sdpa_kernel(SDPBackend.MATH):  # the CPU would take its flash kernel
        loss = model(words())
    loss.backward()
    gradients = [
        parameter.grad
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.grad is not None
    ]
    return [loss.detach(), *gradients]


def streamed_step(forgotten: str = "") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Transformer()
    streamed = StreamedModel(model, forgotten)
    loss = model(words().to("sim"))
    loss.backward()
    assert streamed.resident_count == 0
    gradients = list(streamed.gradients())
    return [loss.detach().cpu(), *gradients]


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_streamed_step_has_the_bits_of_the_cpu(seeds: int) -> None:
    expected = plain_step()
    for seed in range(seeds):
        SIM.seed(seed)
        assert are_equal(streamed_step(), expected)
    assert set(SIM.host_waits()) == set()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_streamed_step_without_one_wait_raises(wait: str, seeds: int) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        with pytest.raises(RuntimeError, match=r"race: "):
            streamed_step(wait)
        torch.accelerator.synchronize()
