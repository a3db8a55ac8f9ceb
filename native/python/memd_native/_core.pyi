from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class StatusError(Exception):
    """
    Something outside failed. `code` is a StatusCode of native/base/status.h, `error_number` an errno or 0, `quota_name` that of a quota of `quota_bytes` that the request would exceed, or empty.
    """

    code: int
    error_number: int
    quota_name: str
    quota_bytes: int

def set_check_format(log_format: str, *, to_journal: bool) -> None:
    """
    How this process writes the line of a check that fails, before it aborts: as memd/log.py writes events. Without it the line is plain.
    """

class AdamSettings:
    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool = False, amsgrad: bool = False) -> None:
        """
        One parameter group's settings, as torch names them. decoupled: AdamW; else Adam with an L2 term.
        """

def isa_names() -> list[str]:
    """
    The instruction sets of this processor that have a kernel, the widest last.
    """

def adam_update(isa: str, settings: AdamSettings, t: int, parameter: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], exp_avg: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], gradient: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], max_exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None = None) -> None:
    """
    Update number `t`, from 1, of one fp32 parameter, in place. The arrays have equal length. `max_exp_avg_sq`: with amsgrad.
    """

def adam_update_bf16(isa: str, settings: AdamSettings, t: int, half: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu')], remainder: Annotated[NDArray[numpy.int16], dict(shape=(None,), order='C', device='cpu')], exp_avg: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], gradient: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], max_exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None = None) -> None:
    """
    Update number `t`, from 1, of one bf16 parameter, in place. The arrays have equal length; `half` and `gradient` hold bf16 as uint16. `max_exp_avg_sq`: with amsgrad.
    """

USE_READ: int = 0

USE_OVERWRITE: int = 1

USE_CHANGE: int = 2

USE_ADD: int = 3

USE_LAST: int = 4

class BytesMoved:
    """One period of a plan, on average."""

    @property
    def read_bytes(self) -> float: ...

    @property
    def written_bytes(self) -> float: ...

def simulate_plan(uses: Sequence[tuple[int, int]], item_bytes: Sequence[int], *, cache_bytes: int, writes_changes: bool, warm_count: int = 4, measured_count: int = 8) -> BytesMoved:
    """
    Bytes that eviction by farthest next use moves if `uses`, pairs of an item and USE_*, repeat. `writes_changes`: changed items are on disk at the end of their period anyway.
    """

PROTOCOL_OLDEST: int = 4

PROTOCOL_VERSION: int = 4

PART_VALUE: int = 0

PART_GRADIENT: int = 1

PART_RANK_SUM: int = 2

SCRATCH_PREFIX: str = '@scratch/'

MODE_READ: int = 0

MODE_WRITE: int = 1

STALL_STEP: int = 2

STALL_GRADIENT: int = 3

PHASE_FORWARD: int = 0

PHASE_BACKWARD: int = 1

PHASE_STEP: int = 2

PHASE_OTHER: int = 3

MODE_OVERWRITE: int = 2

class ClientStatistics:
    @property
    def lease_count(self) -> int: ...

    @property
    def hits(self) -> int:
        """Those without a request."""

    @property
    def resident_count(self) -> int:
        """Those that the daemon made wait for nothing."""

    @property
    def lease_wait_seconds(self) -> float: ...

    @property
    def step_wall_seconds(self) -> float: ...

    @property
    def stall_phase_seconds(self) -> dict[str, dict[str, float]]: ...

    @property
    def stall_group_seconds(self) -> dict[str, dict[str, float]]: ...

    @property
    def leases_held(self) -> int: ...

class ClientSession:
    """
    A trainer's side of the rings. Any thread may call it; a forked child may not, and views that a child inherited do nothing when they die there.
    """

    def __init__(self, *, session_fd: int, table_fd: int, doorbell_fd: int, connection_fd: int, segment_bytes: int, arena_reserved_bytes: int, more_segments: Callable[[int], Sequence[int]]) -> None:
        """
        Takes ownership of the descriptors. `more_segments(first)` returns descriptors of the arena's segments from `first` on; it is called with the GIL when a lease lies beyond what is mapped.
        """

    def lease(
        self, shard_id: int, part: int, mode: int, dtype: int, shape: Sequence[int], timeout_s: float
    ) -> Any:
        """
        A torch tensor over the arena's own bytes. The lease lives exactly as long as the tensor's storage.
        """

    def lease_together(self, shards: Sequence[tuple[int, int, Sequence[int], int]], part: int, mode: int, timeout_s: float, phase: int, follows: bool = True) -> list[object]:
        """
        Leases by request, all of them asked for before the first is waited for. `shards`: shard id, dtype, shape and what stall_group() said of each. `follows`: they come after the step of follow(). Returns a tensor for each, or the StatusError of that one.
        """

    def stall_group(self, name: str) -> int:
        """
        The number under which waits for parameters of this group of modules are counted; 0, that of "other", where there are too many.
        """

    def note_stall(self, phase: int, group: int, reason: int, seconds: float) -> None:
        """The caller has waited by other means than a lease."""

    def note_step(self, wall_seconds: float) -> None:
        """From the end of one step to that of the next."""

    def lease_resident(self, shard_id: int, dtype: int, shape: Sequence[int]) -> Any:
        """
        The same for reading a value, where that takes no request; otherwise None.
        """

    def overwrite_gradient(self, shard_id: int, stall_group: int, address: int, length_bytes: int, timeout_s: float, phase: int) -> None:
        """
        Copies a gradient from `address` into its slot, which is leased for that and given back. No tensor is made of the slot.
        """

    def ask_ahead(self, shard_ids: Sequence[int]) -> None:
        """
        Asks for the slots of gradients that there are none of yet, so that the answers are there when they are overwritten; returns at once and may do nothing.
        """

    def forget_asked(self) -> bool:
        """
        Gives back what was asked for ahead and not leased; whether there was any.
        """

    def prefetch(self, shard_id: int) -> None:
        """
        Asks for the shard to be brought up; returns at once and may be dropped.
        """

    def gradient_is_final(self, shard_id: int) -> None:
        """
        The session has let go of the shard's gradient, and writes it no more before the step that uses it; returns at once.
        """

    def rank_sum_ended(self, shard_id: int) -> None:
        """
        This rank's own sum of the shard's gradients is in that of all ranks; returns at once.
        """

    def scratch_ended(self, shard_id: int) -> None:
        """
        Nobody leases the bytes of this scratch blob any more; leases that live stay valid. Returns at once.
        """

    @property
    def reads_privately(self) -> bool:
        """
        Whether a write through a lease for reading stays in this process. Not where the daemon has reserved huge pages.
        """

    def watch_writes(self, shard_id: int) -> None:
        """
        From now on take_written() has leases of this shard, until unwatch_writes() was called as often.
        """

    def unwatch_writes(self, shard_id: int) -> None:
        """
        Undoes one watch_writes(). After the last one, leases that nobody has taken end.
        """

    @property
    def has_written(self) -> bool:
        """Whether take_written() has any, of whatever shard."""

    def take_written(self, shard_id: int, dtype: int, shape: Sequence[int]) -> object:
        """
        A lease of the shard's value that was for reading, has ended, and was written: a tensor, with which the bytes go. None if there is no other.
        """

    def note_shown(self, address: int, length_bytes: int) -> None:
        """
        A living lease for reading, at this address, was given another value by memd: from now on it is written if that changes.
        """

    def is_written(self, address: int, length_bytes: int) -> bool:
        """Whether a living lease for reading, at this address, was written."""

    @property
    def arena_address(self) -> int:
        """
        The arena's segments are mapped from here on, back to back, as long as this object lives.
        """

    @property
    def segment_bytes(self) -> int: ...

    def arena_view(self, lease: object, address: int, dtype: int, shape: Sequence[int]) -> object:
        """
        A torch tensor over the arena's own bytes of `lease` or a part of it, which begins at `address`. It keeps the lease.
        """

    def follow(self, call: int) -> None:
        """
        Requests from now on come after the step of this call, whichever of them reaches the daemon first; 0: after none that is on its way.
        """

    def daemon_is_gone(self) -> bool:
        """Whether the other end of the attach connection is closed."""

    def suspend(self) -> None:
        """
        Before the next daemon is asked for the session: who waits for a lease, or asks for one, gets UNAVAILABLE until reconnect(). Leases that are held stay valid.
        """

    def reconnect(self, connection_fd: int) -> None:
        """
        The next daemon has taken the session over. Takes ownership of the descriptor.
        """

    def statistics(self) -> ClientStatistics: ...

    def close(self) -> None:
        """
        No lease can be had afterwards. Views that live keep their memory mapped, and give their pins back as they die.
        """

class PoolReport:
    @property
    def bytes(self) -> int: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def locked(self) -> bool: ...

    @property
    def note(self) -> str: ...

    @property
    def prefault_seconds(self) -> float: ...

    @property
    def kept_bytes(self) -> int: ...

    @property
    def gathered_bytes(self) -> int:
        """
        With small pages that lie together in runs of 2 MiB, as the pool was made.
        """

class StartReport:
    @property
    def pool(self) -> PoolReport: ...

    @property
    def io_engine(self) -> str: ...

    @property
    def io_engine_reason(self) -> str: ...

    @property
    def volume_paths(self) -> list[str]: ...

    @property
    def volume_bytes(self) -> list[int]: ...

    @property
    def formatted(self) -> bool: ...

    @property
    def format_seconds(self) -> float: ...

    @property
    def job_count(self) -> int: ...

    @property
    def kept_note(self) -> str: ...

    @property
    def load_notes(self) -> list[str]: ...

class ShardSpec:
    def __init__(self, name: str, kind: int, dtype: int, shape: Sequence[int], tier: int, value_only: bool = False, keeps_maximum: bool = False) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> int: ...

    @property
    def dtype(self) -> int: ...

    @property
    def keeps_maximum(self) -> bool: ...

    @property
    def shape(self) -> list[int]: ...

    @property
    def tier(self) -> int: ...

class ShardInfo:
    @property
    def shard_id(self) -> int: ...

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def generation(self) -> int: ...

    @property
    def written(self) -> bool: ...

    @property
    def bytes(self) -> int: ...

    @property
    def lost(self) -> bool: ...

    @property
    def unreadable(self) -> bool: ...

class SnapshotInfo:
    """A committed step that its job keeps."""

    @property
    def job_id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def created_s(self) -> int:
        """Since 1970."""

    @property
    def bytes(self) -> int:
        """On disk, some of which the job or other snapshots may name too."""

    @property
    def extent_count(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """Its catalogue on disk is damaged."""

    @property
    def lost_shards(self) -> list[str]: ...

    @property
    def is_exported(self) -> bool: ...

    @property
    def exported_part(self) -> float:
        """0 to 1, where it is exported."""

class ShardInfos:
    """In the order that was asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, arg: int, /) -> ShardInfo: ...

    def __iter__(self) -> Iterator[ShardInfo]: ...

class JobInfo:
    @property
    def job_id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def uid(self) -> int: ...

    @property
    def created(self) -> bool: ...

    @property
    def committed_step(self) -> int: ...

    @property
    def durable_step(self) -> int: ...

    @property
    def durability(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def session_count(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    @property
    def host_bytes_used(self) -> int: ...

    @property
    def nvme_bytes(self) -> int: ...

    @property
    def nvme_bytes_used(self) -> int:
        """By state."""

    @property
    def metadata_bytes(self) -> int:
        """By the catalogue, old and new."""

    @property
    def snapshot_bytes(self) -> int:
        """By snapshots, as if each shared nothing."""

    @property
    def snapshot_count(self) -> int: ...

    @property
    def host_tier_bytes(self) -> int:
        """
        Parameters of tier host and their optimizer state: on disk only in snapshots.
        """

    @property
    def shard_count(self) -> int: ...

    @property
    def element_count(self) -> int: ...

    @property
    def lease_count(self) -> int: ...

    @property
    def lost_shards(self) -> list[str]: ...

    @property
    def unreadable_shards(self) -> list[str]: ...

class SessionGrant:
    """
    Its descriptors are closed when it is deleted: keep it until they were sent.
    """

    @property
    def session_id(self) -> int: ...

    @property
    def committed_step(self) -> int:
        """The step at which the job stood when it was granted."""

    @property
    def durable_step(self) -> int: ...

    @property
    def session_fd(self) -> int: ...

    @property
    def table_fd(self) -> int: ...

    @property
    def doorbell_fd(self) -> int: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def arena_reserved_bytes(self) -> int: ...

class KeptSession:
    @property
    def session_id(self) -> int: ...

    @property
    def job_id(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def start_time(self) -> int: ...

    @property
    def uid(self) -> int: ...

class StepReport:
    @property
    def committed_step(self) -> int: ...

    @property
    def durable_step(self) -> int: ...

    @property
    def read_seconds(self) -> float: ...

    @property
    def update_seconds(self) -> float: ...

    @property
    def write_seconds(self) -> float: ...

    @property
    def commit_seconds(self) -> float: ...

    @property
    def read_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def disk_error(self) -> str: ...

class ScrubStatistics:
    """The verification in the background."""

    @property
    def bytes_per_second(self) -> int:
        """At most; 0: it is off."""

    @property
    def bytes(self) -> int:
        """Read since the start."""

    @property
    def errors(self) -> int:
        """Extents found damaged, in each pass anew."""

    @property
    def pass_count(self) -> int: ...

    @property
    def last_pass_age_seconds(self) -> float: ...

    @property
    def in_pass(self) -> bool: ...

    @property
    def pass_bytes(self) -> int: ...

    @property
    def pass_bytes_all(self) -> int: ...

    @property
    def last_error(self) -> str: ...

class SnapshotReadingStatistics:
    """Reads of snapshots for exports."""

    @property
    def count(self) -> int:
        """At this moment."""

    @property
    def bytes(self) -> int:
        """Read and verified since the start."""

    @property
    def errors(self) -> int:
        """Extents that were damaged or could not be read."""

IO_SECONDS_BOUNDS: list[float]

STEP_SECONDS_BOUNDS: list[float]

TURN_SECONDS_BOUNDS: list[float]

class SecondsHistogram:
    @property
    def counts(self) -> list[int]:
        """
        One for each bucket alone; the last is for all above the highest bound.
        """

    @property
    def sum_seconds(self) -> float: ...

class IoKindStatistics:
    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> SecondsHistogram: ...

    @property
    def error_count_by_errno(self) -> dict[int, int]: ...

    @property
    def error_count(self) -> int: ...

class DeviceStatistics:
    @property
    def path(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def bytes_free(self) -> int: ...

    @property
    def checksum_failures(self) -> int: ...

    @property
    def fenced(self) -> bool: ...

    @property
    def io_depth(self) -> int: ...

    @property
    def io_chunk_bytes(self) -> int: ...

    @property
    def read(self) -> IoKindStatistics: ...

    @property
    def write(self) -> IoKindStatistics: ...

    @property
    def sync(self) -> IoKindStatistics: ...

class JobStatistics:
    @property
    def job(self) -> JobInfo: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def arena_bytes_used(self) -> int: ...

    @property
    def private_bytes(self) -> int: ...

    @property
    def private_bytes_used(self) -> int: ...

    @property
    def lease_hits(self) -> int: ...

    @property
    def lease_misses(self) -> int: ...

    @property
    def lease_wait_seconds(self) -> float: ...

    @property
    def lease_wait_reason_seconds(self) -> dict[str, float]: ...

    @property
    def step_wall_seconds(self) -> float: ...

    @property
    def stall_phase_seconds(self) -> dict[str, dict[str, float]]: ...

    @property
    def stall_group_seconds(self) -> dict[str, dict[str, float]]: ...

    @property
    def fetched_bytes(self) -> int: ...

    @property
    def prefetched_bytes(self) -> int: ...

    @property
    def prefetch_unused_bytes(self) -> int: ...

    @property
    def prefetch_hits(self) -> int: ...

    @property
    def prefetch_late(self) -> int: ...

    @property
    def uses_foreseen(self) -> int: ...

    @property
    def uses_unforeseen(self) -> int: ...

    @property
    def plan_moved_bytes(self) -> int: ...

    @property
    def plan_necessary_bytes(self) -> int: ...

    @property
    def early_tiles_adopted(self) -> int: ...

    @property
    def early_tiles_discarded(self) -> dict[str, int]: ...

    @property
    def evicted_bytes(self) -> int: ...

    @property
    def spilled_bytes(self) -> int: ...

class Activity:
    """Something that was begun and is not done."""

    @property
    def kind(self) -> str: ...

    @property
    def job(self) -> str: ...

    @property
    def uid(self) -> int: ...

    @property
    def what(self) -> str: ...

    @property
    def waits_on(self) -> str: ...

    @property
    def priority(self) -> str: ...

    @property
    def age_seconds(self) -> float: ...

class StepPhases:
    @property
    def read(self) -> SecondsHistogram: ...

    @property
    def update(self) -> SecondsHistogram: ...

    @property
    def write(self) -> SecondsHistogram: ...

    @property
    def commit(self) -> SecondsHistogram: ...

class TurnStatistics:
    """The server thread's turns that had something to do."""

    @property
    def cpu_seconds(self) -> SecondsHistogram: ...

    @property
    def wall_seconds(self) -> SecondsHistogram: ...

    @property
    def cpu_seconds_max(self) -> float:
        """Since the start."""

    @property
    def wall_seconds_max(self) -> float:
        """Since the start."""

    @property
    def phases_of_cpu_max(self) -> dict[str, float]:
        """
        Seconds by the wall of each phase of the turn that took cpu_seconds_max.
        """

    @property
    def phases_of_wall_max(self) -> dict[str, float]:
        """
        Seconds by the wall of each phase of the turn that took wall_seconds_max.
        """

class ServerStatistics:
    @property
    def pool(self) -> PoolReport: ...

    @property
    def pool_bytes_free(self) -> int: ...

    @property
    def nvme_bytes(self) -> int: ...

    @property
    def nvme_bytes_free(self) -> int: ...

    @property
    def nvme_bytes_of_snapshots(self) -> int: ...

    @property
    def fence_reason(self) -> str: ...

    @property
    def devices(self) -> list[DeviceStatistics]: ...

    @property
    def jobs(self) -> list[JobStatistics]: ...

    @property
    def session_count(self) -> int: ...

    @property
    def ring_protocol_errors(self) -> int: ...

    @property
    def room_wait_seconds(self) -> float: ...

    @property
    def step_seconds(self) -> SecondsHistogram: ...

    @property
    def commit_seconds(self) -> SecondsHistogram: ...

    @property
    def step_phases(self) -> StepPhases: ...

    @property
    def turns(self) -> TurnStatistics: ...

    @property
    def scrub(self) -> ScrubStatistics: ...

    @property
    def exports(self) -> SnapshotReadingStatistics: ...

class MomentsWrite:
    """A write of moments that was begun."""

    def wait(self, *, timeout_s: float) -> None:
        """Until it has taken effect. Once. After an error it may go on."""

class ServiceLease:
    """
    Bytes of one shard, pinned until release(), discard() or deletion, whatever becomes of the session.
    """

    def memory(self) -> memoryview:
        """The bytes, writable. Not to be touched after release() or discard()."""

    def release(self) -> None:
        """Readers see the new bytes from now on."""

    def discard(self) -> None:
        """An overwrite of a blob leaves no trace."""

class Server:
    """
    Pool, volumes, jobs and the threads that serve them. Every method may be called from any thread and releases the GIL; each raises StatusError. Blocking ones take a deadline and say on what they waited.
    """

    def __init__(self, *, directories: Sequence[str], nvme_bytes: int, host_bytes: int, lock_required: bool = True, huge_pages: bool = True, io_engine: str = 'auto', io_limits: Sequence[tuple[int, int]] = [], update_thread_count: int = 0, jobs_expected: int = 2, progress: Callable[[int, int], None] | None = None, keeper_fd: int | None = None, kept: Sequence[tuple[str, int]] = []) -> None:
        """
        `io_limits` are depth and chunk size of each directory's path, or none for the default. Takes ownership of `keeper_fd`, a connected socket on which descriptors are kept in systemd's words, and of `kept`: names and descriptors that the daemon before left.
        """

    def report(self) -> StartReport: ...

    def open_job(self, name: str, *, uid: int, host_bytes: int = 0, nvme_bytes: int = 0, fresh: bool = False, durability: str = '') -> JobInfo:
        """Finds the job, whoever owns it, or creates it for `uid`."""

    def find_job(self, name: str) -> JobInfo: ...

    def jobs(self) -> list[JobInfo]: ...

    def shards(self, job_id: int, *, first: int = 0, count_max: int | None = None) -> ShardInfos:
        """In the order of their ids, from `first` on."""

    def find_shard(self, job_id: int, name: str) -> ShardInfo: ...

    def drop_job(self, job_id: int, *, force: bool = False) -> None: ...

    def set_job_weight(self, job_id: int, weight: float) -> None:
        """The job's share of devices and workers that others want as well."""

    def create_snapshot(self, job_id: int, name: str, *, created_s: int, number: int, load_session_id: int = 0, timeout_s: float) -> SnapshotInfo:
        """
        Keeps the job's last committed step, which is on disk then. The same `number` again, not 0, is the same request. With `load_session_id` the job goes back to it unless that session calls end_load().
        """

    def restore_snapshot(self, job_id: int, name: str, *, timeout_s: float) -> SnapshotInfo:
        """
        The job's committed step becomes the snapshot's. Refused while the job is in use.
        """

    def drop_snapshot(self, job_id: int, name: str, *, timeout_s: float) -> None: ...

    def end_load(self, session_id: int, name: str, *, timeout_s: float) -> None:
        """The session's load counts, and is on disk; its snapshot is dropped."""

    def take_load_notes(self) -> list[str]:
        """
        A sentence for each load that broke off since the last call: its job has gone back, or could not.
        """

    def snapshots(self, job_id: int) -> list[SnapshotInfo]:
        """Oldest first."""

    def attach(self, job_id: int, *, pid: int = 0, start_time: int = 0, uid: int = 0, timeout_s: float = 60.0) -> SessionGrant:
        """
        `pid`, `start_time` and `uid` are those of the process that the session belongs to; only it may resume the session. Where it is not done in time there is no session.
        """

    def kept_sessions(self) -> list[KeptSession]:
        """Sessions of the daemon before whose processes have not come back yet."""

    def redo_steps(self) -> None:
        """
        Once, when those of kept_sessions() whose process is dead are detached: steps that were closed in the daemon before are made from here on.
        """

    def resume_session(self, session_id: int, *, pid: int, start_time: int, uid: int) -> SessionGrant:
        """Without descriptors: the process has them."""

    def closing_step(self, job_id: int) -> int:
        """A step that was closed and that the daemon is finishing; 0: none."""

    def segment_fds(self, session_id: int, first: int) -> list[int]:
        """
        Duplicates of the arena's segments from `first` on, at most 64; owned by the caller.
        """

    def detach(self, session_id: int) -> int:
        """Leases that were still held."""

    def declare(self, session_id: int, shards: Iterable[ShardSpec]) -> tuple[ShardInfos, bool]:
        """Takes each spec as it comes: who makes them one by one keeps none."""

    def step(self, session_id: int, groups: Sequence[tuple[AdamSettings, Sequence[int]]], *, staged_buffers: Sequence[tuple[int, int]] = [], step: int = 0, call: int = 0, other_ranks: Sequence[tuple[int, int]] = [], timeout_s: float) -> StepReport:
        """`other_ranks`: session id and call of each that closes the same step."""

    def expect_step(self, session_id: int, groups: Sequence[tuple[AdamSettings, Sequence[int]]]) -> None: ...

    def sync(self, session_id: int, *, timeout_s: float) -> StepReport: ...

    def drop_gradients(self, session_id: int, shard_ids: Sequence[int]) -> None: ...

    def delete_shard(self, session_id: int, name: str) -> bool: ...

    def lease(self, session_id: int, shard_id: int, *, part: int = 0, mode: int = 0, timeout_s: float) -> ServiceLease: ...

    def read_moments(self, session_id: int, shard_id: int, element_first: int, element_count: int, *, with_master: bool, timeout_s: float) -> tuple[bytes, bytes, bytes, bytes]:
        """
        exp_avg, exp_avg_sq, max_exp_avg_sq and master, fp32, of elements within one tile of 262144. max_exp_avg_sq is empty where the shard keeps no maximum, and master, the numbers of which the bfloat16 values are published, without with_master or where the shard is float32.
        """

    def begin_write_moments(self, session_id: int, shard_id: int, generation: int, element_first: int, exp_avg: bytes, exp_avg_sq: bytes, max_exp_avg_sq: bytes, master: bytes) -> MomentsWrite:
        """
        Replaces moments within one tile, and the shard's generation; durable after the next sync or step. max_exp_avg_sq is empty where the shard keeps no maximum from here on. master is empty, or the fp32 numbers of which the bfloat16 values are published. Returns at once; writes to one tile take effect in their order.
        """

    def begin_write_staged_moments(self, session_id: int, shard_id: int, generation: int, element_first: int, staged_shard_id: int, has_maximum: bool, has_master: bool, *, timeout_s: float) -> MomentsWrite:
        """
        The same of moments that lie in a blob, one behind the other. The blob is leased once it can be, within timeout_s, and until they were taken.
        """

    def bytes_of_maxima(self, session_id: int, shard_ids: Sequence[int]) -> int:
        """
        Returns how many more bytes of the disk quota the job would need if all these parameters kept a maximum. Changes nothing.
        """

    def statistics(self) -> ServerStatistics: ...

    @property
    def outlives_process(self) -> bool:
        """
        Whether what jobs have in memory outlives this process; False also where the keeper failed.
        """

    def in_flight(self) -> list[Activity]:
        """Operations that have begun and are not done, the oldest first."""

    def set_scrub_rate(self, bytes_per_second: int) -> None:
        """
        The verification in the background reads so fast; 0: off, as at the start.
        """

    def begin_check(self, job_ids: Sequence[int], *, whole: bool) -> int:
        """
        Checks these jobs, or everything, and returns its number. Refused while another one runs.
        """

    def check_progress(self, check_id: int) -> LiveCheckProgress:
        """Findings since the last call, and the report at the end."""

    def end_check(self, check_id: int) -> None: ...

    def heartbeat(self) -> int:
        """Grows while the server thread turns; the watchdog looks at it."""

    def stop(self, *, timeout_s: float) -> None:
        """
        Finishes the steps that were begun, makes written blobs durable, ends the threads. Sessions end, unless they outlive the process. Idempotent.
        """

    def begin_snapshot_reading(self, job_id: int, name: str, *, owner: str, uid: int, pid: int, piece_first: int = 0, identity: int = 0) -> SnapshotReading:
        """
        One of a job, and four of an owner at a time. The snapshot cannot be dropped until end_snapshot_reading().
        """

    def read_snapshot(self, reading_id: int, place: SnapshotPlace, memory: SnapshotMemory, *, offset_bytes: int, timeout_s: float) -> SnapshotPiece:
        """Below all other I/O, and verified. The memory lives until it is read."""

    def end_snapshot_reading(self, reading_id: int) -> None: ...

    def join_ranks(self, session_id: int, *, rank: int, world_size: int) -> None: ...

    def ranks(self, session_id: int) -> RanksReport:
        """The ranks of the session's job; fenced where one of them has left."""

    def end_gradients(self, session_id: int) -> None:
        """A rank has made its gradients of the next step."""

    def gradients_of_other_ranks(self, session_id: int) -> list[int]:
        """Shards whose gradient is a sum without a part of this rank."""

    def drop_gradients_of_ranks(self, session_id: int, shard_ids: Sequence[int]) -> None:
        """All ranks do."""

def checksum(bytes: bytes | memoryview) -> int:
    """XXH3-64."""

class SnapshotShard:
    """A shard as a snapshot has it."""

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def generation(self) -> int: ...

    @property
    def written(self) -> bool: ...

    @property
    def has_moments(self) -> bool: ...

class SnapshotPlace:
    """An extent of a blob or buffer, or a tile of a bucket."""

    @property
    def is_tile(self) -> bool: ...

    @property
    def owner(self) -> int:
        """Bucket of a tile, shard of an extent."""

    @property
    def index(self) -> int: ...

class SnapshotRun:
    """Elements of one parameter that lie in a tile one after the other."""

    @property
    def shard(self) -> int: ...

    @property
    def element_in_shard(self) -> int: ...

    @property
    def element_in_tile(self) -> int: ...

    @property
    def element_count(self) -> int: ...

class SnapshotMemory:
    """
    Bytes that the daemon fills for an export, and that whoever gets the descriptor can map for reading alone.
    """

    def __init__(self, bytes: int) -> None:
        """Pages appear when they are filled."""

    @property
    def fd(self) -> int: ...

    @property
    def bytes(self) -> int: ...

class SnapshotPiece:
    """
    Verified bytes: where each part lies in the export's memory, and how many it has. A part that was never written has none, and is zero.
    """

    @property
    def value(self) -> tuple[int, int]: ...

    @property
    def exp_avg(self) -> tuple[int, int]: ...

    @property
    def exp_avg_sq(self) -> tuple[int, int]: ...

    @property
    def max_exp_avg_sq(self) -> tuple[int, int]: ...

    @property
    def master(self) -> tuple[int, int]:
        """fp32, for bf16 alone: the value with its remainder."""

class SnapshotReading:
    """A snapshot that is read; any thread."""

    @property
    def reading_id(self) -> int: ...

    @property
    def snapshot(self) -> SnapshotInfo: ...

    @property
    def identity(self) -> int: ...

    @property
    def piece_first(self) -> int: ...

    @property
    def piece_count(self) -> int: ...

    @property
    def shard_count(self) -> int: ...

    def shard(self, index: int) -> SnapshotShard: ...

    def place(self, piece: int) -> SnapshotPlace: ...

    def memory_bytes(self, place: SnapshotPlace) -> int:
        """That its piece takes: whole blocks, some 5 MiB at most."""

    def runs(self, tile: SnapshotPlace) -> list[SnapshotRun]:
        """In the order of the tile's elements."""

RANKS_MAX: int = 16

class RanksReport:
    """The ranks of a job, none of which has left."""

    @property
    def start(self) -> int:
        """Another one where all ranks were started again."""

    @property
    def names(self) -> list[str]:
        """By rank, for people."""

    @property
    def sessions(self) -> list[int]:
        """By rank; 0: it has not attached."""

class CheckFinding:
    @property
    def is_lost(self) -> bool:
        """False: a warning, which harms nobody."""

    @property
    def path(self) -> str: ...

    @property
    def offset_bytes(self) -> int: ...

    @property
    def length_bytes(self) -> int: ...

    @property
    def job(self) -> str: ...

    @property
    def snapshot(self) -> str:
        """The job's snapshot; empty: its last commit."""

    @property
    def shards(self) -> list[str]: ...

    @property
    def part(self) -> str: ...

    @property
    def reason(self) -> str: ...

class CheckedSnapshot:
    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """Its catalogue is damaged: nothing more is known of it."""

    @property
    def extent_count(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def lost_shards(self) -> list[str]: ...

class CheckedJob:
    @property
    def job_id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def shard_count(self) -> int: ...

    @property
    def extent_count(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def lost_shards(self) -> list[str]: ...

    @property
    def snapshots(self) -> list[CheckedSnapshot]: ...

class CheckedVolume:
    @property
    def directory(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def holder(self) -> str:
        """The daemon that has it open; empty: none."""

    @property
    def uuid(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def format(self) -> str: ...

    @property
    def features(self) -> list[int]:
        """Incompatible, read-only compatible, compatible."""

    @property
    def damaged_superblock_offsets(self) -> list[int]: ...

class CheckReport:
    @property
    def volumes(self) -> list[CheckedVolume]: ...

    @property
    def jobs(self) -> list[CheckedJob]: ...

    @property
    def findings(self) -> list[CheckFinding]: ...

    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def anything_lost(self) -> bool: ...

class LiveCheckProgress:
    """A daemon's own check, as far as it is."""

    @property
    def bytes(self) -> int: ...

    @property
    def bytes_all(self) -> int: ...

    @property
    def findings(self) -> list[CheckFinding]: ...

    @property
    def report(self) -> CheckReport | None: ...

class ListedVolumes:
    @property
    def volumes(self) -> list[CheckedVolume]: ...

    @property
    def jobs(self) -> list[CheckedJob]: ...

    @property
    def jobs_unknown(self) -> str: ...

def check_volumes(directories: Sequence[str], *, job: str = '', progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """
    Reads and compares all that volumes without a daemon should hold. `progress` is told bytes done and bytes in all, ten times a second; an exception of it ends the check.
    """

def list_volumes(directories: Sequence[str]) -> ListedVolumes:
    """Superblocks and jobs of a set, which a daemon may have open."""

def inspect_volume(directory: str) -> CheckedVolume:
    """
    The superblocks of one volume, whether or not the rest of its set is there.
    """

def format_volumes(directories: Sequence[str], *, nvme_bytes: int, progress: Callable[[int, int], None] | None = None) -> float:
    """
    Makes a set in empty directories as a daemon's first start does; its seconds.
    """

def remove_volumes(directories: Sequence[str], *, uuid: bytes) -> None:
    """
    Removes the volumes of the set `uuid` (16 bytes), which no daemon has open.
    """

EXTENTS_ARE_HASHED: bool = True

class AdamRate:
    """Seconds of passes over all elements."""

    @property
    def bytes_per_element(self) -> int:
        """Read and written together."""

    @property
    def element_count(self) -> int: ...

    @property
    def update_seconds(self) -> list[float]: ...

    @property
    def traffic_seconds(self) -> list[float]:
        """
        The same reads and writes without the arithmetic, in turn with the updates.
        """

def measure_adam(*, dtype: int, element_count: int, tensor_count: int = 1, thread_count: int = 1, round_count: int = 5) -> AdamRate:
    """
    The update in memory beside the limit of that memory; `dtype` as in a ShardSpec.
    """

class HashRate:
    """Seconds of passes over all bytes."""

    @property
    def bytes(self) -> int: ...

    @property
    def hash_seconds(self) -> list[float]:
        """As the daemon computes checksums."""

    @property
    def plain_seconds(self) -> list[float]:
        """Without wide instructions."""

    @property
    def read_seconds(self) -> list[float]:
        """Reading alone."""

def measure_hash(*, bytes: int, round_count: int = 5) -> HashRate:
    """Checksums of extents beside the limit of memory, one thread."""

class Quantiles:
    """Seconds."""

    @property
    def p50(self) -> float: ...

    @property
    def p99(self) -> float: ...

class LeaseRate:
    """Seconds of leases, one record a round."""

    @property
    def resident(self) -> list[Quantiles]:
        """Lease and release without a request."""

    @property
    def atomics(self) -> list[Quantiles]:
        """Two atomic operations in shared memory."""

    @property
    def requested(self) -> list[Quantiles]:
        """The same lease by request."""

    @property
    def handed(self) -> list[Quantiles]:
        """A word to a thread that waits for it, and back."""

def measure_leases(session: ClientSession, *, shard_id: int, count: int, round_count: int) -> LeaseRate:
    """Leases of a resident shard, beside the least that each way could take."""

class IoRate:
    @property
    def read_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def cpu_seconds(self) -> float:
        """This process's."""

class IoBench:
    """A file of random bytes, removed with this object."""

    def __init__(self, directory: str, *, bytes: int) -> None: ...

    @property
    def path(self) -> str: ...

    @property
    def memory_path(self) -> str:
        """The buffers of the last run, for another process to map; empty before."""

    def through_queue(self, mix: str, *, block_bytes: int, depth: int, seconds: float, write_share: float = 0.5, gathered: bool = True) -> IoRate:
        """
        As the daemon transfers; `mix`: read, write or mixed, of which `write_share` writes. `gathered`: buffers lie together in runs of 2 MiB where the kernel has them.
        """

    def raw(self, mix: str, *, block_bytes: int, depth: int, seconds: float, write_share: float = 0.5, gathered: bool = True) -> IoRate:
        """io_uring with registered buffers and file, and nothing else."""
