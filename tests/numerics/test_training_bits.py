"""However parameters and states are moved, losses have the bits of plain PyTorch; the long run of
the same is tests/bench/bench_bits.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memd.demo.folder import volume_folder
from tests.daemons import BUILD
from training_bits import SHAPE, WAYS, Trained, first_difference, train_plain, train_with_memd

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 30
STATE_BYTES = 12 * SHAPE.parameter_count


@pytest.fixture(scope="module")
def plain() -> Trained:
    return train_plain(STEPS)


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_plain_training(name: str, plain: Trained) -> None:
    way = WAYS[name]
    with volume_folder(BUILD, bytes_needed=512 << 20) as folder:
        trained = train_with_memd(way, STEPS, folder)
    assert first_difference(trained.losses, plain.losses) is None
    assert min(plain.losses) < plain.losses[0]
    if way.cache_fraction < 1:
        # At the least half of the state comes from disk in each step: they are streamed.
        assert trained.read_bytes > STEPS * STATE_BYTES / 2
    else:
        assert trained.read_bytes < STATE_BYTES


@pytest.mark.parametrize(
    ("losses", "step"),
    [([1.0, 2.0], None), ([1.0, 2.0000000000000004], 1), ([1.0], 1), ([-0.0, 2.0], 0)],
)
def test_a_difference_of_one_bit_is_found(losses: Sequence[float], step: int | None) -> None:
    assert first_difference(losses, [1.0 if losses[0] else 0.0, 2.0]) == step
