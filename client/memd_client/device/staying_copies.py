"""Copies of parameters that stay on a device: gradients leave it, and new values come to it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from memd_client.base.dynamo import untraced
from memd_client.device.arrivals import Arrivals
from memd_client.device.departures import Departures
from memd_client.device.device_checksums import DeviceChecksums

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.core.registration import HostRegistration


class StayingCopies:
    """Those of one session and one device, a `DeviceTraffic`. Any thread may call; none waits for
    the device unless a method says so.

    Gradients leave on a stream of their own, during backward where they can. Values come on the
    stream that calls, so that what it computes next has the new ones, and only the device waits.
    """

    def __init__(self, device: torch.device, registration: HostRegistration, *, job: str) -> None:
        self._device = device
        self._registration = registration
        self._lock = threading.Lock()
        self._graph_task: int | None = None  # the backward at whose end `join` is called
        self._checksums = DeviceChecksums(device)
        self._departures = Departures(device, registration, job=job)
        self._arrivals = Arrivals(device, job=job)
        self._brought: torch.Event | None = None  # the last value
        self._loss_count = 0
        self._is_closed = False

    @property
    def device(self) -> torch.device:
        return self._device

    # --- gradients --------------------------------------------------------------------------------

    def leave(
        self,
        shard: Shard,
        gradient: torch.Tensor,
        lease: Callable[[], torch.Tensor],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copies `gradient` into the slot that `lease` leases, over what is on its way there. A
        thread calls `then` behind the copy, even if that has failed."""
        self._departures.overwrite(shard, gradient, lease, then)

    @property
    def may_leave(self) -> bool:
        """Whether a copy that begins now is made now, and once. In a CUDA graph that is captured it
        would be made by each replay, into a slot that is another one's by then."""
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def join_after_backward(self) -> None:
        """In backward: what comes behind it may change the gradients, and the device waits for
        their copies before."""
        graph_task = torch._C._current_graph_task_id()
        with self._lock:
            if graph_task == self._graph_task:
                return
            self._graph_task = graph_task
        Variable._execution_engine.queue_callback(_Join(self))

    def join(self) -> None:
        """The current stream comes after the copies so far of gradients. One that is captured waits
        for nothing outside of its graph."""
        if self.may_leave:
            self._departures.join(torch.accelerator.current_stream(self._device))

    @property
    def has_lost(self) -> bool:
        """A gradient did not arrive, and nobody has dropped it since."""
        return self._departures.has_lost

    @property
    def loss_count(self) -> int:
        """How often that was so: another parameter's gradient may have been among them."""
        return self._loss_count

    # --- values -----------------------------------------------------------------------------------

    def bring(self, box: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        """Copies a lease of a value, the only content of `box`, into `parameter`. It ends when the
        copy has passed. Returns the value's checksum."""
        host = self._registration.host(box[0], self._device)
        arrived = torch.Event(device=self._device, blocking=True)
        here = torch.accelerator.current_stream(self._device)
        try:
            if parameter.is_contiguous():
                self._registration.copy(parameter, host)
            else:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                self._registration.copy(there, host)
                parameter.copy_(there)
            return self.checksum(parameter)
        finally:
            # Even then: a part of it may be under way.
            arrived.record(here)
            self._brought = arrived
            del host
            self._arrivals.after(arrived, box.clear)

    def follow_values(self) -> None:
        """See `DeviceTraffic`."""
        brought = self._brought
        if brought is not None:
            torch.accelerator.current_stream(self._device).wait_event(brought)

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `DeviceChecksums`."""
        return self._checksums.of(tensor)

    def refuse_lost(self) -> None:
        """
        Raises:
            MemdError: a value did not reach the device.
        """
        self._arrivals.refuse_lost()

    # --- the device's traffic ---------------------------------------------------------------------

    def send_after(self, begin: Callable[[], StepCall]) -> StepCall:
        """See `DeviceTraffic`."""
        return self._departures.send_after(begin)

    def copy_out(
        self, source: torch.Tensor, box: list[torch.Tensor], then: Callable[[torch.Tensor], None]
    ) -> None:
        """See `DeviceTraffic`."""
        self._departures.copy_out(source, box, then)

    def give_up(self) -> None:
        """See `DeviceTraffic`."""
        self._loss_count += self._departures.has_lost
        self._departures.give_up()

    def end_round(self) -> None:
        """See `DeviceTraffic`. Nothing follows an order."""

    def close(self) -> None:
        """See `DeviceTraffic`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._departures.close()
        self._arrivals.close()


class _Join:
    """A callback for the end of a backward. torch drops it if backward raises."""

    def __init__(self, copies: StayingCopies) -> None:
        self._copies = weakref.ref(copies)

    @untraced
    def __call__(self) -> None:
        copies = self._copies()
        if copies is not None:
            copies.join()


def staying_copies(leases: Leases, device: torch.device, *, job: str) -> StayingCopies:
    """Those of this session and device, which are made if there are none."""
    for traffic in leases.devices.traffic:
        if isinstance(traffic, StayingCopies) and traffic.device == device:
            return traffic
    made = StayingCopies(device, leases.registration, job=job)
    leases.devices.add(made)
    return made
