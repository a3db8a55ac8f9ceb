"""Models, precisions, budgets and loops that meet: training has the bits of training without
memd. `python -m tests.soak.device_cells` has all of them, and more seeds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from memd_client.parameters import saved_activations
from tests.device.cells import AXES, MODELS, SMALL_ACTIVATION_BYTES, Cell, cover, every_cell
from tests.device.models import are_equal
from tests.device.offloaded import STEPS, batch, reference
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.trained import trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

SEEDS = 10


@pytest.mark.more
@pytest.mark.parametrize("cell", cover(), ids=str)
def test_training_has_the_bits_of_training_without_memd(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    monkeypatch.setattr(saved_activations, "SMALL_BYTES", SMALL_ACTIVATION_BYTES)
    expected = reference(cell.model, cell.loop, "sim")
    for seed in range(SEEDS):
        SIM.seed(seed)
        assert are_equal(trained(daemon, monkeypatch, cell.model, cell.budget, cell.loop), expected)


def test_the_cover_has_every_pair_of_choices() -> None:
    assert len(every_cell()) == 6 * 3 * 3 * 6
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(one, other):
            assert any(pair in cell.pairs for cell in cover()), pair
    assert len(cover()) <= 45


@pytest.mark.parametrize("model", MODELS)
def test_some_steps_in_mixed_precision_are_skipped_and_some_are_made(model: str) -> None:
    """Otherwise the tests above would compare less than they say."""
    loop = Cell(model, "mixed", "all", "plain").loop
    found = reference(model, loop, "sim")
    scales = [loop.scale, *map(float, found[1 : 2 * STEPS : 2])]
    falls = [later < earlier for earlier, later in itertools.pairwise(scales)]
    assert any(falls)
    assert not all(falls)


def test_an_expert_rests_in_some_step() -> None:
    model = build("experts")
    rests = set[int]()
    for number in range(STEPS):
        model.zero_grad()
        model(batch(number)).backward()
        rests.add(sum(each.grad is None for each in model.parameters()))
    assert len(rests) > 1
