"""The data plane: what the daemon runs on (`Server`) and what trainers map (`ClientSession`)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION: int

class StatusError(Exception):
    """Something outside failed. `code` is a StatusCode of native/base/status.h, `error_number` an errno or 0."""

    code: int
    error_number: int

class PoolReport:
    bytes: int
    segment_bytes: int
    page_bytes: int
    locked: bool
    note: str
    prefault_seconds: float

class StartReport:
    pool: PoolReport
    io_engine: str
    io_engine_reason: str
    volume_paths: list[str]
    volume_bytes: list[int]
    formatted: bool
    format_seconds: float
    job_count: int

class ShardSpec:
    def __init__(
        self, name: str, kind: int, dtype: int, shape: Sequence[int], tier: int
    ) -> None: ...
    name: str
    kind: int
    dtype: int
    shape: list[int]
    tier: int

class ShardInfo:
    shard_id: int
    spec: ShardSpec
    generation: int
    written: bool
    bytes: int

class JobInfo:
    job_id: int
    name: str
    uid: int
    created: bool
    committed_step: int
    session_count: int
    host_bytes: int
    host_bytes_used: int
    nvme_bytes: int
    nvme_bytes_used: int
    shard_count: int
    element_count: int
    lease_count: int

class SessionGrant:
    """Its descriptors are closed when it is deleted: keep it until they were sent."""

    session_id: int
    session_fd: int
    table_fd: int
    doorbell_fd: int
    segment_bytes: int
    arena_reserved_bytes: int

class AdamSettings:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None: ...

def isa_names() -> list[str]:
    """The instruction sets of this processor that have a kernel, the widest last."""

def adam_update(
    isa: str,
    settings: AdamSettings,
    t: int,
    parameter: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradient: NDArray[np.float32],
) -> None:
    """Update number `t`, from 1, of fp32 arrays of equal length, in place."""

def adam_update_bf16(
    isa: str,
    settings: AdamSettings,
    t: int,
    half: NDArray[np.uint16],
    remainder: NDArray[np.int16],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradient: NDArray[np.uint16],
) -> None:
    """Update number `t`, from 1, of bf16 arrays of equal length, in place; `half` and `gradient` hold bf16 as uint16."""

class StepReport:
    committed_step: int
    read_seconds: float
    update_seconds: float
    write_seconds: float
    commit_seconds: float
    read_bytes: int
    written_bytes: int

class DeviceStatistics:
    path: str
    bytes: int
    read_bytes: int
    write_bytes: int
    read_count: int
    write_count: int
    sync_count: int
    error_count: int
    read_seconds: float
    write_seconds: float
    sync_seconds: float

class JobStatistics:
    job: JobInfo
    arena_bytes: int
    arena_bytes_used: int
    private_bytes: int
    private_bytes_used: int
    lease_hits: int  # the shard was resident
    lease_misses: int  # it had to be fetched or made room for
    lease_wait_seconds: float
    fetched_bytes: int
    evicted_bytes: int
    spilled_bytes: int
    step_count: int
    step_read_seconds: float
    step_update_seconds: float
    step_write_seconds: float
    step_commit_seconds: float

class ServerStatistics:
    pool: PoolReport
    pool_bytes_free: int
    nvme_bytes: int
    nvme_bytes_free: int
    devices: list[DeviceStatistics]
    jobs: list[JobStatistics]
    session_count: int
    checksum_failures: int
    ring_protocol_errors: int
    step_seconds_buckets: list[int]  # histogram counts; the bounds are STEP_SECONDS_BOUNDS, the last is +Inf
    commit_seconds_buckets: list[int]
    step_seconds_sum: float
    commit_seconds_sum: float

STEP_SECONDS_BOUNDS: list[float]

class ServiceLease:
    """Bytes of one shard, pinned until release() or deletion. Supports the buffer protocol through memory()."""

    def memory(self) -> memoryview: ...
    def release(self) -> None:
        """What was written becomes what readers see."""

    def discard(self) -> None:
        """An overwrite of a blob leaves no trace."""

class Server:
    """Pool, volumes, jobs and the threads that serve them. Every method may be called from any thread and releases the GIL; each
    raises StatusError. Blocking ones take a deadline and say on what they waited."""

    def __init__(
        self,
        *,
        directories: Sequence[str],
        nvme_bytes: int,
        host_bytes: int,
        lock_required: bool = True,
        huge_pages: bool = True,
        io_engine: str = "auto",
        io_depth: int = 32,
        update_thread_count: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None: ...
    def report(self) -> StartReport: ...
    def open_job(
        self, name: str, *, uid: int, host_bytes: int = 0, nvme_bytes: int = 0, fresh: bool = False
    ) -> JobInfo: ...
    def find_job(self, name: str, *, uid: int) -> JobInfo: ...
    def jobs(self) -> list[JobInfo]: ...
    def shards(self, job_id: int) -> list[ShardInfo]: ...
    def drop_job(self, job_id: int, *, force: bool = False) -> None: ...
    def attach(self, job_id: int) -> SessionGrant: ...
    def segment_fds(self, session_id: int, first: int) -> list[int]:
        """Duplicates of the arena's segments from `first` on, at most 64; owned by the caller."""

    def detach(self, session_id: int) -> int:
        """Leases that were still held."""

    def declare(self, session_id: int, shards: Sequence[ShardSpec]) -> tuple[list[ShardInfo], bool]: ...
    def step(
        self,
        session_id: int,
        groups: Sequence[tuple[AdamSettings, Sequence[int]]],
        *,
        staged_buffers: Sequence[tuple[int, int]] = (),
        timeout_s: float,
    ) -> StepReport: ...
    def sync(self, session_id: int, *, timeout_s: float) -> StepReport: ...
    def drop_gradients(self, session_id: int, shard_ids: Sequence[int]) -> None: ...
    def delete_shard(self, session_id: int, name: str) -> bool: ...
    def lease(
        self, session_id: int, shard_id: int, *, part: int = 0, mode: int = 0, timeout_s: float
    ) -> ServiceLease: ...
    def read_moments(
        self, session_id: int, shard_id: int, element_first: int, element_count: int, *, timeout_s: float
    ) -> tuple[bytes, bytes]: ...
    def write_moments(
        self,
        session_id: int,
        shard_id: int,
        generation: int,
        element_first: int,
        exp_avg: bytes,
        exp_avg_sq: bytes,
        *,
        timeout_s: float,
    ) -> None: ...
    def statistics(self) -> ServerStatistics: ...
    def heartbeat(self) -> int:
        """Grows while the server thread turns; the watchdog looks at it."""

    def stop(self, *, timeout_s: float) -> None:
        """Finishes the steps that were begun, makes written blobs durable, ends the threads. Idempotent."""

