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

    def note_left(self, gradient: torch.Tensor) -> None:
        """It is on its way."""
        self._left = _seen(gradient)

    def is_left(self, gradient: torch.Tensor) -> bool:
        """Whether memd has `gradient` as it is now, or will."""
        return _is_same(gradient, self._left)

    def end_step(self, gradient: torch.Tensor, *, has_changed: bool) -> None:
        """A step has taken `gradient`. `has_changed`: bytes that had left were not these."""
        is_as_it_came = _is_same(gradient, self._came) and not has_changed
        self._expected_count = self._count if is_as_it_came else 0
        self.forget()

    def forget(self) -> None:
        """The next gradient is another one."""
        self._count, self._came, self._left = 0, None, None


def _seen(gradient: torch.Tensor) -> Seen:
    return weakref.ref(gradient), gradient._version


def _is_same(gradient: torch.Tensor, seen: Seen | None) -> bool:
    return seen is not None and seen[0]() is gradient and seen[1] == gradient._version
