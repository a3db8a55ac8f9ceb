"""The copy of one gradient that leaves a device before `step()`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    # A tensor, and its version.
    Seen = tuple[weakref.ref[torch.Tensor], int]


class EarlyGradient:
    """One parameter's `p.grad`, as memd has it before `step()` asks for it. A copy begins in the
    backward that was the last one before the step before: an earlier one would be made in vain, and
    so would each where the program changes gradients behind backward, as clipping does.
    """

    def __init__(self) -> None:
        self._count = 0  # backwards since the last step
        self._expected_count: int | None = None  # the last step's; 0: it had changed since
        self._came: Seen | None = None  # as backward left it
        self._left: Seen | None = None  # as memd has it, or will

    @property
    def has_come(self) -> bool:
        """There was a backward since the last step."""
        return self._count > 0

    @property
    def has_left(self) -> bool:
        return self._left is not None

    def came(self, gradient: torch.Tensor) -> bool:
        """A backward has made `gradient`, or added to it. Returns whether it is to leave now."""
        self._count += 1
        self._came = _seen(gradient)
        return self._expected_count is None or self._count == self._expected_count

    def note_left(self, gradient: torch.Tensor) -> None:
        """It is on its way."""
        self._left = _seen(gradient)

    def is_left(self, gradient: torch.Tensor) -> bool:
        """Whether memd has `gradient` as it is now, or will."""
        return _is_same(gradient, self._left)

    def end_step(self, gradient: torch.Tensor) -> None:
        """A step has taken `gradient`."""
        self._expected_count = self._count if _is_same(gradient, self._came) else 0
        self.forget()

    def forget(self) -> None:
        """The next gradient is another one."""
        self._count, self._came, self._left = 0, None, None


def _seen(gradient: torch.Tensor) -> Seen:
    return weakref.ref(gradient), gradient._version


def _is_same(gradient: torch.Tensor, seen: Seen | None) -> bool:
    return seen is not None and seen[0]() is gradient and seen[1] == gradient._version
