"""Gradients and buffers that leave a device for their slots in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.device_waits import note_device_wait
from memd_client.base.storage_uses import USES_OF_ONE, storage_uses
from memd_client.device.deferred_step import DeferredStep
from memd_client.device.event_thread import EventThread
from memd_client.errors import MemdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.registration import HostRegistration
    from memd_client.device.gradient_change import GradientChange

# Gradients that wait in pinned memory to be added to those of an earlier backward.
_STAGED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class _Leaving:
    """Copies of one gradient that are under way."""

    box: list[torch.Tensor]  # with the lease of its slot, which ends with the last of them
    count: int = 1


class Departures:
    """Copies to host memory on a stream of their own, during backward. A thread waits for them,
    gives leases back, and sends the step behind the last. Any thread may call; none waits for the
    device unless a method says so."""

    def __init__(self, device: torch.device, registration: HostRegistration, *, job: str) -> None:
        self._device = device
        self._registration = registration
        self._job = job
        # Reentrant: garbage that is collected under it may use parameters.
        self._lock = RLock()
        self._thread = EventThread("memd-departures")
        self._out = torch.Stream(device=device)
        self._leaving: dict[int, _Leaving] = {}  # by shard id
        self._staged_bytes = 0

    def overwrite(
        self,
        shard: Shard,
        gradient: torch.Tensor,
        lease: Callable[[], torch.Tensor],
        then: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Copies `gradient` into the slot that `lease` leases, over one that is on its way there;
        returns at once. When the copy has passed, and the lease has ended, `then` is called.

        Returns:
            the gradient, in memory that nobody else has.
        """
        alone = _alone(gradient)
        self._depart(shard, self._leaving_for(shard, lease), alone, None, then)
        return alone

    def add(self, shard: Shard, part: torch.Tensor, lease: Callable[[], torch.Tensor]) -> None:
        """Adds to the gradient in the slot, in the order of these calls; returns at once."""
        with self._lock:
            is_full = self._staged_bytes + part.nbytes > _STAGED_BYTES_MAX
        if is_full:
            note_device_wait("room")
            self._thread.wait_for_end()
        part = _alone(part)
        staged = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
        leaving = self._leaving_for(shard, lease)
        with self._lock:
            self._staged_bytes += staged.nbytes
        self._depart(shard, leaving, part, staged)

    def change(
        self, shard: Shard, change: GradientChange, lease: Callable[[], torch.Tensor]
    ) -> None:
        """Changes the gradient in the slot, in the order of these calls; returns at once."""
        leaving = self._leaving_for(shard, lease)
        self._thread.after(change.copied, partial(self._change, shard, leaving, change))

    def change_later(self, change: GradientChange, lease: Callable[[], torch.Tensor]) -> None:
        """As `change`, for the step that is sent next: the thread takes the lease, one after the
        other, since those of all gradients may be more than there is room for."""
        self._thread.after(change.copied, partial(_change_leased, change, lease))

    def bring_back(self, shard: Shard, lease: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A copy on the device of the gradient that lies in the slot, or will, for the current
        stream; returns at once.

        Raises:
            MemdError: a copy has failed.
        """
        self.refuse_lost()
        there = torch.empty(shard.shape, dtype=shard.dtype, device=self._device)
        leaving = self._leaving_for(shard, lease)
        here = torch.accelerator.current_stream(self._device)
        copied = torch.Event(device=self._device, blocking=True)
        try:
            self.join(here)
            self._registration.copy(there, self._registration.host(leaving.box[0], self._device))
        finally:
            # Even then: a part of it may be under way.
            copied.record(here)
            self._thread.after(copied, partial(self._finish, shard, leaving))
        return there

    def _leaving_for(self, shard: Shard, lease: Callable[[], torch.Tensor]) -> _Leaving:
        """The lease is taken here: the thread could not take it once a step waits to be sent."""
        with self._lock:
            leaving = self._leaving.get(shard.shard_id)
            if leaving is not None:
                leaving.count += 1
                return leaving
        leaving = _Leaving([lease()])
        with self._lock:
            self._leaving[shard.shard_id] = leaving
        return leaving

    def _depart(
        self,
        shard: Shard,
        leaving: _Leaving,
        gradient: torch.Tensor,
        staged: torch.Tensor | None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copies it into its slot, or to where it waits to be added there."""
        try:
            target = staged
            if target is None:
                target = self._registration.host(leaving.box[0], self._device)
            copied = self._copy_out(gradient, target)
        except BaseException:
            if staged is not None:
                with self._lock:
                    self._staged_bytes -= staged.nbytes
            self._finish(shard, leaving)
            raise
        del target
        self._thread.after(copied, partial(self._arrive, shard, leaving, staged))
        if then is not None:
            self._thread.after(None, then)

    def _arrive(self, shard: Shard, leaving: _Leaving, staged: torch.Tensor | None) -> None:
        try:
            if staged is not None:
                leaving.box[0].add_(staged)
        finally:
            if staged is not None:
                with self._lock:
                    self._staged_bytes -= staged.nbytes
            self._finish(shard, leaving)

    def _change(self, shard: Shard, leaving: _Leaving, change: GradientChange) -> None:
        try:
            change.make_here(leaving.box[0])
        finally:
            self._finish(shard, leaving)

    def _finish(self, shard: Shard, leaving: _Leaving) -> None:
        with self._lock:
            leaving.count -= 1
            if not leaving.count:
                del self._leaving[shard.shard_id]
                leaving.box.clear()

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor) -> torch.Event:
        """Returns the event after the copy."""
        source = source.contiguous()
        computed = torch.Event(device=self._device)
        copied = torch.Event(device=self._device, blocking=True)
        computed.record(torch.accelerator.current_stream(self._device))
        self._out.wait_event(computed)
        with self._out:
            self._registration.copy(target, source)
            copied.record(self._out)
        # Its memory is somebody else's when the copy has passed, not before.
        source.record_stream(self._out)
        return copied

    def join(self, user: torch.Stream) -> None:
        """The next work of `user` comes after the copies so far."""
        user.wait_stream(self._out)

    def wait_for(self, shard: Shard) -> None:
        """Until its gradient has arrived. The daemon would grant its slot behind the copies too,
        and wait no longer than a minute for them."""
        with self._lock:
            is_leaving = shard.shard_id in self._leaving
        if is_leaving:
            note_device_wait("gradient")
            self._thread.wait_for_end()

    @property
    def has_lost(self) -> bool:
        """A copy has failed since `give_up`."""
        return self._thread.error is not None

    def refuse_lost(self) -> None:
        """
        Raises:
            MemdError: a copy has failed.
        """
        error = self._thread.error
        if error is not None:
            raise _lost(self._job, error)

    def send_after(self, begin: Callable[[], StepCall]) -> StepCall:
        """See `DeviceTraffic`."""
        step = DeferredStep()
        self._thread.after(None, partial(self._send, step, begin))
        return step

    def _send(self, step: DeferredStep, begin: Callable[[], StepCall]) -> None:
        error = self._thread.error
        if error is None:
            step.send(begin)
        else:
            step.fail(_lost(self._job, error))

    def copy_out(
        self, source: torch.Tensor, box: list[torch.Tensor], then: Callable[[torch.Tensor], None]
    ) -> None:
        """See `DeviceTraffic`."""
        # A copy of the present value: kernels that are queued next may change it.
        source = source.detach().clone()
        copied = self._copy_out(source, self._registration.host(box[0], self._device))
        self._thread.after(copied, partial(_end_with, box, then))

    def give_up(self) -> None:
        """See `DeviceTraffic`."""
        with self._lock:
            is_leaving = bool(self._leaving)
        if is_leaving:
            note_device_wait("gradient")
        self._thread.wait_for_end()
        self._thread.forget_error()

    def close(self) -> None:
        """Waits for all of them, and ends the thread."""
        self._thread.close()


def _alone(gradient: torch.Tensor) -> torch.Tensor:
    """Autograd may have another tensor over its memory, the gradient of an activation, and adds to
    that in place once it is the last one: a copy from there may run later than that."""
    return gradient.clone() if storage_uses(gradient) > USES_OF_ONE else gradient.detach()


def _end_with(box: list[torch.Tensor], then: Callable[[torch.Tensor], None]) -> None:
    try:
        then(box[0])
    finally:
        box.clear()


def _change_leased(change: GradientChange, lease: Callable[[], torch.Tensor]) -> None:
    if not change.is_none:
        change.make_here(lease())


def _lost(job: str, error: BaseException) -> MemdError:
    """The error of a step whose gradients have not all arrived."""
    if isinstance(error, MemdError):
        return error
    return MemdError(
        f"job {job!r}: a gradient did not arrive from its device, so call "
        f"optimizer.zero_grad() and repeat the batch: {error}"
    )
