"""The fewest bytes that anybody could move for uses of items that repeat for ever, by linear
programming.

The bound is a fractional interval LP: between two uses of an item a part of it stays in memory, and
what does not stay is read again (and written first, where only memory has it). At no use may more
stay than memory holds beside what is in use. Whoever may keep parts of items, and knows everything,
moves no less. The same for whole items is an integer program.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from memd_native import USE_ADD, USE_CHANGE, USE_LAST, USE_OVERWRITE

if TYPE_CHECKING:
    from collections.abc import Sequence

CHANGES = (USE_CHANGE, USE_ADD, USE_OVERWRITE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One period, and what the job holds, in MiB."""

    uses: list[tuple[int, int]]
    item_mib: Sequence[float]
    state_mib: int  # parameters and moments
    gradient_mib: int


def fewest_mib(
    trace: Trace, *, cache_mib: float, writes_changes: bool, whole: bool = False
) -> float:
    """The bound for one period of a trace that repeats for ever. `whole`: nobody keeps a part of an
    item, and the bound is within a thousandth."""
    period = len(trace.uses)
    uses_of: dict[int, list[int]] = defaultdict(list)
    for time, (item, _) in enumerate(trace.uses):
        uses_of[item].append(time)

    # One variable for each interval between two uses of an item: the part that is let go.
    intervals: list[tuple[int, int, int]] = []  # item, begin, length
    chains: list[tuple[int, list[int]]] = []  # intervals in which only memory has the bytes
    written_mib = 0.0
    for item, times in uses_of.items():
        kinds = [trace.uses[time][1] for time in times]
        count = len(times)
        numbers: list[int | None] = []
        for index, time in enumerate(times):
            needed = kinds[index] != USE_LAST and kinds[(index + 1) % count] != USE_OVERWRITE
            length = (times[(index + 1) % count] - time) % period or period
            numbers.append(len(intervals) if needed else None)
            if needed:
                intervals.append((item, time, length))
        for index, kind in enumerate(kinds):
            if kind == USE_CHANGE and writes_changes:
                written_mib += trace.item_mib[item]
            elif kind in CHANGES:
                chain: list[int] = []
                at = index
                while (number := numbers[at]) is not None:
                    chain.append(number)
                    at = (at + 1) % count
                    if at == index or kinds[at] in CHANGES:
                        break
                chains.append((item, chain))

    # And one for each chain: the part that is written, which is at least what is let go in it.
    cost = [trace.item_mib[item] for item, _, _ in intervals]
    cost += [trace.item_mib[item] for item, _ in chains]
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def limit(terms: list[tuple[int, float]], most: float) -> None:
        rows.extend([len(limits)] * len(terms))
        columns.extend(column for column, _ in terms)
        values.extend(value for _, value in terms)
        limits.append(most)

    stays: list[list[int]] = [[] for _ in range(period)]
    for number, (_, begin, length) in enumerate(intervals):
        for distance in range(1, length):
            stays[(begin + distance) % period].append(number)
    for time, (used, _) in enumerate(trace.uses):
        all_mib = trace.item_mib[used] + sum(
            trace.item_mib[intervals[number][0]] for number in stays[time]
        )
        let_go: list[tuple[int, float]] = [
            (number, -trace.item_mib[intervals[number][0]]) for number in stays[time]
        ]
        if all_mib > cache_mib:
            limit(let_go, cache_mib - all_mib)
    for chain_number, (_, chain) in enumerate(chains):
        for number in chain:
            limit([(number, 1), (len(intervals) + chain_number, -1)], 0)
    if not limits:
        return written_mib
    matrix = coo_matrix((values, (rows, columns)), shape=(len(limits), len(cost)))
    found = linprog(
        cost,
        A_ub=matrix.tocsr(),
        b_ub=limits,
        bounds=(0, 1),
        method="highs",
        integrality=int(whole),
        options={"mip_rel_gap": 1e-3} if whole else {},
    )
    assert found.status == 0, found.message
    return written_mib + float(found.fun)
