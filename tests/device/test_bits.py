"""Programs on the simulated device have the CPU's bits, whatever the dice say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.models import Convolutions, Transformer, are_equal, images, train, words
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = (*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40)))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_trained_transformer_has_the_bits_of_the_cpu(seed: int, fused: bool) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # the CPU would take its flash kernel
        expected = train(build(Transformer), words(), fused=fused)
    SIM.seed(seed)
    found = train(build(Transformer).to("sim"), words().to("sim"), fused=fused)
    assert are_equal(found, expected)
    assert not SIM.host_waits()


def trained_convolutions(device: str, layout: torch.memory_format) -> list[Tensor]:
    model = build(Convolutions).to(device, memory_format=layout)  # type: ignore[call-overload]
    return train(model, images().to(memory_format=layout).to(device))


@pytest.mark.parametrize("seed", SEEDS)
def test_trained_convolutions_have_the_bits_of_the_cpu(seed: int) -> None:
    expected = trained_convolutions("cpu", torch.contiguous_format)
    SIM.seed(seed)
    assert are_equal(trained_convolutions("sim", torch.contiguous_format), expected)
    assert not SIM.host_waits()


def test_losses_in_channels_last_are_right_but_for_rounding() -> None:
    """Meta kernels promise other strides there than the CPU's kernels make."""
    found, expected = (
        trained_convolutions(device, torch.channels_last)[:3] for device in ("sim", "cpu")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "draw",
    [
        partial(functional.dropout, p=0.3),
        torch.randn_like,
        torch.bernoulli,
        lambda x: torch.randperm(len(x), device=x.device),
    ],
    ids=["dropout", "randn_like", "bernoulli", "randperm"],
)
def test_random_numbers_are_those_of_the_cpus_generator(draw: Callable[[Tensor], Tensor]) -> None:
    def drawn(device: str) -> Tensor:
        torch.manual_seed(0)
        return draw(torch.full((64,), 0.5, device=device)).cpu()

    assert torch.equal(drawn("sim"), drawn("cpu"))


def test_autocast_computes_products_in_half_and_norms_in_full_precision() -> None:
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    inputs = torch.randn(4, 8)
    halves = [each.bfloat16() for each in (inputs, layer.weight, layer.bias)]
    product = functional.linear(*halves)
    expected = [product, norm(product.float())]
    with torch.autocast("sim", torch.bfloat16):
        found = layer.to("sim")(inputs.to("sim"))
        assert are_equal([found.cpu(), norm.to("sim")(found).cpu()], expected)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_normalizations_have_the_statistics_of_the_cpu(
    inputs: torch.dtype, parameters: torch.dtype, is_training: bool
) -> None:
    """Which differ in shape and dtype from a GPU's."""
    drawn = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(0)).to(inputs)

    def found(device: str) -> list[Tensor]:
        norms = nn.Sequential(nn.BatchNorm2d(6), nn.LayerNorm((4, 4))).to(parameters)
        norms.train(is_training).to(device)
        x = drawn.to(device).requires_grad_()
        norms(x).float().square().sum().backward()
        made = [x.grad, *(each.grad for each in norms.parameters()), *norms.buffers()]
        return [each.cpu() for each in made if each is not None]

    assert len(found("sim")) == 8
    assert are_equal(found("sim"), found("cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_operators_whose_shapes_depend_on_data_make_the_host_wait(seed: int) -> None:
    SIM.seed(seed)
    numbers = torch.arange(8, device="sim") % 3
    assert numbers.nonzero().flatten().tolist() == [1, 2, 4, 5, 7]
    assert numbers.sum().item() == 7
    waits = SIM.host_waits()
    assert waits["aten::nonzero"] == 1
    assert waits["aten::_local_scalar_dense"] == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_idle", [False, True])
def test_memory_that_is_used_again_has_no_values_of_before(seed: int, is_idle: bool) -> None:
    SIM.seed(seed)
    ones = torch.ones(64, device="sim")
    twos = ones + ones
    if is_idle:
        torch.accelerator.synchronize()
    address = ones.data_ptr()
    del ones
    empty = torch.empty(64, device="sim")
    assert empty.data_ptr() == address
    assert empty.isnan().all()
    assert twos.tolist() == [2.0] * 64


def test_a_compiled_model_has_the_bits_of_the_eager_one() -> None:
    inputs = torch.randn(4, 16, device="sim")
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)).to("sim")

    def gradients(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layers.zero_grad()
        model(inputs).sum().backward()
        return [
            parameter.grad.cpu() for parameter in layers.parameters() if parameter.grad is not None
        ]

    compiled = gradients(torch.compile(layers, backend="aot_eager", fullgraph=True))
    assert len(compiled) == 4
    assert are_equal(compiled, gradients(layers))