# Parts of a shard that can be leased, and how.
PART_VALUE: int  # a parameter, blob or buffer
PART_GRADIENT: int
MODE_READ: int
MODE_WRITE: int  # sees the old bytes, may change them; alone
MODE_OVERWRITE: int  # contents undefined at first; alone

class ClientStatistics:
    lease_count: int
    lease_wait_seconds: float
    leases_held: int

class ClientSession:
    """A trainer's side of the rings. Any thread may call it; a forked child may not, and views that a child inherited do nothing when
    they die there."""

    def __init__(
        self,
        *,
        session_fd: int,
        table_fd: int,
        doorbell_fd: int,
        segment_bytes: int,
        arena_reserved_bytes: int,
        more_segments: Callable[[int], list[int]],
    ) -> None:
        """Takes ownership of the descriptors. `more_segments(first)` returns descriptors of the arena's segments from `first` on; it is
        called with the GIL when a lease lies beyond what is mapped."""

    def lease(
        self, shard_id: int, part: int, mode: int, dtype: int, shape: Sequence[int], timeout_s: float
    ) -> Any:
        """A torch tensor over the arena's own bytes. The lease lives exactly as long as the tensor's storage."""

    def prefetch(self, shard_id: int) -> None:
        """Asks for the shard to be brought up; returns at once and may be dropped."""

    def statistics(self) -> ClientStatistics: ...
    def close(self) -> None:
        """No lease can be had afterwards. Views that live keep their memory mapped, and give their pins back as they die."""
