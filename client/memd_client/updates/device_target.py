"""A parameter that an optimizer updates and that stays on a device."""

from __future__ import annotations

import logging
import weakref
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memd_client.base.device_waits import note_device_wait
from memd_client.base.dynamo import untraced
from memd_client.core.comparisons import Comparison
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.device.early_gradient import EarlyGradient
from memd_client.device.staying_copies import StayingCopies, staying_copies
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters.hidden import hide
from memd_client.updates.resident_target import ResidentTarget, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.parameters.early import EarlyUpdates

_log = logging.getLogger("memd_client")


class _Ahead(Enum):
    """The way of a value of the step in flight."""

    AWAY = auto()
    COMING = auto()
    IN_PLACE = auto()


class DeviceTarget(ResidentTarget):
    """A parameter that stays on a device. Its gradient leaves for its slot during backward, where
    nobody will change `p.grad` before `step()`, and otherwise then. New values are copied to it in
    front of what the device does next, each once it is updated: it is hidden until its step is
    known to be committed, and taken back if it is not.
    """

    def __init__(self, parameter: torch.Tensor, *, job: Job, **others: Any) -> None:
        """As `ResidentTarget`."""
        self._device = parameter.device
        self._copies: StayingCopies = staying_copies(
            job.unordered_leases, parameter.device, job=job.name
        )
        self._early = EarlyGradient()
        self._updates: weakref.ref[EarlyUpdates] | None = None
        self._is_hooked = False
        self._ahead = _Ahead.AWAY
        self._checksum: torch.Tensor  # of the value that memd has
        self._compared_value: Comparison | None = None
        self._compared_gradient: Comparison | None = None
        super().__init__(parameter, job=job, **others)
        self._hook_if_trainable(parameter)

    def _hook_if_trainable(self, parameter: torch.Tensor) -> None:
        """torch accepts hooks only for tensors that require a gradient."""
        if self._is_hooked or not parameter.requires_grad:
            return
        handle = parameter.register_post_accumulate_grad_hook(_Leave(self))
        weakref.finalize(self, handle.remove).atexit = False
        self._is_hooked = True

    def update_early(self, early: EarlyUpdates | None) -> None:
        """From now on `early` is told of each gradient, for as long as it lives."""
        self._updates = weakref.ref(early) if early is not None else None

    @torch.no_grad()
    def leave(self) -> None:
        """Backward has accumulated `p.grad`: copies it if it may leave now; `step()` reports what
        prevents that."""
        parameter, job = self._parameter(), self._job
        gradient = parameter.grad if parameter is not None else None
        if (
            gradient is None
            or gradient.layout is not torch.strided
            or gradient.dtype != self._shard.dtype
            or gradient.device != self._device
            or job.is_closed
            or job.is_of_another_process
            or self._is_slot_taken()
            or job.steps.open.is_sealed(self._shard)
            or not self._copies.may_leave
        ):
            return
        updates = self._updates() if self._updates is not None else None
        if updates is not None and self._early.has_come(gradient):
            updates.refuse_second(job, self._shard)
        if self._early.came(gradient):
            self._send(gradient, None if updates is None else partial(self._begin_update, updates))
            checksum = self._copies.checksum(gradient)
            self._early.note_left(gradient, checksum, self._copies.loss_count)
            self._copies.join_after_backward()

    def _is_slot_taken(self) -> bool:
        """The step in flight has its gradient. One whose values come later may be over by now."""
        steps = self._job.steps
        return steps.settle_answered() if self._delay.is_late else steps.is_in_flight

    def _begin_update(self, updates: EarlyUpdates) -> None:
        """On the thread behind the copies, whose errors are those of lost gradients: that of a hint
        costs the early update alone."""
        try:
            updates.gradient_is_final(self._job, self._shard, self._job.unordered_leases)
        # Any error costs only the early update: step() makes it.
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "job %r: the update of %r begins at step(), and not in backward: %s",
                self._job.name,
                self._shard.label,
                error,
            )

    def _send(self, gradient: torch.Tensor, then: Callable[[], None] | None = None) -> None:
        lease = partial(self._job.unordered_leases.gradient, self._shard, MODE_OVERWRITE)
        self._copies.leave(self._shard, gradient, lease, then)

    def check_gradient(self) -> None:
        """See `GradientSlot.check`."""
        self._gradient.check(self.whole_gradient(), self._device)

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        gradient = self.gradient_for_reading()
        gradient.mul_(factor.to(gradient.device))

    def set_gradient_to_zero(self) -> None:
        """torch's `zero_grad` does, perhaps after a backward that has raised."""
        self._early.forget()
        if self._copies.has_lost:
            self._copies.give_up()
        self._copies.join()

    def drop_gradient(self) -> bool:
        """Returns whether the daemon has to drop it too."""
        has_left = self._early.has_left
        self._early.forget()
        return super().drop_gradient() or has_left or self._copies.has_lost

    def seal(self) -> None:
        """Copies what of value and gradient memd does not have."""
        self._copies.refuse_lost()
        self.check_gradient()
        super().seal()

    def compare(self) -> Sequence[Comparison]:
        """See `SealedTarget.compare`. By checksums: memd's own value would have to come from the
        host, and perhaps from its disk."""
        gradient = self.gradient_for_reading()
        compared = list(self.compare_value())
        left = self._early.left_checksum(gradient, self._copies.loss_count)
        self._compared_gradient = None
        if left is not None:
            # `p.grad.data` and collectives leave no version.
            self._compared_gradient = Comparison(self._copies.checksum(gradient), left)
            compared.append(self._compared_gradient)
        return compared

    def compare_value(self) -> Sequence[Comparison]:
        """See `LivingParameter.compare_value`."""
        self._compared_value = None
        parameter = self._parameter()
        if parameter is None:
            return ()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            checksum = self._copies.checksum(value_of(parameter, self._here))
            self._compared_value = Comparison(checksum, self._checksum)
        return [self._compared_value]

    def _has_value(self, parameter: torch.Tensor) -> bool:
        """As of `ResidentTarget`, as it was compared."""
        del parameter
        compared, self._compared_value = self._compared_value, None
        assert compared is not None
        return compared.is_same

    def _write_value(self, parameter: torch.Tensor) -> None:
        note_device_wait("write")
        super()._write_value(parameter)
        self._checksum = self._copies.checksum(parameter)

    def _give_gradient(self) -> None:
        gradient = self.gradient_for_reading()
        compared, self._compared_gradient = self._compared_gradient, None
        has_changed = compared is not None and not compared.is_same
        if compared is None or has_changed:
            self._send(gradient)
            if self._delay.is_wanted:
                self._copies.join()  # nobody waits for the copy before the next backward
        self._early.end_step(gradient, has_changed=has_changed)

    @property
    def comes_ahead(self) -> bool:
        """See `SealedTarget.comes_ahead`."""
        return not self._delay.is_late

    def bring_ahead(self) -> None:
        """See `SealedTarget.bring_ahead`."""
        parameter = self._parameter()
        if parameter is not None:
            self._ahead = _Ahead.COMING
            hide(parameter, _Decide(self))
            self._take_value(parameter)
            self._ahead = _Ahead.IN_PLACE

    def take_back(self) -> None:
        """See `SealedTarget.take_back`."""
        parameter = self._parameter()
        if parameter is not None:
            self._take_value(parameter)
        self._end_ahead()

    def _end_ahead(self) -> None:
        self._ahead = _Ahead.AWAY
        self.show()

    def show(self) -> None:
        """As of `ResidentTarget`, unless it is not known whether the value is the job's."""
        if not self.is_ahead:
            super().show()

    @property
    def is_in_place(self) -> bool:
        """See `UpdatedTarget.is_in_place`."""
        return self._ahead is _Ahead.IN_PLACE

    @property
    def is_ahead(self) -> bool:
        """It is not known whether the value is the job's."""
        return self._ahead is not _Ahead.AWAY

    def decide(self) -> None:
        """A use of the value needs to know what it is."""
        self._job.steps.refuse_late(self._job.settle())
        self._copies.follow_values()

    def finish(self) -> None:
        """As of `ResidentTarget`. The device copies the new value before it does anything else."""
        super().finish()
        self._end_ahead()
        parameter = self._parameter()
        if parameter is not None:
            self._hook_if_trainable(parameter)

    def _take_value(self, parameter: torch.Tensor, shard: Shard | None = None) -> None:
        # The lease orders itself behind the step in flight.
        box = [self._job.unordered_leases.value(shard or self._shard)]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._checksum = self._copies.bring(box, value_of(parameter, self._here))

    def _checksum_for_delay(self, parameter: torch.Tensor) -> int | None:
        return None  # the device has one

    def _is_written_late(self, parameter: torch.Tensor) -> bool:
        if self._delay.checksum is None:
            return not self._has_value(parameter)
        note_device_wait("comparison")
        return super()._is_written_late(parameter)

    def _alive(self) -> torch.Tensor:
        parameter = super()._alive()
        if parameter.device != self._device:
            raise InvalidArgument(
                f"job {self._job.name!r}: parameter {self._shard.label!r} was on {self._device} "
                f"when its optimizer was made, and is on {parameter.device} now; make the "
                "optimizer when the model is where it stays"
            )
        return parameter


class _Decide:
    """Called before a value is used of which it is not known whether it is the job's. Keeps no
    session."""

    def __init__(self, target: DeviceTarget) -> None:
        self._target = weakref.ref(target)
        self._label = target.shard.label

    def __call__(self) -> None:
        target = self._target()
        if target is not None:
            target.decide()
        if target is None or target.is_ahead:
            raise MemdError(
                f"parameter {self._label!r} has the value of a step of which it is not known "
                "whether it is committed, and the session has ended; connect again and make the "
                "optimizer anew, which takes the value that the job has"
            )


class _Leave:
    """A hook, which keeps no optimizer."""

    def __init__(self, target: DeviceTarget) -> None:
        self._target = weakref.ref(target)

    @untraced
    def __call__(self, parameter: torch.Tensor) -> None:
        del parameter
        target = self._target()
        if target is not None:
            target.leave()
