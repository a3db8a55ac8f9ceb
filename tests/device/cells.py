"""Every way in which the tests train on a device: a model, a precision, a budget and a loop.

There are too many for each of them to be trained each time. A *cover* has every pair of choices.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from tests.device.offloaded import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = ("mlp", "gpt", "encoder-decoder", "experts", "norms", "lora")
PRECISIONS = {
    "fp32": Loop("fp32"),
    "bf16": Loop("bf16", dtype=torch.bfloat16),
    "mixed": Loop("mixed", autocast=torch.float16, scale=1.0),
}
# Those of "mixed": the first gradients in float16 are infinite and update nothing, later ones do.
SCALES = dict.fromkeys(MODELS, 2.0**23) | {"norms": 2.0**20}
# Shares of the parameters, see `trained.BUDGETS`.
CELL_BUDGETS = ("all", "half", "least")
PLAIN = Loop("plain")
LOOPS = {
    "plain": PLAIN,
    "accumulated": replace(PLAIN, backwards=2),
    "clipped": replace(PLAIN, max_norm=0.001),
    "checkpoints": replace(PLAIN, has_checkpoints=True),
    "activations": replace(PLAIN, activations="host"),
    "generates": replace(PLAIN, generates=True),
}
AXES = (MODELS, tuple(PRECISIONS), CELL_BUDGETS, tuple(LOOPS))
SMALL_ACTIVATION_BYTES = 256  # as these models are small


@dataclass(frozen=True, slots=True)
class Cell:
    model: str
    precision: str
    budget: str
    way: str

    def __str__(self) -> str:
        return "-".join(self._choices)

    @property
    def _choices(self) -> tuple[str, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """All pairs of its choices. No two axes have a choice of one name."""
        return set(itertools.combinations(self._choices, 2))

    @property
    def loop(self) -> Loop:
        precision, loop = PRECISIONS[self.precision], LOOPS[self.way]
        activations = loop.activations
        if activations is not None and zlib.crc32(str(self).encode()) % 2:
            activations = "nvme"
        return replace(
            loop,
            name=str(self),
            autocast=precision.autocast,
            scale=SCALES[self.model] if precision.scale else 0.0,
            dtype=precision.dtype,
            activations=activations,
        )


def every_cell() -> tuple[Cell, ...]:
    return tuple(itertools.starmap(Cell, itertools.product(*AXES)))


@cache
def cover() -> tuple[Cell, ...]:
    """Few cells with every pair of choices."""
    return tuple(_cover(every_cell()))


def _cover(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    missing = set[tuple[str, str]]().union(*(cell.pairs for cell in cells))
    uses = Counter[tuple[str, str]]()
    while missing:
        # Among the best, the first whose pairs were used least: the cover is the same each time.
        best = max(
            cells, key=lambda cell: (len(cell.pairs & missing), -sum(uses[p] for p in cell.pairs))
        )
        missing -= best.pairs
        uses.update(best.pairs)
        yield best
