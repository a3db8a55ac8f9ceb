"""Gradients that stay on a device after they have left it for their slots: the next backward of the
same step adds to them there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.device.space import aligned

if TYPE_CHECKING:
    from memd_client.connection.shard import Shard


@dataclass(frozen=True, slots=True)
class _Kept:
    """One of them."""

    gradient: torch.Tensor
    stream: torch.Stream  # on which it was computed

    @property
    def size_bytes(self) -> int:
        return aligned(self.gradient.nbytes)


class KeptGradients:
    """Those of the parameters that are used on one device, in memory that `DeviceBudget` lends.
    Each has the value that is in its slot or on its way there, so dropping one is always right. Any
    thread may call.

    The last step tells how many gradients of a parameter come: the last one is not kept.
    """

    def __init__(self) -> None:
        # Reentrant: garbage that is collected under it may use parameters.
        self._lock = RLock()
        self._kept: dict[int, _Kept] = {}  # by shard id
        self._counts = Counter[int]()  # of the gradients that have come in this step, by shard id
        self._last_counts: dict[int, int] = {}  # in the last step that had any
        self._lent_bytes = 0
        self._used_bytes = 0
        self._most_bytes = 0

    @property
    def most_bytes(self) -> int:
        """The most that they have had at once since nothing was lent."""
        return self._most_bytes

    def lend(self, size_bytes: int) -> None:
        """They may have so much from now on. If they have more, all are dropped."""
        with self._lock:
            self._lent_bytes = size_bytes
            if self._used_bytes > size_bytes:
                self._drop_all()
            if not size_bytes:
                self._most_bytes = 0

    def note_gradient(self, shard: Shard) -> bool:
        """One more has come. Returns whether the last step had more."""
        with self._lock:
            self._counts[shard.shard_id] += 1
            return self._counts[shard.shard_id] < self._last_counts.get(shard.shard_id, 0)

    def keep(self, shard: Shard, gradient: torch.Tensor) -> None:
        """If there is room. The current stream has computed it, nobody changes it, and the one of
        before was dropped."""
        kept = _Kept(gradient, torch.accelerator.current_stream(gradient.device))
        with self._lock:
            if self._used_bytes + kept.size_bytes <= self._lent_bytes:
                self._kept[shard.shard_id] = kept
                self._used_bytes += kept.size_bytes
                self._most_bytes = max(self._most_bytes, self._used_bytes)

    def take(self, shard: Shard) -> torch.Tensor | None:
        """The gradient, which is kept no longer; None if it is not there for the current stream."""
        kept = self._pop(shard)
        if kept is None:
            return None
        # Another stream would have to wait, and its use to be recorded.
        here = torch.accelerator.current_stream(kept.gradient.device)
        return kept.gradient if kept.stream == here else None

    def drop(self, shard: Shard) -> None:
        """It has changed in its slot, or will."""
        self._pop(shard)

    def _pop(self, shard: Shard) -> _Kept | None:
        with self._lock:
            kept = self._kept.pop(shard.shard_id, None)
            if kept is not None:
                self._used_bytes -= kept.size_bytes
            return kept

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        with self._lock:
            self._drop_all()
            self._last_counts.update(self._counts)
            self._counts.clear()

    def _drop_all(self) -> None:
        self._kept.clear()
        self._used_bytes = 0
