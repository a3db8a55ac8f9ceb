"""Gradients that are one tensor in torch, as `p.grad` of one parameter was assigned to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from memd_client.errors import MemdError

if TYPE_CHECKING:
    from memd_client.connection.shard import Shard


class Slot(Protocol):
    """`gradients.GradientSlot`."""

    @property
    def shard(self) -> Shard: ...


class SharedGradient:
    """The slots that have it, each with a copy, until one of them gets another gradient or none.
    Any thread may call.
    """

    def __init__(self) -> None:
        self._slots: WeakSet[Slot] = WeakSet()

    def join(self, slot: Slot) -> None:
        """It has this gradient from now on."""
        self._slots.add(slot)

    def leave(self, slot: Slot) -> None:
        """It has another gradient, or none."""
        self._slots.discard(slot)

    def refuse_change(self, slot: Slot) -> None:
        """Before the gradient in `slot` is changed in place.

        Raises:
            MemdError: another slot has it too, and would keep what it was.
        """
        for other in list(self._slots):
            if other is not slot:
                raise MemdError(
                    f"the gradients of {slot.shard.label!r} and {other.shard.label!r} are one "
                    "tensor in torch, since p.grad of one was assigned to the other, and two in "
                    "memd, so a change of one would not show in the other; assign p.grad.clone()"
                )
