"""Memory of the program that memd keeps a tensor over, and whether the program does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from memd_client.base.storage_uses import USES_OF_ONE, storage_uses

if TYPE_CHECKING:
    import torch

# How many aliases there are over each storage, by the address of torch's object. A storage that has
# one lives, so no other is at its address. A tensor may die anywhere, also under the lock.
_counts: Counter[int] = Counter()
_lock = threading.RLock()


class Alias:
    """A tensor over the memory of the program's. They have one version, so that a change of either
    is a change of both."""

    __slots__ = ("_storage", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._storage = tensor.untyped_storage()._cdata
        with _lock:
            _counts[self._storage] += 1

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    def is_alone(self, *, but: int = 0) -> bool:
        """No more than `but` tensors of the program's have the memory."""
        others = _counts[self._storage] - 1 + but
        return storage_uses(self._tensor) <= USES_OF_ONE + others

    def __del__(self) -> None:
        with _lock:
            _counts[self._storage] -= 1
            if not _counts[self._storage]:
                del _counts[self._storage]
