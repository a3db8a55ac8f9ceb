"""A parameter without elements, whose updates an optimizer counts."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import Shard
from memd_client.updates.stateful_target import UpdatedTarget, moment_names
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from memd_client.transaction.moments import Moments
    from memd_client.updates.stateful_target import StatefulTarget


class EmptyTarget(UpdatedTarget):
    """A parameter without elements. It stays in this process, offloaded or not, and the daemon does
    not know it: there is nothing to store. Steps count its updates, as torch's optimizers do.
    """

    # The daemon's numbers are positive.
    _numbers = itertools.count(-1, -1)

    def __init__(self, parameter: torch.Tensor, *, name: str, keeps_maximum: bool) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._parameter = weakref.ref(parameter)
        self._update_count = 0
        self._shard = Shard(
            shard_id=next(self._numbers),
            name=name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=parameter.dtype,
            shape=parameter.shape,
        )

    @property
    def shard(self) -> Shard:
        """This process alone knows it."""
        return self._shard

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def stays(self) -> bool:
        return False  # no step changes it

    @property
    def is_viewed(self) -> bool:
        return False

    @property
    def has_sealed_gradient(self) -> bool:
        return True  # no gradient makes a difference

    @property
    def update_count(self) -> int:
        return self._update_count

    def replace_update_count(self, count: int) -> None:
        self._update_count = count

    def take_pending(self) -> None:
        """Its gradient is where autograd puts it."""

    @property
    def has_gradient(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None

    def gradient_for_reading(self) -> torch.Tensor:
        return torch.zeros(self._shard.shape)

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        """There is nothing to multiply."""

    def follow_multiplied(self, factor: torch.Tensor) -> None:
        """There is nothing to multiply."""

    def unscale(self, scale: torch.Tensor) -> None:
        """There is nothing to divide."""

    def drop_gradient(self) -> bool:
        return False  # torch's `zero_grad` drops it

    def take_writes(self) -> None:
        """Nothing to take."""

    def hold_still(self, held: ExitStack) -> None:
        """Nothing to hold."""

    def refuse_if_in_use(self) -> None:
        """Never: nobody sees a difference."""

    def seal(self) -> None:
        """There is nothing to take."""

    def hide(self) -> None:
        """No step changes it."""

    def show(self) -> None:
        """It was not hidden."""

    def undo(self) -> None:
        """There is nothing to give back."""

    def finish(self) -> None:
        self._update_count += 1

    def state(self, moments: Moments, *, amsgrad: bool) -> dict[str, torch.Tensor]:
        del moments
        names = moment_names(has_maximum=self.has_maximum(amsgrad=amsgrad))
        zeros = dict.fromkeys(names, torch.zeros(self._shard.shape))
        return {"step": torch.tensor(float(self._update_count)), **zeros}

    def go_on_with(self, others: Sequence[StatefulTarget]) -> None:
        """After a restart its state is as that of the parameters that the daemon knows."""
        oldest = max(others, key=lambda other: other.update_count)
        if oldest.update_count:
            self._update_count = oldest.update_count
            self._keeps_maximum = oldest.keeps_maximum
