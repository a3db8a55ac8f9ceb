"""A measured figure, the limit that it stands against, and how they are shown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Rates in `unit` of runs that alternated with those of the limit; the more the better."""

    name: str
    unit: str
    runs: Sequence[float]
    limit_name: str
    limit_runs: Sequence[float] = ()
    # Why there is no limit, where there is none.
    no_limit: str = ""

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
        return statistics.median(
            run / limit for run, limit in zip(self.runs, self.limit_runs, strict=True)
        )

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "limit_name": self.limit_name,
            "limit": self.limit,
            "fraction": self.fraction,
            "no_limit": self.no_limit,
            "runs": list(self.runs),
            "limit_runs": list(self.limit_runs),
        }


HEADER = ("figure", "median", "lowest to highest", "limit", "reached")


def row(figure: Figure) -> tuple[str, ...]:
    spread = f"{min(figure.runs):.2f} to {max(figure.runs):.2f}"
    if figure.limit is None or figure.fraction is None:
        reached = f"no limit: {figure.no_limit}"
        limit = "-"
    else:
        reached = f"{figure.fraction:.3f}"
        limit = f"{figure.limit:.2f} ({figure.limit_name})"
    return (figure.name, f"{figure.value:.2f} {figure.unit}", spread, limit, reached)
