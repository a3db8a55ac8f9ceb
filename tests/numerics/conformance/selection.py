"""The cells of the matrix, and those of them that CI runs."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from tests.numerics.conformance.cells import POOLS, Cell
from tests.numerics.conformance.cover import pairwise_cover
from tests.numerics.conformance.program import COMPILERS, Program, programs

if TYPE_CHECKING:
    from collections.abc import Iterable

# docs/conformance.md has cells of these that are not right or were not run.
LEFT_OUT: tuple[str, ...] = ()


def cells() -> list[Cell]:
    """All there are."""
    return [Cell(program, pool) for program in programs() for pool in POOLS]


def row(cell: Cell) -> tuple[str, ...]:
    """Its value in each column."""
    return (*astuple(cell.program), cell.pool)


def cover() -> list[Cell]:
    """Every pair of values is in one of them."""
    return [Cell(Program(*values), pool) for *values, pool in pairwise_cover([*map(row, cells())])]


def ci_cells() -> list[Cell]:
    """The cover, which has compiled programs too, and everything else that is fp32 with a short
    pool."""
    short = [
        cell
        for cell in cells()
        if (cell.program.precision, cell.pool) == ("fp32", "1/4")
        and cell.program.variant not in COMPILERS
    ]
    return [
        cell
        for cell in _without_repetition(cover() + short)
        if cell.program.variant not in LEFT_OUT
    ]


def cover_first() -> list[Cell]:
    """All cells, so that the first of them see the most."""
    return _without_repetition(cover() + cells())


def _without_repetition(chosen: Iterable[Cell]) -> list[Cell]:
    return list(dict.fromkeys(chosen))
