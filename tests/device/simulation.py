"""The simulated accelerator: torch's device `sim`, and what tests may tell and ask it.

Importing this installs it, once in a process. Device memory may not be touched by the host; kernels
and copies run late, as a seed's dice say; a use of bytes that nothing orders after an earlier one
raises at the call. See docs/decisions/simulated-device.md.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import backend_registration

from tests.device import build, normalizations, ordered_threads
from tests.device.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["SIM", "Simulation"]


class Simulation:
    """`torch.sim`: what torch asks of a device's module, and the controls of the simulation."""

    def __init__(self) -> None:
        self._native: Any = torch.ops.simulation

    # --- for torch --------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        count: int = self._native.device_count()
        return count

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: int | str | torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: int | None) -> Any:
        return torch.accelerator.device_index(device)

    # Random numbers come from the CPU's generator, which torch seeds itself.
    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, _device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # --- for tests --------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Finishes everything and starts over with other dice, and without memory to use again."""
        self._native.seed(seed)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Races do not raise inside of the block: their data comes out wrong, or right by luck."""
        self._native.check_races(False)
        try:
            yield
        finally:
            self._native.check_races(True)

    @contextmanager
    def limit(self, limit_bytes: int, device: int = 0) -> Iterator[None]:
        """A device with less memory."""
        _, total_bytes = torch.accelerator.get_memory_info(device)
        self._native.limit(device, limit_bytes)
        try:
            yield
        finally:
            self._native.limit(device, total_bytes)

    def host_waits(self) -> dict[str, int]:
        """How often each operator made the host wait for a device since the last call."""
        pairs = [text.split() for text in self._native.host_waits()]
        return {name: int(count) for name, count in pairs}

    def pin(self, address: int, length_bytes: int) -> None:
        """Registers host memory where it lies: from now on copies use it in their own time."""
        self._native.pin(address, length_bytes)

    def unpin(self, address: int) -> None:
        """Raises while a copy may still use the range that begins here."""
        self._native.unpin(address)

    def host_touches(self, tensor: Tensor, *, writes: bool) -> None:
        """The host, in this process or another, reads or writes a host tensor's bytes now. Raises
        while a copy may still use them.

        The simulation sees only what devices do, so tests announce: each end of a host lease as a
        write, as the daemon may fill the slot again, and each seal as a read.
        """
        self._native.host_touches(tensor.data_ptr(), tensor.nbytes, writes)

    @contextmanager
    def copies_at(self, bytes_per_second: float) -> Iterator[None]:
        """Another speed of copies, each way, than 50 GB/s."""
        self._native.copy_speed(int(bytes_per_second))
        try:
            yield
        finally:
            self._native.copy_speed(50_000_000_000)

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Filled, at the block's end, with all that was queued inside of it."""
        timeline = Timeline()
        self._native.record_timeline(True)
        try:
            yield timeline
        finally:
            self._native.record_timeline(False)
        timeline.fill(*self._native.timeline())


def _install() -> Simulation:
    path = build.library()
    torch.ops.load_library(path)
    backend_registration.rename_privateuse1_backend("sim")
    torch.ops.simulation.install()
    normalizations.install()
    simulation = Simulation()
    torch._register_device_module("sim", simulation)
    sys.modules["torch.sim"] = simulation  # type: ignore[assignment]
    native = ctypes.CDLL(str(path))
    announcements = native.sim_publish, native.sim_publish_time, native.sim_observe
    for announce in announcements:
        announce.argtypes = [ctypes.c_int64]
        announce.restype = None
    ordered_threads.install(*announcements)
    return simulation


SIM = _install()
