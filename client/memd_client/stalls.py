"""What a wait is counted under: the phase of a step that the thread is in, and a group of modules.

Both are asked for only where somebody waits.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any

import torch

from memd_native import PHASE_BACKWARD, PHASE_FORWARD, PHASE_OTHER, PHASE_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

_graph_task = torch._C._current_graph_task_id


class _Here(local):
    """What this thread is doing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []  # of modules, the innermost last: see streaming.py
        self.step_depth = 0


here = _Here()


@contextmanager
def closing_step() -> Iterator[None]:
    """Waits inside are those of a step."""
    here.step_depth += 1
    try:
        yield
    finally:
        here.step_depth -= 1


def current_phase() -> int:
    """Of this thread. What is computed again during backward is backward's."""
    if here.step_depth:
        return PHASE_STEP
    if _graph_task() != -1:
        return PHASE_BACKWARD
    return PHASE_FORWARD if here.calls else PHASE_OTHER


def module_group(name: str) -> str:
    """Of the parameter `name`, so that the layers of a model count together: the path of its module
    up to the part after the first number, with numbers as stars: "h.*.attn" of
    "h.0.attn.c_attn.weight". Two parts where there is no number.
    """
    *path, own = name.split(".")
    if not path:
        return own
    parts = ["*" if part.isdecimal() else part for part in path]
    end = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:end])
