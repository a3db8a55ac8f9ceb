"""The JSON of a measuring program: the one shape that compare_results.py reads.

{"name", "machine", "settings", "figures", "details"}: figures are those of `memd bench --json`,
each with all its runs; details are the program's own. `memd bench` writes the same without a name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memd.bench.figures import HEADER, Figure, row
from memd.printing import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def seconds(name: str, runs: Sequence[float]) -> Figure:
    return Figure(name=name, unit="s", runs=list(runs), less_is_better=True)


def byte_count(name: str, runs: Sequence[float]) -> Figure:
    return Figure(name=name, unit="bytes", runs=list(runs), less_is_better=True)


def ratio(
    name: str,
    dividends: Sequence[float],
    divisors: Sequence[float],
    *,
    less_is_better: bool = False,
) -> Figure:
    """Of neighbours, so that a minute in which the machine was slow is slow for both."""
    pairs = zip(dividends, divisors, strict=True)
    return Figure(
        name=name,
        unit="x",
        runs=[dividend / divisor for dividend, divisor in pairs],
        less_is_better=less_is_better,
    )


def write_report(
    path: Path | None,
    *,
    name: str,
    machine: dict[str, Any],
    settings: dict[str, Any],
    figures: Sequence[Figure],
    details: dict[str, Any] | None = None,
) -> None:
    """Shows the figures, and writes all of it to `path` where there is one. `machine` is described
    before the first run: its load is then that of others."""
    print_table(HEADER, [row(figure) for figure in figures])
    if path is None:
        return
    report = {
        "name": name,
        "machine": machine,
        "settings": settings,
        "figures": [figure.record() for figure in figures],
        "details": details or {},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
