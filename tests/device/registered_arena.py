"""The arena, registered with the simulation as a driver registers it: copies reach it in their own
time.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session

_ARENA_BYTES_MAX = 64 << 20  # as much as tests' daemons have; what lies behind may be reserved too


@contextmanager
def registered_arena(session: Session) -> Iterator[None]:
    """All that the session may map. A copy that nobody has waited for raises at the end."""
    address = session.leases.plane.arena_address
    SIM.pin(address, _reserved_bytes(address))
    try:
        yield
        SIM.unpin(address)
    except BaseException:
        torch.accelerator.synchronize()
        with suppress(RuntimeError):  # it was unpinned
            SIM.unpin(address)
        raise


def _reserved_bytes(address: int) -> int:
    """Segments are shared mappings, in addresses that nobody may touch before."""
    end = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        first, last = (int(each, 16) for each in addresses.split("-"))
        if first <= end < last and (permissions.endswith("s") or permissions.startswith("---")):
            end = last
    assert end > address
    return min(end - address, _ARENA_BYTES_MAX)
