"""Leases of parameters that are used on a device.

Values come on one stream, ahead of their use in the order of the last round; gradients leave on
another during backward (`departures.py`). Two threads wait for the events: one gives leases of
values back, the other those of gradients, and sends the step behind them. A trainer's thread waits
for the daemon; for the device only when the memory of copies changes its size, when it writes a
value, and for gradients that it reads.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.device_waits import note_device_wait
from memd_client.base.sizes import format_size
from memd_client.core.leases import MODE_OVERWRITE, MODE_READ, MODE_WRITE
from memd_client.device.arrivals import Arrivals
from memd_client.device.copies import Box, DeviceCopies, Wanted
from memd_client.device.departed_gradients import DepartedGradients
from memd_client.device.departures import Departures
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
    from memd_client.device.budget import DeviceBudget

_log = logging.getLogger("memd_client")

# How many uses ahead copies begin.
_AHEAD_COUNT = 32
# Copies that begin together share an event: the first use waits for all of them. So there are few
# at first, and then at most a part of what has begun before them, which is used meanwhile.
_BATCH_BYTES_MAX = 8 << 20
_BATCH_PARTS = 4


class DeviceLeases:
    """Leases of one model's parameters on one device. Any thread may call."""

    def __init__(
        self,
        leases: Leases,
        device: torch.device,
        *,
        job: str,
        budget: DeviceBudget,
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
            size_bytes=budget.size_bytes,
            needed_bytes=needed_bytes,
            next_use=partial(_next_use, self._lock, self._order, self._changing),
        )
        self._budget = budget
        self._registration = leases.registration
        self._arrivals = Arrivals(device, job=job)
        self._departures = Departures(device, leases.registration, job=job)
        self._departed = DepartedGradients(
            partial(_host_leases, self._host, job), device, self._departures, job=job
        )
        self._is_closed = False

    def add(self, shards: Sequence[Shard]) -> None:
        """These are used on the device from now on."""
        self._shards.update((shard.shard_id, shard) for shard in shards)

    # --- values -----------------------------------------------------------------------------------

    def value(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The bytes of a parameter on the device, for the current stream."""
        return self.values([shard], mode)[0]

    def values(self, shards: Sequence[Shard], mode: int = MODE_READ) -> list[torch.Tensor]:
        """`value` of each, all or none. What is written there goes to memd by `write`, in whatever
        mode it was leased."""
        del mode
        self._begin_use(*shards)
        leases: list[torch.Tensor] | None = None
        try:
            leases = self._together(shards)
        except CapacityError:
            if len(shards) == 1:
                raise
        if leases is None:  # the error is gone, and with it the leases that it has kept
            # The copies that were there may have left room, and nowhere enough in one piece.
            for shard in shards:
                self._copies.forget(shard)
            leases = self._together(shards)
        return leases

    def _together(self, shards: Sequence[Shard]) -> list[torch.Tensor]:
        missing = [shard for shard in shards if not self._copies.has(shard)]
        counts = [self._copies.change_count(shard) for shard in missing]
        boxes = [[lease] for lease in self._leases.values(missing)] if missing else []
        # Larger ones first: they leave the fewest gaps.
        wanted = sorted(zip(missing, boxes, counts, strict=True), key=_size_bytes, reverse=True)
        brought = {shard.shard_id: self._brought(shard, box, count) for shard, box, count in wanted}
        return [
            brought[shard.shard_id] if shard.shard_id in brought else self._found(shard)
            for shard in shards
        ]

    def resident(self, shard: Shard) -> torch.Tensor | None:
        """As `value` where that takes no request; otherwise None."""
        self._begin_use(shard)
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
        if value.device == self._device:
            note_device_wait("write")
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
            if self._grow_to(needed_bytes):
                return self._brought_again(shard)
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
        batch_bytes = begun_bytes = place = first = 0
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
            if batch_bytes >= min(begun_bytes // _BATCH_PARTS, _BATCH_BYTES_MAX):
                if bring(batch) < len(batch):
                    return first
                begun_bytes += batch_bytes
                batch, batch_bytes = [], 0
        else:
            place = len(shards)
        if batch and bring(batch) < len(batch):
            return first
        return place

    def _grow_to(self, needed_bytes: int) -> bool:
        """For what is used at once, if the program has chosen no size and the device has room."""
        before_bytes = self._copies.size_bytes
        with self._lock:
            has_grown = self._budget.note_need(needed_bytes)
        if has_grown:
            self._resize(is_needed=True)
        return self._copies.size_bytes > before_bytes

    def _resize(self, *, is_needed: bool = False) -> None:
        """As the budget says.

        Args:
            is_needed: see `DeviceCopies.resize`.

        Raises:
            torch.OutOfMemoryError: there is no room, not even for the least.
        """
        self._departed.kept.lend(self._budget.lent_bytes)
        before_bytes, wanted_bytes = self._copies.size_bytes, self._budget.size_bytes
        if before_bytes == wanted_bytes:
            return
        note_device_wait("resize")
        try:
            self._copies.resize(wanted_bytes, is_needed=is_needed)
        finally:
            size_bytes = self._copies.size_bytes
            with self._lock:
                self._budget.note_size(size_bytes)
            if size_bytes > before_bytes:
                why = "more are used at once" if is_needed else "steps leave room"
                text = "job %r: %s on %s: parameters have %s there instead of %s"
                _log.info(
                    text,
                    self._job,
                    why,
                    self._device,
                    format_size(size_bytes),
                    format_size(before_bytes),
                )
            elif size_bytes < before_bytes:
                text = (
                    "job %r: memory of %s ran out: parameters have %s there instead of %s, and are "
                    "copied more often, until steps leave room again"
                )
                _log.warning(
                    text,
                    self._job,
                    self._device,
                    format_size(size_bytes),
                    format_size(before_bytes),
                )

    def _begin_use(self, *shards: Shard) -> None:
        for shard in shards[:1]:
            self._refuse_modes(shard)
        with self._lock:
            is_begin = any(self._order.begins_with(shard.shard_id) for shard in shards)
            if is_begin:
                self._budget.note_use()
        if is_begin:
            self._resize()

    def _refuse_modes(self, shard: Shard) -> None:
        if self._is_closed:
            raise _closed(self._job)
        self._arrivals.refuse_lost()
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

    # --- gradients --------------------------------------------------------------------------------

    def gradient(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The gradient in host memory, where it has arrived.

        Raises:
            MemdError: a copy has failed.
        """
        self._departed.note_use(shard, writes=mode != MODE_READ)
        self._departures.wait_for(shard)
        self._departures.refuse_lost()
        return self._leases.gradient(shard, mode)

    def overwrite_gradient(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Copies `gradient` into the slot of a parameter; returns at once if it is on a device."""
        self._departures.wait_for(shard)
        if gradient.device.type == "cpu":
            self._departed.forget(shard)
            self._leases.overwrite_gradient(shard, gradient)
        else:
            self._leave(shard, gradient, MODE_OVERWRITE)

    def _leave(self, shard: Shard, gradient: torch.Tensor, mode: int) -> None:
        lease = partial(self._leases.gradient, shard, mode)
        self._departed.note_left(shard, self._departures.overwrite(shard, gradient, lease))

    def add_gradient(self, shard: Shard, part: torch.Tensor) -> None:
        """Adds to the gradient, on the device if that is kept there, otherwise in the slot, in the
        order of these calls; returns at once."""
        total = self._departed.total(shard, part)
        if total is not None:
            # If this is interrupted, the sum of before is there.
            self._leave(shard, total, MODE_WRITE)
        else:
            self._departed.note_added(shard)
            self._departures.add(shard, part, partial(self._leases.gradient, shard, MODE_WRITE))

    @property
    def departed(self) -> DepartedGradients:
        """See `LeasesOnDevice`."""
        return self._departed

    def gradient_is_final(self, shard: Shard) -> None:
        """Refused before: see `refuse_early`."""
        raise NotYet(_EARLY)

    # --- the device's traffic ---------------------------------------------------------------------

    def send_after(self, begin: Callable[[], StepCall]) -> StepCall:
        """See `DeviceTraffic`."""
        held_bytes, kept_bytes = self._copies.held_bytes, self._copies.kept_bytes
        with self._lock:
            self._budget.note_step(
                held_bytes=held_bytes,
                kept_bytes=kept_bytes,
                sum_bytes=self._departed.kept.most_bytes,
            )
        # If there is no room any more, the next use begins with the least.
        with suppress(torch.OutOfMemoryError):
            self._resize()
        self._departed.change_before_step()
        return self._departures.send_after(begin)

    def copy_out(
        self, source: torch.Tensor, box: list[torch.Tensor], then: Callable[[torch.Tensor], None]
    ) -> None:
        """See `DeviceTraffic`."""
        self._departures.copy_out(source, box, then)

    def give_up(self) -> None:
        """See `DeviceTraffic`."""
        self._departures.give_up()
        with self._lock:
            self._budget.note_refusals()
        with suppress(torch.OutOfMemoryError):  # the next use raises it
            self._resize()

    def follow_values(self) -> None:
        """See `DeviceTraffic`. Each use waits for its copy."""

    def end_round(self) -> None:
        """See `DeviceTraffic`."""
        with self._lock:
            self._order.end_round()
        self._departed.kept.end_round()

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
        self._departed.kept.lend(0)
        self._copies.close()

    # --- as the leases in host memory -------------------------------------------------------------

    @property
    def _leases(self) -> Leases:
        return _host_leases(self._host, self._job)

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


def _size_bytes(wanted: Wanted) -> int:
    _, box, _ = wanted
    return box[0].nbytes


def _next_use(
    lock: AbstractContextManager[object], order: UseOrder, changing: set[int], shard_id: int
) -> float:
    """Without a reference to the leases, which own the copies that ask."""
    with lock:
        return order.next_use(shard_id, outlasts_step=shard_id not in changing)


def _host_leases(host: weakref.ref[Leases], job: str) -> Leases:
    leases = host()
    if leases is None:
        raise _closed(job)
    return leases


def _closed(job: str) -> MemdError:
    return MemdError(f"job {job!r}: the session is closed; connect again")
