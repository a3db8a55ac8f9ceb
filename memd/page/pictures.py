"""Bars and lines as SVG. Texts are escaped here, and numbers are the callers' own."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
FREE = "#e4e4e7"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    name: str
    value: float
    shown: str
    color: str


def colored(parts: Sequence[tuple[str, float, str]]) -> list[Part]:
    """Name, value and text of each, in the colours' order."""
    return [
        Part(name=name, value=value, shown=shown, color=COLORS[index % len(COLORS)])
        for index, (name, value, shown) in enumerate(parts)
    ]


def bar(parts: Sequence[Part], *, whole: float, label: str, width: int = 600) -> str:
    """Parts side by side, `whole` as long as the bar. Each tells its name and text to a pointer."""
    whole = max(whole, sum(part.value for part in parts))
    pieces = []
    x = 0.0
    for part in parts:
        length = width * part.value / whole if whole > 0 else 0.0
        title = escape(f"{part.name}: {part.shown}")
        pieces.append(
            f'<rect x="{x:.1f}" width="{length:.1f}" height="18" fill="{part.color}">'
            f"<title>{title}</title></rect>"
        )
        x += length
    return (
        f'<svg class="bar" viewBox="0 0 {width} 18" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><rect width="{width}" height="18" fill="{FREE}"/>'
        f"{''.join(pieces)}</svg>"
    )


def legend(parts: Sequence[Part]) -> str:
    return (
        '<p class="legend">'
        + " ".join(
            f'<span><i style="background:{part.color}"></i>{escape(part.name)} '
            f"{escape(part.shown)}</span>"
            for part in parts
        )
        + "</p>"
    )


def line(points: Sequence[tuple[float, float]], *, label: str, shown: str, color: str) -> str:
    """A line over the time of its points, from 0 up to their largest, and the last value in words.
    Draws no line through fewer than two points."""
    width, height = 240, 36
    drawn = ""
    if len(points) > 1:
        first, last = points[0][0], points[-1][0]
        top = max(value for _, value in points) or 1.0
        places = " ".join(
            f"{width * (at - first) / (last - first):.1f},"
            f"{height - 2 - (height - 4) * value / top:.1f}"
            for at, value in points
        )
        drawn = (
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5" '
            'vector-effect="non-scaling-stroke"/>'
        )
    return (
        f'<figure><svg class="line" viewBox="0 0 {width} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}">{drawn}</svg>'
        f"<figcaption>{escape(label)} {escape(shown)}</figcaption></figure>"
    )
