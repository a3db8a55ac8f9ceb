"""Fewer rows of a table that still hold every pair of its values."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = tuple[str, ...]
    Pair = tuple[tuple[int, str], tuple[int, str]]  # a column and its value, twice


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(enumerate(row), 2))


def pairwise_cover(rows: Sequence[Row]) -> list[Row]:
    """Greedy: the row with the most pairs that no chosen one has, the first of equals."""
    missing = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen
