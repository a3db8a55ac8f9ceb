"""Scratch: bytes that a step makes and forgets. They lie in the job, and are part of no commit."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.base.dynamo import untraced
from memd_client.base.sizes import format_size
from memd_client.connection.shard import TIERS, Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.errors import CapacityError, MemdError
from memd_native import SCRATCH_PREFIX, StatusError
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from memd_client.core.job import Job

# A slot is at most an eighth larger than what it is for, so that tensors whose sizes differ from
# step to step, as those of sentences, share slots.
_SIZE_BITS = 4
_SLOT_BYTES_MIN = 4096

_numbers = itertools.count()  # of slots in this process


@dataclass(frozen=True, eq=False, slots=True)
class ScratchSlot:
    """A blob of the job, for bytes that come and go."""

    shard: Shard

    @property
    def size_bytes(self) -> int:
        return self.shard.size_bytes


def slot_bytes(size_bytes: int) -> int:
    """The size of a slot that holds so many."""
    step = max(_SLOT_BYTES_MIN, 1 << max(0, size_bytes.bit_length() - _SIZE_BITS))
    return -(-size_bytes // step) * step


class Scratch:
    """The slots of one tier. Their blobs are declared when they are first needed and used again
    from then on, the one that was given back last first: a training step takes them in the same
    order each time, and the daemon's plan foresees it.

    Any thread may call, and a finalizer may give a slot back within any other call.
    """

    def __init__(self, job: Job, tier: str) -> None:
        job.store.scratch_uses.expect()
        self._job = job
        self._tier = tier
        self._lock = threading.Lock()
        self._free: dict[int, list[ScratchSlot]] = {}
        self._returned: deque[ScratchSlot] = deque()

    @property
    def job(self) -> Job:
        return self._job

    @property
    def may_spill(self) -> bool:
        """They may leave host memory for the disk."""
        return self._tier == "nvme"

    def take(self, size_bytes: int) -> ScratchSlot:
        """A slot of at least so many bytes.

        Raises:
            CapacityError: the job's quotas hold no more.
        """
        self._job.refuse_if_unusable()
        with self._lock:
            self._take_returned()
            free = self._free.get(slot_bytes(size_bytes))
            slot = free.pop() if free else None
        if slot is None:
            slot = self._declared(slot_bytes(size_bytes))
        self._job.store.scratch_uses.change(slot.size_bytes)
        return slot

    def _declared(self, size_bytes: int) -> ScratchSlot:
        job = self._job
        spec = shard_spec(
            f"{SCRATCH_PREFIX}{job.session_id}/{next(_numbers)}",
            kind=types_pb2.SHARD_KIND_BLOB,
            dtype=torch.uint8,
            shape=[size_bytes],
            tier=TIERS[self._tier],
        )
        try:
            (declared,) = job.declare([spec])
        except CapacityError as error:
            raise self._too_small(size_bytes, error) from error
        return ScratchSlot(Shard.of(declared))

    def overwrite(self, slot: ScratchSlot) -> torch.Tensor:
        """A lease of its bytes, to be written.

        Raises:
            CapacityError: the job's quotas hold no more.
        """
        job = self._job
        job.refuse_if_unusable()
        try:
            return job.unordered_leases.value(slot.shard, MODE_OVERWRITE)
        except CapacityError as error:
            raise self._too_small(slot.size_bytes, error) from error

    def read(self, slot: ScratchSlot) -> torch.Tensor:
        """A lease of its bytes."""
        self._job.refuse_if_unusable()
        return self._job.unordered_leases.value(slot.shard)

    def resident(self, slot: ScratchSlot) -> list[torch.Tensor]:
        """At most one lease of its bytes, which takes no request; nobody else has it."""
        lease = self._job.unordered_leases.resident(slot.shard)
        return [lease] if lease is not None else []

    def prefetch(self, slot: ScratchSlot) -> None:
        """Asks the daemon to read it into host memory; returns at once."""
        self._job.unordered_leases.prefetch(slot.shard)

    @untraced
    def give_back(self, slot: ScratchSlot) -> None:
        """Its bytes are needed no more; leases that live stay valid. Does not raise."""
        self._returned.append(slot)
        # A finalizer may run within a call of this thread that holds the lock, which then takes it.
        if self._lock.acquire(blocking=False):
            try:
                self._take_returned()
            finally:
                self._lock.release()

    def _take_returned(self) -> None:
        job = self._job
        while self._returned:
            try:
                slot = self._returned.popleft()
            except IndexError:  # another finalizer was faster
                return
            job.store.scratch_uses.change(-slot.size_bytes)
            self._free.setdefault(slot.size_bytes, []).append(slot)
            if job.is_closed or job.is_of_another_process:
                continue
            try:
                job.unordered_leases.plane.scratch_ended(slot.shard.shard_id)
            except StatusError:
                continue  # the daemon is gone, or the session: both end it

    def _too_small(self, wanted_bytes: int, error: MemdError) -> CapacityError:
        job = self._job
        held_bytes = job.store.scratch_uses.held_bytes
        quotas = (
            'host_bytes, or pass activations="nvme"'
            if self._tier == "host"
            else "nvme_bytes and host_bytes"
        )
        return CapacityError(
            f"job {job.name!r}: what autograd saves does not fit: {format_size(held_bytes)} of it "
            f"are in memd, and {format_size(wanted_bytes)} more are wanted. Use smaller batches or "
            f"checkpoints, or connect with more {quotas} ({format_size(job.host_bytes)} and "
            f"{format_size(job.nvme_bytes)} now): {error}"
        )
