"""Models whose parameters come to a device and whose gradients leave it, with a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, MODELS, Loop, reference
from tests.device.simulation import SIM
from tests.device.trained import BUDGETS, trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

SEEDS = (3, pytest.param(10, marks=pytest.mark.more))

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
