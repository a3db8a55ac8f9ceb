"""A parameter that an optimizer updates and that stays in this process."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from memd_client.base.tensor_bytes import checksum_of
from memd_client.core.leases import MODE_WRITE
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters.gradients import GradientSlot
from memd_client.parameters.hidden import hidden_memory, hide, show
from memd_client.parameters.views import is_same_bits
from memd_client.updates.late_target import LateTarget

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job

_VECTOR = 8  # elements; see docs/decisions/adam-bits.md


class ResidentTarget(LateTarget):
    """A parameter that stays in this process. memd holds its value and state too, so that a commit
    is complete. Its gradient is `p.grad`, as with torch's optimizers.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        *,
        shard: Shard,
        written: bool,
        update_count: int,
        keeps_maximum: bool,
        job: Job,
    ) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._shard = shard
        self._update_count = update_count
        self._parameter = weakref.ref(parameter)
        self._gradient = GradientSlot(shard, job)
        self._sealed: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        # The gradient that the step in flight has divided, and its version.
        self._unscaled: tuple[weakref.ref[torch.Tensor], int] | None = None
        # memd has the sum of all ranks' gradients, made by `reduce_hook`, that `p.grad` began with.
        self._is_reduced = False
        self._job = job
        if written:
            show(parameter)  # another session may have ended before it knew the value
            self._take_value(parameter)
        else:
            self._write_value(parameter)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the parameter, or of its gradient, that lies in this process: all of it."""
        return tensor

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """That part of a tensor in memd."""
        return whole

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def parameter(self) -> torch.Tensor | None:
        """None if it does not exist any more."""
        return self._parameter()

    @property
    def stays(self) -> bool:
        return self._parameter() is not None and not self._delay.is_late

    @property
    def is_viewed(self) -> bool:
        return not self._delay.is_late

    @property
    def has_sealed_gradient(self) -> bool:
        """The last step took this `p.grad`, and nobody has changed it since."""
        parameter = self._parameter()
        whole = parameter.grad if parameter is not None else None
        if whole is None or self._sealed is None:
            return False
        gradient = self._here(whole)
        sealed, version = self._sealed
        return sealed() is gradient and gradient._version == version

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

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        self.gradient_for_reading().mul_(factor)

    def follow_multiplied(self, factor: torch.Tensor) -> None:
        """Each rank has a gradient of its own."""
        self.multiply_gradient(factor)

    def whole_gradient(self) -> torch.Tensor:
        """`p.grad`."""
        gradient = self._alive().grad
        if gradient is None:
            raise InvalidArgument(f"parameter {self._shard.name!r} has no gradient")
        return gradient

    def gradient_for_reading(self) -> torch.Tensor:
        """The part of it that lies in this process."""
        return self._here(self.whole_gradient())

    def check_gradient(self) -> None:
        """See `GradientSlot.check`."""
        self._gradient.check(self.whole_gradient())

    def compared(self) -> tuple[str, int, int]:
        """Its label, and what ranks compare before a step: checksums of gradient and value."""
        return (
            self._shard.label,
            checksum_of(self.gradient_for_reading()),
            checksum_of(self._alive()),
        )

    def unscale(self, scale: torch.Tensor) -> None:
        """Divides the gradient by `scale`; once, if the step is not made and asked for again."""
        gradient = self.gradient_for_reading()
        if self._unscaled is not None:
            unscaled, version = self._unscaled
            if unscaled() is gradient and version == gradient._version:
                return
        gradient.div_(scale)
        self._unscaled = weakref.ref(gradient), gradient._version

    def drop_gradient(self) -> bool:
        """torch's `zero_grad` drops `p.grad`. Returns whether ranks have a sum in memd that no step
        has consumed."""
        was_reduced, self._is_reduced = self._is_reduced, False
        return was_reduced

    def note_sum(self) -> None:
        """Each rank has a gradient of its own in `p.grad`."""

    def forget_gradient(self) -> None:
        """All ranks drop its sum. `p.grad` is torch's to drop."""
        self._is_reduced = False

    @property
    def is_reduced(self) -> bool:
        """Ranks have summed its gradient in memd, and no step has taken the sum."""
        return self._is_reduced

    def note_reduced(self, *, is_reduced: bool) -> None:
        self._is_reduced = is_reduced

    def take_writes(self) -> None:
        """Nothing to take: `seal` compares all bytes."""

    def refuse_writes(self) -> None:
        """The step has the gradient, and its new value would come over what was written since."""
        parameter = self._parameter()
        if parameter is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            is_written = not self._has_value(parameter)
            if is_written:
                self._take_value(parameter)
        if is_written:
            raise MemdError(
                f"job {self._job.name!r}: parameter {self._shard.name!r} was written through a "
                "tensor that shares its memory (.data, detach() or a view) after step() and before "
                "its update was made, and the change is lost; write when backward has ended, or "
                "after commit() where that closes the step"
            )

    def hold_still(self, held: ExitStack) -> None:
        """Nothing to hold: the parameter is the user's own."""

    def refuse_if_in_use(self) -> None:
        """Never: its users hold the tensor that gets the new value."""

    def seal(self) -> None:
        """Copies the value, if it changed, and `p.grad` to memd."""
        parameter = self._alive()
        refuse_uneven_strides(parameter, self._shard.name)
        # The loop may have changed the value by any means. `param.data` leaves no trace but the
        # bytes. Equal bytes are not written: memd knows more bits of a bf16 parameter than the
        # parameter has.
        if self._job.ranks.is_first and not self._has_value(parameter):
            self._write_value(parameter)
        self._give_gradient()
        self._note_sealed()
        self._delay.take(self._checksum_for_delay(parameter) if self._delay.is_wanted else None)

    def _has_value(self, parameter: torch.Tensor) -> bool:
        """Whether it has the value that memd has."""
        value = self._part_of(self._job.leases.value(self._shard))
        return is_same_bits(value, value_of(parameter, self._here))

    def _write_value(self, parameter: torch.Tensor) -> None:
        """memd has its value from now on."""
        self._job.leases.write(self._shard, parameter.detach())
        self._job.mark_written()

    def _give_gradient(self) -> None:
        """memd has its gradient from now on."""
        gradient, ranks = self.gradient_for_reading().detach(), self._job.ranks
        # All ranks have the same, and share the work. The step is made when all have done theirs.
        if not ranks.are_several:
            self._gradient.replace(gradient, self._job.leases)
        elif self._shard.shard_id % ranks.world_size == ranks.rank:
            self._give_for_all(gradient)

    def _note_sealed(self) -> None:
        gradient = self.gradient_for_reading()
        self._sealed = weakref.ref(gradient), gradient._version

    def _give_for_all(self, gradient: torch.Tensor) -> None:
        """Ranks may have summed it in memd, and it may have changed since."""
        leases = self._job.leases
        if not self._is_reduced:
            leases.overwrite_gradient(self._shard, gradient.contiguous())
        elif not is_same_bits(leases.gradient(self._shard), gradient):
            leases.gradient(self._shard, MODE_WRITE).copy_(gradient)

    def hide(self) -> None:
        """The loop has the tensor itself, which memd does not see being used: it refuses that."""
        hide(self._alive(), partial(self._job.steps.open.refuse_if_sealed, self._shard, "its use"))

    def show(self) -> None:
        """It is an ordinary tensor again."""
        parameter = self._parameter()
        if parameter is not None:
            show(parameter)

    def undo(self) -> None:
        """`p.grad` is where it was."""
        self.show()
        self._gradient.forget()
        self._delay.undo()

    def finish(self) -> None:
        """Puts the new value in place, if the parameter still exists and its update is not
        delayed."""
        self.show()
        parameter = self._parameter()
        if self._delay.is_late:
            self._delay.note_made()
        elif parameter is not None and not self.is_in_place:
            self._take_value(parameter)
        self._gradient.forget()
        self._is_reduced = False
        self._unscaled = None
        self._update_count += 1

    def _take_value(self, parameter: torch.Tensor, shard: Shard | None = None) -> None:
        """That of its own shard, or of another one."""
        with torch.no_grad():
            value = self._part_of(self._job.leases.value(shard or self._shard))
            value_of(parameter, self._here).copy_(value)

    def _alive(self) -> torch.Tensor:
        parameter = self._parameter()
        if parameter is None:
            raise InvalidArgument(f"parameter {self._shard.name!r} does not exist any more")
        return parameter


def value_of(parameter: torch.Tensor, here: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The part of its value that lies `here`, hidden or not."""
    memory = hidden_memory(parameter)
    return here(parameter) if memory is None else memory


def refuse_uneven_strides(parameter: torch.Tensor, name: str) -> None:
    """torch's fused kernel goes through memory, and rounds the last `numel % 8` elements there in
    another way. memd goes through them in their order, so those would be others."""
    count = parameter.numel()
    with torch._C.DisableTorchFunctionSubclass():
        if count < _VECTOR or count % _VECTOR == 0 or parameter.is_contiguous():
            return
    raise InvalidArgument(
        f"parameter {name!r} of shape {list(parameter.shape)} is not contiguous, and 8 does not "
        f"divide its {count} elements: torch's fused kernel rounds the last {count % _VECTOR} in "
        "memory in another way, and memd stores no strides; make it contiguous first: "
        "parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)"
    )
