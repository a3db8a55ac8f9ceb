"""Training under autocast and with a GradScaler on a device, with a real daemon."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import MIXED_LOOPS, STEPS, Loop, reference
from tests.device.offloaded_models import MODELS
from tests.device.simulation import SIM
from tests.device.trained import BUDGETS, connected, trained

if TYPE_CHECKING:
    from tests.daemons import Daemon

# The cover has mixed precision in `make test`.
SEEDS = (
    pytest.param(1, marks=pytest.mark.more),
    pytest.param(10, marks=pytest.mark.soak),
)

# Every pair of a model and a loop.
CELLS = [
    (model, list(BUDGETS)[(row + column) % len(BUDGETS)], loop)
    for row, model in enumerate(MODELS)
    for column, loop in enumerate(MIXED_LOOPS)
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


@pytest.mark.parametrize("loop", MIXED_LOOPS[1:4], ids=str)
def test_some_steps_are_skipped_and_some_are_made(loop: Loop) -> None:
    """Otherwise the tests above would compare less than they say."""
    found = reference("mlp", loop, "sim")
    losses = loop.backwards * STEPS
    shown = found[loop.backwards : losses + STEPS : loop.backwards + 1]
    scales = [loop.scale, *map(float, shown)]
    rises = [later > earlier for earlier, later in itertools.pairwise(scales)]
    falls = [later < earlier for earlier, later in itertools.pairwise(scales)]
    assert any(rises)
    assert any(falls)


def test_casts_leave_the_device_with_their_module(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, depth = 64, 8
    cast_bytes = 2 * width * width
    with connected(daemon, monkeypatch) as session:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        memd_client.offload(model, session, device="sim")
        inputs = torch.randn(1, width).to("sim")
        with torch.autocast("sim", torch.bfloat16):
            before = torch.accelerator.memory_allocated()
            loss = model(inputs).sum()
            kept_bytes = torch.accelerator.memory_allocated() - before
        assert kept_bytes < 2 * cast_bytes < depth * cast_bytes
        loss.backward()
