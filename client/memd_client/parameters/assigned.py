"""Memory of the program that was assigned to `p.grad`: in torch it is the gradient from then on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memd_client.errors import InvalidArgument
from memd_client.parameters.alias import Alias

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.parameters.lazy import LazyTensor


class AssignedGradient:
    """The tensor, for as long as somebody holds its memory or has changed what memd has not taken
    since. The lock of the gradient's slot serialises.
    """

    def __init__(self, gradient: torch.Tensor) -> None:
        self._alias: Alias | None = Alias(gradient)
        self._version = gradient._version  # when memd had the same bytes last
        self._is_left = False
        # Else its memory, which may be large, would stay until the gradient is used.
        self._end = weakref.ref(gradient, _ended(self))

    @property
    def living(self) -> torch.Tensor | None:
        """None if memd has its bytes and nobody can see it any more."""
        self._let_go()
        alias = self._alias
        return alias.tensor if alias is not None else None

    @property
    def is_changed(self) -> bool:
        """Torch has counted a change since memd had the same bytes. Only while it lives."""
        alias = self._alias
        return alias is not None and alias.tensor._version != self._version

    @property
    def is_left(self) -> bool:
        """The gradient in memd has changed since, or may have."""
        return self._is_left

    def under(self, view: LazyTensor, name: str) -> AssignedGradient | None:
        """The part of the tensor that `view` shows, of the gradient `name` that it was assigned to.
        None if nobody can see it any more.

        Raises:
            InvalidArgument: its elements are in another order than the gradient's.
        """
        gradient = self.living
        if gradient is None:
            return None
        if not gradient.is_contiguous():
            raise InvalidArgument(
                f"the tensor that was assigned to the gradient of {name!r} is not contiguous, so "
                "memd cannot let another parameter have that gradient too; assign p.grad.clone()"
            )
        found = AssignedGradient(view.shown_of(gradient))
        found._is_left = self._is_left
        return found

    def refuse_sum(self, label: str) -> None:
        """Before several ranks add to the gradient: in torch the tensor would become the average,
        when the last of them has.

        Raises:
            InvalidArgument: somebody can see it.
        """
        if self.living is not None:
            raise InvalidArgument(
                f"somebody holds the tensor that was assigned to the gradient of {label!r}, or has "
                "changed it since, and with several ranks it would not show what backward adds; "
                "assign its clone(), or let go of it"
            )

    def leave(self) -> None:
        """The gradient in memd is about to change."""
        self._is_left = True

    def note_taken(self) -> None:
        """memd has its bytes now. Only while it lives."""
        gradient = self.living
        assert gradient is not None
        self._version = gradient._version

    @torch.no_grad()
    def show(self, value: torch.Tensor) -> None:
        """The gradient in memd has this value, and so has the tensor in torch."""
        gradient = self.living
        if gradient is not None:
            gradient.copy_(value)
            self._version = gradient._version
        self._is_left = False

    def _let_go(self, *, dying: int = 0) -> None:
        """`dying`: how many of the program's tensors are about to give the memory back."""
        alias = self._alias
        if alias is not None and not self.is_changed and alias.is_alone(but=dying):
            self._alias = None


def _ended(assigned: AssignedGradient) -> Callable[[object], None]:
    held = weakref.ref(assigned)

    def let_go(end: object) -> None:
        del end
        found = held()
        if found is not None:
            # The tensor's object goes, and its memory right behind it.
            found._let_go(dying=1)

    return let_go
