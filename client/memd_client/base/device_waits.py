"""Waits of a trainer's threads for a device, which the same program without memd does not have.
memd's own threads, which wait in their stead, are not counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

# Another size of the memory of parameters; a value that the program writes; a view that it has
# kept, or parameters that stay on the device, and their gradients, which it may have written; a
# gradient that it reads or drops; room on the host for what leaves.
WaitedFor = Literal["resize", "write", "comparison", "gradient", "room"]

_lock = threading.Lock()
_counts = Counter[str]()


def note_device_wait(waited_for: WaitedFor) -> None:
    """The caller is about to wait."""
    with _lock:
        _counts[waited_for] += 1


def device_waits() -> dict[str, int]:
    """How often, in this process, by what for."""
    with _lock:
        return dict(_counts)
