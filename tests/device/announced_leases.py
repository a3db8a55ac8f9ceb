"""Announces to the simulation what a daemon does with a session's host memory.

The daemon is another process, whose accesses the vector clocks don't see. From the end of a lease
on, it may fill the slot with something else: a write of the host. Once a gradient is sealed, it
reads the slot: a read of the host.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memd_client.core.steps import Steps
from memd_native import PART_GRADIENT
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from memd_client import Session


class _AnnouncedPlane:
    """A session's data plane whose leases, when they end, are announced."""

    def __init__(self, plane: Any, races: list[str]) -> None:
        self._plane = plane
        self._races = races
        self._gradients: dict[int, torch.Tensor] = {}  # shard id → its slot, without a lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def lease_together(
        self, shards: Sequence[tuple[Any, ...]], part: int, *arguments: Any
    ) -> list[Any]:
        answers: list[Any] = self._plane.lease_together(shards, part, *arguments)
        for (shard_id, *_), answer in zip(shards, answers, strict=True):
            if isinstance(answer, torch.Tensor):
                self._watch(answer)
                if part == PART_GRADIENT:
                    self._gradients[shard_id] = _bytes_of(answer)
        return answers

    def lease_resident(self, *arguments: Any) -> Any:
        lease = self._plane.lease_resident(*arguments)
        if lease is not None:
            self._watch(lease)
        return lease

    def seal(self, shard_id: int) -> None:
        """Raises if the gradient's copy may still be under way, and then may be called again."""
        if shard_id in self._gradients:
            SIM.host_touches(self._gradients[shard_id], writes=False)
            del self._gradients[shard_id]

    def _watch(self, lease: torch.Tensor) -> None:
        slot = _bytes_of(lease)
        weakref.finalize(lease.untyped_storage(), self._end, slot).atexit = False

    def _end(self, slot: torch.Tensor) -> None:
        # Nobody can catch what is raised here: leases end when tensors die.
        try:
            SIM.host_touches(slot, writes=True)
        except RuntimeError as error:
            self._races.append(str(error))


def _bytes_of(lease: torch.Tensor) -> torch.Tensor:
    """The same bytes, without holding the lease. Never read."""
    address, length_bytes = lease.data_ptr(), lease.nbytes
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cpu"), length_bytes
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextmanager
def announced_leases(session: Session, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the races that ends of leases have shown so far; a seal raises its own."""
    races: list[str] = []
    leases = session.leases
    plane = _AnnouncedPlane(leases.plane, races)
    plain_seal = Steps.seal

    def seal(steps: Steps, groups: Any, targets: Any, into: Any = None) -> Any:
        for target in targets:
            plane.seal(target.shard.shard_id)
        return plain_seal(steps, groups, targets, into)

    with patch.context() as patched:
        patched.setattr(leases, "_plane", plane)
        patched.setattr(Steps, "seal", seal)
        yield races
