"""A parameter of an optimizer, and what torch's optimizers have in `state` of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from memd_client.connection.shard import MAXIMUM, MOMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from memd_client.connection.shard import Shard
    from memd_client.core.comparisons import Comparison
    from memd_client.transaction.moments import Moments


class StatefulTarget(ABC):
    """A parameter and what torch's optimizers have in `state` of it. Its first update decides
    whether there is a maximum, by the group's `amsgrad` of that moment; later ones leave it so.
    """

    @property
    @abstractmethod
    def shard(self) -> Shard: ...

    @property
    @abstractmethod
    def update_count(self) -> int:
        """Adam's t. The step in flight counts once it is settled."""

    @abstractmethod
    def replace_update_count(self, count: int) -> None: ...

    @property
    def is_stored(self) -> bool:
        """The daemon knows the parameter, and has its moments."""
        return True

    @property
    @abstractmethod
    def keeps_maximum(self) -> bool:
        """There is a maximum, or will be from the first update on, as far as memd was told."""

    @abstractmethod
    def note_maximum(self, *, keeps_maximum: bool) -> None:
        """Memd was told before the first update."""

    def state(self, moments: Moments, *, amsgrad: bool) -> dict[str, torch.Tensor]:
        """In torch's format, of a group with this setting. No bytes are read."""
        names = moment_names(has_maximum=self.has_maximum(amsgrad=amsgrad))
        return moments.refer(self.shard, self.update_count, names)

    def note_state(self, update_count: int, *, keeps_maximum: bool) -> None:
        """A load has replaced its moments."""
        self.note_maximum(keeps_maximum=keeps_maximum)
        self.replace_update_count(update_count)

    def has_maximum(self, *, amsgrad: bool) -> bool:
        """Whether torch's state of it has a maximum, in a group with this setting."""
        return self.keeps_maximum if self.update_count else amsgrad


def moment_names(*, has_maximum: bool) -> Sequence[str]:
    return MOMENTS if has_maximum else [name for name in MOMENTS if name != MAXIMUM]


class UpdatedTarget(StatefulTarget):
    """A target that a step updates: a parameter in one piece, or a tile."""

    def __init__(self, *, keeps_maximum: bool) -> None:
        self._keeps_maximum = keeps_maximum

    @property
    def keeps_maximum(self) -> bool:
        """See `StatefulTarget.keeps_maximum`."""
        return self._keeps_maximum

    def note_maximum(self, *, keeps_maximum: bool) -> None:
        """See `StatefulTarget.note_maximum`."""
        self._keeps_maximum = keeps_maximum

    @property
    def parts(self) -> Sequence[Self]:
        """The targets that a step updates: itself."""
        return [self]

    @property
    def is_delayed(self) -> bool:
        """The value that the program has lacks the update of the step that is made, or was made
        last."""
        return False

    def takes(self, *, amsgrad: bool) -> bool:
        """Whether an update with this setting finds the maximum that it needs, and no other."""
        if self._keeps_maximum == amsgrad:
            return True
        return self._keeps_maximum and self.update_count > 0

    # The bytes of this process are compared where they are needed.

    def compare(self) -> Sequence[Comparison]:
        """See `SealedTarget.compare`."""
        return ()

    def compare_value(self) -> Sequence[Comparison]:
        """See `LivingParameter.compare_value`."""
        return ()

    # A value that waits for the answer of its step needs none of these.

    @property
    def comes_ahead(self) -> bool:
        """See `SealedTarget.comes_ahead`."""
        return False

    @property
    def is_in_place(self) -> bool:
        """`bring_ahead` has brought it."""
        return False

    def bring_ahead(self) -> None:
        """See `SealedTarget.bring_ahead`."""

    def take_back(self) -> None:
        """See `SealedTarget.take_back`."""

    # A gradient that is an ordinary `p.grad` needs none of these.

    def set_gradient_to_zero(self) -> None:
        """As `zero_grad(set_to_none=False)`, which does it to `p.grad` itself."""

    def follow_assigned(self) -> None:
        """Before the gradient is used: takes what was changed in a tensor that was assigned."""

    def refuse_gradient_change(self) -> None:
        """Raises if it is another parameter's too, which would not see a change."""
