"""Memory of the program that was assigned to `p.grad`: in torch it is the gradient from then on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memd_client.errors import InvalidArgument
from memd_client.parameters.storage_uses import USES_OF_ONE, storage_uses

if TYPE_CHECKING:
    from memd_client.parameters.lazy import LazyTensor


class AssignedGradient:
    """The tensor, for as long as somebody holds its memory. The lock of the gradient's slot
    serialises.
    """

    def __init__(self, gradient: torch.Tensor) -> None:
        self._tensor = weakref.ref(gradient)
        # A view of a flat buffer is often held by nobody, and the buffer is. A tensor that has its
        # memory for itself is not kept: it may be large.
        is_shared = storage_uses(gradient) > USES_OF_ONE
        self._alias = gradient.detach() if is_shared else None
        self._version = gradient._version  # when memd had the same bytes last
        self._is_left = False

    @property
    def living(self) -> torch.Tensor | None:
        """None if nobody can see it any more."""
        if self._alias is not None and storage_uses(self._alias) == USES_OF_ONE:
            self._alias = None
        return self._alias if self._alias is not None else self._tensor()

    @property
    def is_changed(self) -> bool:
        """Torch has counted a change since memd had the same bytes. Only while it lives."""
        gradient = self.living
        return gradient is not None and gradient._version != self._version

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
