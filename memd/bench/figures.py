"""A measured figure, the limit that it stands against, and how they are shown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memd.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Runs, measured in `unit`, and those of the limit, which alternated with them."""

    name: str
    unit: str
    runs: Sequence[float]
    limit_name: str = ""
    limit_runs: Sequence[float] = ()
    # Why there is no limit, where there is none.
    no_limit: str = ""
    # True of times and sizes: the limit is then the least there can be.
    less_is_better: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.runs)

    @property
    def limit(self) -> float | None:
        return statistics.median(self.limit_runs) if self.limit_runs else None

    @property
    def fraction(self) -> float | None:
        """Median of the ratios of neighbours: a disk that is slow for a minute is slow for both."""
        if not self.limit_runs:
            return None
        pairs = zip(self.runs, self.limit_runs, strict=True)
        return statistics.median(
            limit / run if self.less_is_better else run / limit for run, limit in pairs
        )

    @property
    def deviation(self) -> float:
        """The median of the runs' distances from their median."""
        return statistics.median(abs(run - self.value) for run in self.runs)

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "less_is_better": self.less_is_better,
            "value": self.value,
            "minimum": min(self.runs),
            "maximum": max(self.runs),
            "deviation": self.deviation,
            "limit_name": self.limit_name,
            "limit": self.limit,
            "fraction": self.fraction,
            "no_limit": self.no_limit,
            "runs": list(self.runs),
            "limit_runs": list(self.limit_runs),
        }


HEADER = ("figure", "median", "lowest to highest", "limit", "reached")


def shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_size(round(value))
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def row(figure: Figure) -> tuple[str, ...]:
    unit = figure.unit
    value = shown(figure.value, unit) + ("" if unit == "bytes" else f" {unit}")
    spread = f"{shown(min(figure.runs), unit)} to {shown(max(figure.runs), unit)}"
    if figure.limit is None or figure.fraction is None:
        reached = f"no limit: {figure.no_limit}" if figure.no_limit else "-"
        limit = "-"
    else:
        reached = f"{figure.fraction:.3f}"
        limit = f"{shown(figure.limit, unit)} ({figure.limit_name})"
    return (figure.name, value, spread, limit, reached)
