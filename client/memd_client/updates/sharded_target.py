"""A parameter that `fully_shard` has cut over the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memd_client.core.leases import MODE_WRITE
from memd_client.errors import InvalidArgument
from memd_client.parameters.views import is_same_bits
from memd_client.parameters.whole_values import WholeValue, note_whole
from memd_client.updates.resident_target import ResidentTarget, value_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The rows of a parameter that one rank has: a range of its bytes."""

    first: int
    end: int
    modules: list[nn.Module]  # before their forward it is gathered

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.first : self.end]


class ShardedTarget(ResidentTarget):
    """A parameter of which each rank has a range, a DTensor. memd has the whole, under its full
    name. torch averages gradients, and each rank gives memd its range of them.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        *,
        part: Range,
        shard: Shard,
        update_count: int,
        keeps_maximum: bool,
        job: Job,
    ) -> None:
        """memd has a value of it, which the parameter gets."""
        self._part = part
        self._hooks: list[RemovableHandle] = []
        super().__init__(
            parameter,
            shard=shard,
            written=True,
            update_count=update_count,
            keeps_maximum=keeps_maximum,
            job=job,
        )
        note_whole(
            parameter,
            WholeValue(shard=shard, job=job, is_changed=lambda: self.has_written),
        )

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return local_of(tensor)

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        return self._part.of(whole)

    def check_gradient(self) -> None:
        """It is the parameter's, and is cut as that."""
        parameter = self._alive()
        self._gradient.check(self.whole_gradient())
        placed = getattr(parameter.grad, "placements", None)
        if placed != getattr(parameter, "placements", None):
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} is placed as {placed}, and the parameter "
                f"as {getattr(parameter, 'placements', None)}; let fully_shard() reduce it"
            )

    def compared(self) -> tuple[str, int, int]:
        """Ranks have other ranges: whether the value has changed since the last step."""
        return self._shard.label, 0, int(self.has_written)

    @property
    def has_written(self) -> bool:
        """The program has changed this rank's range of the value since the last step."""
        whole = self._job.leases.value(self._shard)
        return not is_same_bits(self._part_of(whole), value_of(self._alive(), self._here))

    def write_whole(self) -> None:
        """All ranks call it: memd gets the value from all of them."""
        write_whole(self._alive(), self._shard, self._job)

    def seal(self) -> None:
        """Copies this rank's range of the gradient to memd. The value is there: ranks have compared
        theirs before the step, unless there is only one."""
        ranks = self._job.ranks
        if not ranks.are_several and self.has_written:
            self.write_whole()
        gradient = self.gradient_for_reading()
        if gradient.numel():
            # Before the first one writes, all of it is zero.
            whole = self._job.leases.gradient(self._shard, MODE_WRITE)
            self._part_of(whole).copy_(gradient)
        self._note_sealed()

    def hide(self) -> None:
        """Its modules would gather the old value from memory that FSDP knows."""
        super().hide()

        def refuse(*given: Any) -> None:
            del given
            self._job.steps.open.refuse_if_sealed(self._shard, "its use")

        self._hooks += [
            module.register_forward_pre_hook(refuse, prepend=True) for module in self._part.modules
        ]

    def show(self) -> None:
        """Its modules gather the new value."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        super().show()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor: the same memory."""
    sharded: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = sharded.to_local()
    return local


def write_whole(parameter: torch.Tensor, shard: Shard, job: Job) -> None:
    """All ranks call it: the first one writes what all of them have.

    Raises:
        MemdError: on all ranks, if it could not.
    """
    sharded: Any = parameter
    with torch.no_grad(), job.ranks.naming_ended():
        whole = sharded.full_tensor()

    def write() -> None:
        job.leases.write(shard, whole.contiguous())
        job.mark_written()

    job.ranks.by_one(0, write, "write a value")


def norm_of_all(targets: Sequence[ShardedTarget], norm_type: float, ranks: Ranks) -> torch.Tensor:
    """That of the gradients of all ranks, with torch's bits. All ranks call it."""
    with ranks.naming_ended():
        total: Any = torch.nn.utils.get_total_norm(
            [target.whole_gradient() for target in targets], norm_type
        )
        norm: torch.Tensor = total.full_tensor()
    return norm
