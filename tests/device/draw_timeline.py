"""The guide's picture of a step on a device by the simulated clock: kernels, copies in and out.

Run: python -m tests.device.draw_timeline
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.daemons import running_daemon
from tests.device.offloaded import budget_bytes
from tests.device.timed_training import INPUTS, ROWS, Blocks, TimedTraining
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.daemons import Daemon
    from tests.device.timed_training import TimedSteps
    from tests.device.timeline import Entry

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "device-step.svg"
BLOCKS = 8
# An engine, how a reader calls it, and its colour on light and dark pages.
ROWS_SHOWN = (
    ("compute", "kernels", "#7d8590"),
    ("copy_in", "values come", "#2f81f7"),
    ("copy_out", "gradients leave", "#b0632b"),
)
WIDTH, LABELS, TOP, ROW, BAR = 760, 130, 34, 34, 24
TICK_US = 100


def one_step(daemon: Daemon, patch: pytest.MonkeyPatch) -> TimedSteps:
    with connected(daemon, patch) as session:
        model = Blocks(BLOCKS)
        device_bytes = budget_bytes(model, 0.5)
        memd_client.offload(model, session, device="sim", device_bytes=device_bytes)
        return TimedTraining(model, session, torch.randn(ROWS, INPUTS)).time(steps=1)


def text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def bars(entries: Sequence[Entry], begin_ns: int, scale: float, top: int) -> str:
    """A path with one bar each."""
    parts = []
    for entry in entries:
        left = round(LABELS + (entry.begin_ns - begin_ns) * scale, 1)
        width = round(max(entry.duration_ns * scale - 0.3, 0.2), 1)
        parts.append(f"M{left:g} {top}h{width:g}v{BAR}h{-width:g}z")
    return "".join(parts)


def draw(step: TimedSteps) -> str:
    """The picture's text."""
    return "\n".join([*_lines(step), "</svg>", ""])


def _lines(step: TimedSteps) -> Iterator[str]:
    entries = step.timeline.entries(*(engine for engine, *_ in ROWS_SHOWN))
    begin_ns = min(entry.begin_ns for entry in entries)
    span_ns = max(entry.end_ns for entry in entries) - begin_ns
    scale = (WIDTH - LABELS - 10) / span_ns
    bottom = TOP + len(ROWS_SHOWN) * ROW
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 24}"'
        f' viewBox="0 0 {WIDTH} {bottom + 24}" font-family="sans-serif" font-size="14"'
        ' fill="#7d8590">'
    )
    # Backward begins behind the loss.
    turn_ns = max(entry.end_ns for entry in entries if entry.name == "aten::mean") - begin_ns
    turn = round(LABELS + turn_ns * scale, 1)
    yield text((LABELS + turn) / 2, 20, "forward")
    yield text((turn + WIDTH - 10) / 2, 20, "backward")
    yield f'  <path d="M{turn:g} 8V{bottom}" stroke="#7d8590" stroke-dasharray="4 3"/>'
    for number, (engine, label, colour) in enumerate(ROWS_SHOWN):
        top = TOP + number * ROW
        yield text(LABELS - 14, top + 17, label, anchor="end")
        shown = bars(step.timeline.entries(engine), begin_ns, scale, top)
        yield f'  <path d="{shown}" fill="{colour}"/>'
    for tick_us in range(0, span_ns // 1000, TICK_US):
        x = round(LABELS + tick_us * 1000 * scale, 1)
        yield text(x, bottom + 14, f"{tick_us} µs" if tick_us else "0")


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    with running_daemon() as daemon, pytest.MonkeyPatch.context() as patch:
        PICTURE.write_text(draw(one_step(daemon, patch)), encoding="utf-8")


if __name__ == "__main__":
    main()
