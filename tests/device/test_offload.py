"""Models whose parameters come to a device and whose gradients leave it, with a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.device.cells import PRECISIONS, Cell
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, Loop, reference
from tests.device.offloaded_models import MODELS
from tests.device.simulation import SIM
from tests.device.trained import BUDGETS, trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))

# Every pair of a model, a budget and a loop.
CELLS = [
    (model, budget, LOOPS[(row + column) % len(LOOPS)])
    for row, model in enumerate(MODELS)
    for column, budget in enumerate(BUDGETS)
]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("model", "budget", "loop"), CELLS, ids=str)
def test_training_has_the_bits_of_training_without_memd(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    budget: str,
    loop: Loop,
    seeds: int,
) -> None:
    expected = reference(model, loop, "sim")
    for seed in range(seeds):
        SIM.seed(seed)
        assert are_equal(trained(daemon, monkeypatch, model, budget, loop), expected)


class Shift(nn.Module):
    """Adds a parameter whose gradient is a view of that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8 * 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.view(8, 64)


class Shifted(nn.Module):
    """Autograd adds to the gradient of the input in place, when that of the shift is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(24, 64), Shift()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.first(x))
        early = x.square().mean()
        late: Tensor = self.shift(x).cos().mean()
        return early + late


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_gradient_in_memory_that_autograd_adds_to_leaves_as_it_was(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    monkeypatch.setitem(MODELS, "shifted", Shifted)
    expected = reference("shifted", LOOPS[0], "sim")
    for seed in range(seeds):
        SIM.seed(seed)
        assert are_equal(trained(daemon, monkeypatch, "shifted", "all", LOOPS[0]), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_block_that_is_computed_again_needs_no_more_room_than_its_largest_module(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The graph that a checkpoint makes in backward keeps no parameter."""
    cell = Cell("gpt", precision, "least", "checkpoints")
    expected = reference(cell.model, cell.loop, "sim")
    assert are_equal(trained(daemon, monkeypatch, cell.model, cell.budget, cell.loop), expected)
