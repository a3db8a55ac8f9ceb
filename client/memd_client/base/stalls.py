"""The labels under which waits are counted: the thread's phase of a step, and a group of modules.

Both are looked up only when a thread waits.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING

import torch

from memd_native import PHASE_BACKWARD, PHASE_FORWARD, PHASE_OTHER, PHASE_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

_graph_task = torch._C._current_graph_task_id


class _Thread(local):
    """The phase that one thread is in."""

    def __init__(self) -> None:
        self._step_depth = 0
        self._is_in_module_call = False

    @contextmanager
    def closing_step(self) -> Iterator[None]:
        self._step_depth += 1
        try:
            yield
        finally:
            self._step_depth -= 1

    def note_module_calls(self, is_in_one: bool) -> None:
        self._is_in_module_call = is_in_one

    def phase(self) -> int:
        if self._step_depth:
            return PHASE_STEP
        if _graph_task() != -1:
            return PHASE_BACKWARD
        return PHASE_FORWARD if self._is_in_module_call else PHASE_OTHER


_thread = _Thread()
# Waits inside count for the phase "step".
closing_step = _thread.closing_step
# Inside module calls waits count for the phase "forward", unless backward computes them again.
note_module_calls = _thread.note_module_calls
current_phase = _thread.phase


def module_group(name: str) -> str:
    """The group that the waits for parameter `name` are counted under. All layers of a model share
    one: the module's path up to the part after the first number, with numbers as stars, so that
    "h.0.attn.c_attn.weight" is in "h.*.attn". Without a number the group has two parts.
    """
    *path, own = name.split(".")
    if not path:
        return own
    parts = ["*" if part.isdecimal() else part for part in path]
    end = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:end])
