"""Leases of parameters that are used on a device.

Values come on one stream, ahead of their use in the order of the last round; gradients leave on
another during backward. Two threads wait for the events: one gives leases of values back, the other
those of gradients, and sends the step behind them. A trainer's thread waits for the daemon, and
never for the device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.sizes import format_size
from memd_client.core.leases import MODE_OVERWRITE, MODE_READ, MODE_WRITE
from memd_client.device.copies import Box, DeviceCopies, Wanted
from memd_client.device.deferred_step import DeferredStep
from memd_client.device.event_thread import EventThread
from memd_client.device.space import aligned
from memd_client.device.use_order import UseOrder
from memd_client.errors import CapacityError, MemdError, NotYet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.gradient_order import GradientOrder
    from memd_client.core.leases import Leases

# How many uses ahead copies begin.
_AHEAD_COUNT = 32
# Copies that begin together share an event: the first use waits for all of them.
_BATCH_BYTES = 8 << 20
# Gradients that wait in pinned memory to be added to those of an earlier backward.
_STAGED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class _Leaving:
    """Copies of one gradient that are under way."""

    box: list[torch.Tensor]  # with the lease of its slot, which ends with the last of them
    count: int = 1


class DeviceLeases:
    """Leases of one model's parameters on one device. Any thread may call."""

    def __init__(
        self,
        leases: Leases,
        device: torch.device,
        *,
        job: str,
        size_bytes: int,
        needed_bytes: int,
    ) -> None:
        """As `DeviceCopies`."""
        # Weak: it has these.
        self._host = weakref.ref(leases)
        self._device = device
        self._job = job
        # Reentrant: garbage that is collected under it may use parameters.
        self._lock = RLock()
        self._order = UseOrder()
        self._shards: dict[int, Shard] = {}
        self._changing: set[int] = set()  # those that steps update
        self._copies = DeviceCopies(
            device,
            size_bytes=size_bytes,
            needed_bytes=needed_bytes,
            next_use=partial(_next_use, self._lock, self._order, self._changing),
        )
        self._registration = leases.registration
        self._arrivals = EventThread("memd-arrivals")
        self._departures = EventThread("memd-departures")
        self._out = torch.Stream(device=device)
        self._leaving: dict[int, _Leaving] = {}  # by shard id
        self._staged_bytes = 0
        self._is_closed = False

    def add(self, shards: Sequence[Shard]) -> None:
        """These are used on the device from now on."""
        self._shards.update((shard.shard_id, shard) for shard in shards)

    # --- values -----------------------------------------------------------------------------------

    def value(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The bytes of a parameter on the device, for the current stream."""
        return self.values([shard], mode)[0]

    def values(self, shards: Sequence[Shard], mode: int = MODE_READ) -> list[torch.Tensor]:
        """`value` of each, all or none."""
        if mode != MODE_READ:
            raise NotYet(
                f"job {self._job!r}: gather(write=True) of a parameter on {self._device} comes in "
                f"a later version; change {shards[0].label!r} with copy_() under torch.no_grad()"
            )
        self._refuse_modes(shards[0])
        missing = [shard for shard in shards if not self._copies.has(shard)]
        counts = [self._copies.change_count(shard) for shard in missing]
        boxes = [[lease] for lease in self._leases.values(missing)] if missing else []
        brought = {
            shard.shard_id: self._brought(shard, box, count)
            for shard, box, count in zip(missing, boxes, counts, strict=True)
        }
        return [
            brought[shard.shard_id] if shard.shard_id in brought else self._found(shard)
            for shard in shards
        ]

    def resident(self, shard: Shard) -> torch.Tensor | None:
        """As `value` where that takes no request; otherwise None."""
        self._refuse_modes(shard)
        there = self._copies.lease(shard)
        if there is None:
            count = self._copies.change_count(shard)
            box = [lease for lease in [self._leases.resident(shard)] if lease is not None]
            if not box:
                return None
            return self._brought(shard, box, count)
        self._note_use(shard)
        return there

    def join(self, shard: Shard) -> None:
        """See `ParameterLeases`."""
        self._copies.join(shard)

    def write(self, shard: Shard, value: torch.Tensor) -> None:
        """Replaces the bytes of `shard`; waits for the device if `value` is there."""
        try:
            self._leases.write(shard, value)
        finally:
            self._copies.forget(shard)  # if that has failed, it may have been changed in place

    def note_change(self, shard: Shard) -> None:
        """See `ParameterLeases`."""
        self._changing.add(shard.shard_id)
        self._copies.forget(shard)

    def _found(self, shard: Shard) -> torch.Tensor:
        """A lease of the copy, or of a new one if it had to give way meanwhile."""
        there = self._copies.lease(shard)
        if there is None:
            return self._brought_again(shard)
        self._note_use(shard)
        return there

    def _brought_again(self, shard: Shard) -> torch.Tensor:
        count = self._copies.change_count(shard)
        return self._brought(shard, [self._leases.value(shard)], count)

    def _brought(self, shard: Shard, box: Box, count: int) -> torch.Tensor:
        """`box` has a lease of the value in host memory, asked for at this `change_count`."""
        size_bytes = box[0].nbytes
        wanted = (shard, box, count)
        there = self._copies.bring_one(wanted, self._registration, self._arrivals)
        if there is None:
            box.clear()
            if count != self._copies.change_count(shard):
                return self._brought_again(shard)
            needed_bytes = aligned(size_bytes) + self._copies.used_bytes
            raise CapacityError(
                f"job {self._job!r}: parameters that are used at once on {self._device} leave no "
                f"room for {shard.label!r}; free tensors that share their memory, or offload with "
                f"device_bytes={needed_bytes * 5 // 4} or more: "
                f"{format_size(self._copies.size_bytes)} < {format_size(needed_bytes)} and 25 %"
            )
        self._note_use(shard)
        return there

    def _note_use(self, shard: Shard) -> None:
        with self._lock:
            self._order.note(shard.shard_id)
            ahead = self._order.ahead(_AHEAD_COUNT)
        if ahead:
            done_count = self._bring_ahead([self._shards[shard_id] for shard_id in ahead])
            if done_count < len(ahead):
                with self._lock:
                    self._order.look_again(len(ahead) - done_count)

    def _bring_ahead(self, shards: Sequence[Shard]) -> int:
        """Begins copies of these, in their order, as far as there is room and no lease has to be
        waited for. Returns how many are there or on their way.

        No other thread is kept from a step meanwhile. It is seen to be open before it marks the
        first parameter as changed, and until it is sent, memd has their old values.
        """
        bring = partial(
            self._copies.bring,
            registration=self._registration,
            arrivals=self._arrivals,
            is_ahead=True,
        )
        batch: list[Wanted] = []
        batch_bytes = place = first = 0
        for place, shard in enumerate(shards):
            if self._copies.has(shard) or any(shard is each for each, *_ in batch):
                continue
            count = self._copies.change_count(shard)
            if self._leases.is_step_open:
                break
            box = [lease for lease in [self._leases.resident(shard)] if lease is not None]
            if not box:
                break
            if not batch:
                first = place
            batch.append((shard, box, count))
            batch_bytes += box[0].nbytes
            if batch_bytes >= _BATCH_BYTES:
                if bring(batch) < len(batch):
                    return first
                batch, batch_bytes = [], 0
        else:
            place = len(shards)
        if batch and bring(batch) < len(batch):
            return first
        return place

    def _refuse_modes(self, shard: Shard) -> None:
        if self._is_closed:
            raise _closed(self._job)
        error = self._arrivals.error
        if error is not None:
            raise MemdError(
                f"job {self._job!r}: a value did not reach {self._device}, so what it computes is "
                f"wrong; end the process and resume the job: {error}"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotYet(
                f"job {self._job!r}: transforms of torch.func over parameters on {self._device}, "
                f"such as {shard.label!r}, come in a later version; offload without device="
            )
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotYet(
                f"job {self._job!r}: CUDA graphs over parameters on {self._device}, such as "
                f"{shard.label!r}, come in a later version; capture what uses none"
            )
        if torch.is_autocast_enabled(self._device.type):
            raise NotYet(
                f"job {self._job!r}: autocast over parameters on {self._device}, such as "
                f"{shard.label!r}, comes in a later version; train in bfloat16, or call the module "
                "outside of autocast"
            )

    # --- gradients --------------------------------------------------------------------------------

    def gradient(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The gradient in host memory, where it has arrived.

        Raises:
            MemdError: a copy has failed.
        """
        self._wait_for(shard)
        self._refuse_lost()
        return self._leases.gradient(shard, mode)

    def overwrite_gradient(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Copies `gradient` into the slot of a parameter; returns at once if it is on a device."""
        if gradient.device.type == "cpu":
            self._leases.overwrite_gradient(shard, gradient)
            return
        self._wait_for(shard)
        leaving = _Leaving([self._leases.gradient(shard, MODE_OVERWRITE)])
        with self._lock:
            self._leaving[shard.shard_id] = leaving
        self._depart(shard, leaving, gradient, None)

    def add_gradient(self, shard: Shard, part: torch.Tensor) -> None:
        """Adds to the gradient in the slot, in the order of these calls; returns at once."""
        with self._lock:
            is_full = self._staged_bytes + part.nbytes > _STAGED_BYTES_MAX
        if is_full:
            self._departures.wait_for_end()
        staged = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
        # The lease is taken here: the thread could not take it once a step waits to be sent.
        with self._lock:
            leaving = self._leaving.get(shard.shard_id)
            if leaving is not None:
                leaving.count += 1
        if leaving is None:
            leaving = _Leaving([self._leases.gradient(shard, MODE_WRITE)])
            with self._lock:
                self._leaving[shard.shard_id] = leaving
        with self._lock:
            self._staged_bytes += staged.nbytes
        self._depart(shard, leaving, part, staged)

    def _depart(
        self,
        shard: Shard,
        leaving: _Leaving,
        gradient: torch.Tensor,
        staged: torch.Tensor | None,
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
        self._departures.after(copied, partial(self._arrive, shard, leaving, staged))

    def _arrive(self, shard: Shard, leaving: _Leaving, staged: torch.Tensor | None) -> None:
        try:
            if staged is not None:
                leaving.box[0].add_(staged)
        finally:
            if staged is not None:
                with self._lock:
                    self._staged_bytes -= staged.nbytes
            self._finish(shard, leaving)

    def _finish(self, shard: Shard, leaving: _Leaving) -> None:
        with self._lock:
            leaving.count -= 1
            if not leaving.count:
                del self._leaving[shard.shard_id]
                leaving.box.clear()

    def gradient_is_final(self, shard: Shard) -> None:
        """Refused before: see `refuse_early`."""
        raise NotYet(_EARLY)

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor) -> torch.Event:
        """Returns the event after the copy."""
        source = source.detach().contiguous()
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

    def _wait_for(self, shard: Shard) -> None:
        """The daemon would grant its slot behind the copies too, and wait no longer than a minute
        for them."""
        with self._lock:
            is_leaving = shard.shard_id in self._leaving
        if is_leaving:
            self._departures.wait_for_end()

    def _refuse_lost(self) -> None:
        error = self._departures.error
        if error is not None:
            raise _lost(self._job, error)

    # --- the device's traffic ---------------------------------------------------------------------

    def send_after(self, begin: Callable[[], StepCall]) -> StepCall:
        """See `DeviceTraffic`."""
        step = DeferredStep()
        self._departures.after(None, partial(self._send, step, begin))
        return step

    def _send(self, step: DeferredStep, begin: Callable[[], StepCall]) -> None:
        error = self._departures.error
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
        self._departures.after(copied, partial(_end_with, box, then))

    def end_round(self) -> None:
        """See `DeviceTraffic`."""
        with self._lock:
            self._order.end_round()

    def give_up(self) -> None:
        """See `DeviceTraffic`."""
        self._departures.wait_for_end()
        self._departures.forget_error()

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        """See `DeviceTraffic`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._departures.close()
        self._arrivals.close()
        self._copies.close()

    # --- as the leases in host memory -------------------------------------------------------------

    @property
    def _leases(self) -> Leases:
        leases = self._host()
        if leases is None:
            raise _closed(self._job)
        return leases

    @property
    def gradient_order(self) -> GradientOrder:
        return self._leases.gradient_order

    def expect_backward(self, shard: Shard) -> None:
        """See `Leases`."""
        self._leases.expect_backward(shard)

    @property
    def read_privately(self) -> bool:
        """A write through a lease stays on the device, and whoever keeps one compares."""
        return True

    def watch_writes(self, shard: Shard) -> None:
        """Nobody watches: see `read_privately`."""

    def unwatch_writes(self, shard: Shard) -> None:
        """See `watch_writes`."""

    def take_written(self, shard: Shard) -> torch.Tensor | None:
        """See `watch_writes`."""
        del shard
        return None

    def note_shown(self, lease: torch.Tensor) -> None:
        """See `watch_writes`."""

    def is_written(self, lease: torch.Tensor) -> bool:
        """It may be: nothing tells."""
        del lease
        return True


_EARLY = (
    "step_in_backward=True with parameters on a device comes in a later version; make the "
    "optimizer without it"
)


def refuse_early() -> None:
    """For an optimizer that updates parameters in backward."""
    raise NotYet(_EARLY)


def _next_use(
    lock: AbstractContextManager[object], order: UseOrder, changing: set[int], shard_id: int
) -> float:
    """Without a reference to the leases, which own the copies that ask."""
    with lock:
        return order.next_use(shard_id, outlasts_step=shard_id not in changing)


def _end_with(box: list[torch.Tensor], then: Callable[[torch.Tensor], None]) -> None:
    try:
        then(box[0])
    finally:
        box.clear()


def _closed(job: str) -> MemdError:
    return MemdError(f"job {job!r}: the session is closed; connect again")


def _lost(job: str, error: BaseException) -> MemdError:
    """The error of a step whose gradients have not all arrived."""
    if isinstance(error, MemdError):
        return error
    return MemdError(
        f"job {job!r}: a gradient did not arrive from its device, so call zero_grad() and repeat "
        f"the batch: {error}"
    )
