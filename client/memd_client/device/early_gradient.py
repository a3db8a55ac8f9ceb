"""The copy of one gradient that leaves a device before `step()`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    # A tensor, and its version.
    Seen = tuple[weakref.ref[torch.Tensor], int]


class EarlyGradient:
    """One parameter's `p.grad`, as memd has it before `step()` asks for it. If the last step had N
    backwards, the copy begins in the N-th: an earlier one is wasted, as is any if the program then
    changes the gradient, as clipping does.

    Identity and version tell most changes. `p.grad.data` leaves neither: `step()` compares bytes.
    """

    def __init__(self) -> None:
        self._count = 0  # backwards since the last step
        self._expected_count: int | None = None  # the last step's; 0: it had changed since
        self._came: Seen | None = None  # as backward left it
        self._left: Seen | None = None  # as memd has it, or will
        self._left_checksum: torch.Tensor | None = None
        self._left_loss_count = 0  # of the copies then

    def has_come(self, gradient: torch.Tensor) -> bool:
        """A backward since the last step has left this tensor, to which another one adds."""
        return self._came is not None and self._came[0]() is gradient

    @property
    def has_left(self) -> bool:
        return self._left is not None

    def came(self, gradient: torch.Tensor) -> bool:
        """A backward has made `gradient`, or added to it. Returns whether it is to leave now."""
        if not self.has_come(gradient):
            self._count = 0  # the program has dropped what came before
        self._count += 1
        self._came = _seen(gradient)
        return self._expected_count is None or self._count == self._expected_count

    def note_left(self, gradient: torch.Tensor, checksum: torch.Tensor, loss_count: int) -> None:
        """It is on its way, and copies have lost gradients so often."""
        self._left = _seen(gradient)
        self._left_checksum, self._left_loss_count = checksum, loss_count

    def left_checksum(self, gradient: torch.Tensor, loss_count: int) -> torch.Tensor | None:
        """That of the bytes that memd has, or will have, of `gradient`; None if it has to leave
        again."""
        is_there = _is_same(gradient, self._left) and self._left_loss_count == loss_count
        return self._left_checksum if is_there else None

    def end_step(self, gradient: torch.Tensor, *, has_changed: bool) -> None:
        """A step has taken `gradient`. `has_changed`: bytes that had left were not these."""
        is_as_it_came = _is_same(gradient, self._came) and not has_changed
        self._expected_count = self._count if is_as_it_came else 0
        self.forget()

    def forget(self) -> None:
        """The next gradient is another one."""
        self._count, self._came, self._left, self._left_checksum = 0, None, None, None


def _seen(gradient: torch.Tensor) -> Seen:
    return weakref.ref(gradient), gradient._version


def _is_same(gradient: torch.Tensor, seen: Seen | None) -> bool:
    return seen is not None and seen[0]() is gradient and seen[1] == gradient._version
