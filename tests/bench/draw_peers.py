"""README's figure: the step time and memory of memd beside DeepSpeed's and plain PyTorch's.

Drawn as SVG from the committed result of `make peers`, of 60M parameters in fp32.

Run: python tests/bench/draw_peers.py, after a new result was committed
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tests" / "bench" / "results" / "peers_60m_fp32.json"
PICTURE = ROOT / "docs" / "pictures" / "peers.svg"
# The contender's name in the result, how a reader calls it, and its colour on light and dark pages.
CONTENDERS = (
    ("deepspeed-nvme", "DeepSpeed, NVMe", "#b0632b"),
    ("plain", "plain PyTorch", "#7d8590"),
    ("memd-quarter-in-backward", "memd, 1/4 in memory", "#2f81f7"),
)
WIDTH, ROW, LABELS = 760, 34, 170
PANEL = (WIDTH - LABELS) // 2
BAR_MAX = PANEL - 90


@dataclass(frozen=True)
class Panel:
    """One quantity of all contenders, as bars."""

    title: str
    figure: str
    scale: float
    unit: str


PANELS = (
    Panel("a step", "step", 1.0, "s"),
    Panel("memory, all processes", "memory, steady", 1e-9, "GB"),
)


def read_figures(path: Path = RESULT) -> dict[str, float]:
    """Values by name, in the units of the result: seconds and bytes."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {figure["name"]: float(figure["value"]) for figure in report["figures"]}


def text(x: float, y: float, words: str, **attributes: str) -> str:
    listed = "".join(f' {name.replace("_", "-")}="{of}"' for name, of in attributes.items())
    return f'  <text x="{x:g}" y="{y:g}"{listed}>{words}</text>'


def draw_panel(panel: Panel, left: int, figures: dict[str, float]) -> Iterator[str]:
    values = [figures[f"{name}: {panel.figure}"] * panel.scale for name, _, _ in CONTENDERS]
    yield text(left, 22, f"{panel.title} ({panel.unit})", font_weight="bold")
    for row, ((_, _, colour), value) in enumerate(zip(CONTENDERS, values, strict=True)):
        top = 36 + row * ROW
        length = BAR_MAX * value / max(values)
        yield (
            f'  <rect x="{left}" y="{top}" width="{length:.1f}" height="{ROW - 10}" rx="3"'
            f' fill="{colour}"/>'
        )
        yield text(round(left + length + 8, 1), top + 17, f"{value:.2f}")


def draw(figures: dict[str, float], panels: Sequence[Panel] = PANELS) -> str:
    """The picture's text."""
    height = 36 + ROW * len(CONTENDERS) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14" fill="#7d8590">'
    ]
    for row, (_, label, _) in enumerate(CONTENDERS):
        lines.append(text(LABELS - 14, 36 + row * ROW + 17, label, text_anchor="end"))
    for number, panel in enumerate(panels):
        lines += draw_panel(panel, LABELS + number * PANEL, figures)
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    PICTURE.write_text(draw(read_figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
