"""Small uses of streams, each right only with all of its waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SIZE = 4096
ONES = torch.ones(SIZE)


def stream() -> torch.Stream:
    return torch.Stream(device="sim")


def event() -> torch.Event:
    return torch.Event(device="sim")


def upload(*, wait_for_copy: bool = True) -> Tensor:
    """The host to the device on a side stream; the default stream uses it."""
    side, copied = stream(), event()
    host = ONES.pin_memory()
    with side:
        there = host.to("sim", non_blocking=True)
        copied.record(side)
    if wait_for_copy:
        torch.accelerator.current_stream().wait_event(copied)
    return (there + there).cpu()


def download(*, wait_for_kernel: bool = True, wait_on_host: bool = True) -> Tensor:
    """A kernel's result to the host on a side stream; the host reads it."""
    side, computed, copied = stream(), event(), event()
    host = torch.zeros(SIZE).pin_memory()
    there = ONES.to("sim") * 2
    computed.record()
    if wait_for_kernel:
        side.wait_event(computed)
    with side:
        host.copy_(there, non_blocking=True)
        copied.record(side)
    there.record_stream(side)
    if wait_on_host:
        copied.synchronize()
    SIM.host_touches(host, writes=False)
    return host.clone()


def reuse_host(*, wait_on_host: bool = True) -> Tensor:
    """A host buffer given back, and written by its next owner."""
    copied = event()
    host = ONES.pin_memory()
    there = host.to("sim", non_blocking=True)
    copied.record()
    if wait_on_host:
        copied.synchronize()
    SIM.host_touches(host, writes=True)
    host.fill_(7)
    return (there + there).cpu()


def unregister(*, wait_on_host: bool = True) -> Tensor:
    """Registered memory that is unregistered, and freed, after its copy."""
    copied = event()
    host = ONES.clone()
    SIM.pin(host.data_ptr(), host.nbytes)
    there = host.to("sim", non_blocking=True)
    copied.record()
    try:
        if wait_on_host:
            copied.synchronize()
        SIM.unpin(host.data_ptr())
        host.fill_(7)
    finally:
        torch.accelerator.synchronize()
        if host.is_pinned():
            SIM.unpin(host.data_ptr())
    return (there + there).cpu()


def reuse_device(*, record_stream: bool = True) -> Tensor:
    """Device memory freed while another stream reads it, and allocated again."""
    side, ready = stream(), event()
    there = ONES.to("sim")
    ready.record()
    side.wait_event(ready)
    with side:
        result = there + there
    if record_stream:
        there.record_stream(side)
    del there
    torch.full((SIZE,), 7.0, device="sim")
    side.synchronize()
    return result.cpu()


def overwrite_slot(*, wait_for_reader: bool = True) -> Tensor:
    """A slot of the device filled again after the last kernel that reads it."""
    side, ready, read = stream(), event(), event()
    first, second = ONES.pin_memory(), (ONES * 7).pin_memory()
    slot = torch.empty(SIZE, device="sim")
    ready.record()
    with side:
        side.wait_event(ready)
        slot.copy_(first, non_blocking=True)
        ready.record(side)
    torch.accelerator.current_stream().wait_event(ready)
    result = slot + slot
    read.record()
    with side:
        if wait_for_reader:
            side.wait_event(read)
        slot.copy_(second, non_blocking=True)
    slot.record_stream(side)
    return result.cpu()


def between_devices(*, wait_for_copy: bool = True) -> Tensor:
    """A side stream of the second device uses what its default stream received."""
    side, arrived = torch.Stream(device="sim:1"), torch.Event(device="sim:1")
    there = ONES.to("sim:0").to("sim:1", non_blocking=True)
    arrived.record(torch.accelerator.current_stream("sim:1"))
    if wait_for_copy:
        side.wait_event(arrived)
    with side:
        result = there + there
    there.record_stream(side)
    side.synchronize()
    return result.cpu()


@dataclass(frozen=True, slots=True)
class Mistake:
    """A scheme, and one wait of it that can be left out."""

    scheme: Callable[..., Tensor]
    wait: str

    def __str__(self) -> str:
        return f"{self.scheme.__name__}-{self.wait}"

    @property
    def wrong(self) -> Callable[[], Tensor]:
        return partial(self.scheme, **{self.wait: False})


MISTAKES = (
    Mistake(upload, "wait_for_copy"),
    Mistake(download, "wait_for_kernel"),
    Mistake(download, "wait_on_host"),
    Mistake(reuse_host, "wait_on_host"),
    Mistake(unregister, "wait_on_host"),
    Mistake(reuse_device, "record_stream"),
    Mistake(overwrite_slot, "wait_for_reader"),
    Mistake(between_devices, "wait_for_copy"),
)
