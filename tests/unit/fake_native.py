"""`memd_native.Server` in plain Python, for tests of what stands around it.

Bytes lie in a dictionary; nothing is on disk, and a step counts without computing.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memd.refusal import StatusCode
from memd_native import MODE_OVERWRITE, STEP_SECONDS_BOUNDS, AdamSettings, ShardSpec, StatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memd_native import CheckedJob, CheckedVolume, CheckFinding

ELEMENT_BYTES = {1: 4, 2: 2, 3: 2, 4: 8, 5: 1, 6: 2, 7: 4, 8: 8, 9: 1, 10: 1}


def status_error(code: StatusCode, message: str) -> StatusError:
    error = StatusError(message)
    error.code = int(code)
    error.error_number = 0
    error.quota_name, error.quota_bytes = "", 0
    return error


@dataclass
class PoolReport:
    bytes: int
    segment_bytes: int = 4 << 20
    page_bytes: int = 4096
    locked: bool = True
    note: str = ""
    prefault_seconds: float = 0.01
    gathered_bytes: int = 0


@dataclass
class StartReport:
    pool: PoolReport
    volume_paths: list[str]
    volume_bytes: list[int]
    io_engine: str = "memory"
    io_engine_reason: str = "a test's"
    formatted: bool = True
    format_seconds: float = 0.02
    job_count: int = 0
    kept_note: str = ""
    load_notes: list[str] = field(default_factory=list)


@dataclass
class ShardInfo:
    shard_id: int
    spec: ShardSpec
    bytes: int
    generation: int = 0
    written: bool = False
    lost: bool = False
    unreadable: bool = False


@dataclass
class JobInfo:
    job_id: int
    name: str
    uid: int
    created: bool
    host_bytes: int
    nvme_bytes: int
    committed_step: int = 0
    durable_step: int = 0
    durability: str = "step"
    weight: float = 1.0
    session_count: int = 0
    host_bytes_used: int = 0
    nvme_bytes_used: int = 0
    metadata_bytes: int = 0
    snapshot_bytes: int = 0
    host_tier_bytes: int = 0
    snapshot_count: int = 0
    shard_count: int = 0
    element_count: int = 0
    lease_count: int = 0
    lost_shards: list[str] = field(default_factory=list)
    unreadable_shards: list[str] = field(default_factory=list)


@dataclass
class SessionGrant:
    session_id: int
    session_fd: int
    table_fd: int
    doorbell_fd: int
    segment_bytes: int = 4 << 20
    arena_reserved_bytes: int = 64 << 20
    committed_step: int = 0
    durable_step: int = 0

    def __del__(self) -> None:
        for fd in (self.session_fd, self.table_fd, self.doorbell_fd):
            os.close(fd)


@dataclass(frozen=True)
class KeptSession:
    session_id: int
    job_id: int
    pid: int
    start_time: int
    uid: int


@dataclass(frozen=True)
class RanksReport:
    start: int
    names: list[str]
    sessions: list[int]


@dataclass
class StepReport:
    committed_step: int
    durable_step: int = 0
    read_seconds: float = 0.0
    update_seconds: float = 0.0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    disk_error: str = ""


@dataclass
class SecondsHistogram:
    """Three observations, the first below the first bound."""

    sum_seconds: float = 0.75
    counts: list[int] = field(default_factory=lambda: [1, 2] + [0] * (len(STEP_SECONDS_BOUNDS) - 1))


@dataclass
class StepPhases:
    read: SecondsHistogram = field(default_factory=SecondsHistogram)
    update: SecondsHistogram = field(default_factory=SecondsHistogram)
    write: SecondsHistogram = field(default_factory=SecondsHistogram)
    commit: SecondsHistogram = field(default_factory=SecondsHistogram)


@dataclass
class IoKindStatistics:
    bytes: int
    seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    error_count_by_errno: dict[int, int] = field(default_factory=dict)

    @property
    def error_count(self) -> int:
        return sum(self.error_count_by_errno.values())


@dataclass
class DeviceStatistics:
    path: str
    bytes: int
    bytes_free: int
    checksum_failures: int = 2
    fenced: bool = False
    io_depth: int = 16
    io_chunk_bytes: int = 1 << 20
    read: IoKindStatistics = field(default_factory=lambda: IoKindStatistics(8192))
    write: IoKindStatistics = field(
        default_factory=lambda: IoKindStatistics(4096, error_count_by_errno={errno.ENOSPC: 3})
    )
    sync: IoKindStatistics = field(default_factory=lambda: IoKindStatistics(0))


@dataclass
class JobStatistics:
    job: JobInfo
    arena_bytes: int = 0
    arena_bytes_used: int = 0
    private_bytes: int = 0
    private_bytes_used: int = 0
    lease_hits: int = 3
    lease_misses: int = 1
    lease_wait_seconds: float = 0.5
    lease_wait_reason_seconds: dict[str, float] = field(
        default_factory=lambda: {"disk": 0.25, "room": 0.125}
    )
    step_wall_seconds: float = 2.0
    stall_phase_seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"forward": {"disk": 0.5, "ring": 0.25}}
    )
    stall_group_seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"h.*.attn": {"disk": 0.5, "ring": 0.25}}
    )
    fetched_bytes: int = 0
    prefetched_bytes: int = 0
    prefetch_unused_bytes: int = 0
    prefetch_hits: int = 5
    prefetch_late: int = 2
    uses_foreseen: int = 8
    uses_unforeseen: int = 1
    plan_moved_bytes: int = 21
    plan_necessary_bytes: int = 20
    early_tiles_adopted: int = 4
    early_tiles_discarded: dict[str, int] = field(
        default_factory=lambda: {"settings": 2, "failed": 0}
    )
    evicted_bytes: int = 0
    spilled_bytes: int = 0


@dataclass
class ScrubStatistics:
    bytes_per_second: int = 0
    bytes: int = 4096
    errors: int = 1
    pass_count: int = 2
    last_pass_age_seconds: float = 60.0
    in_pass: bool = True
    pass_bytes: int = 1 << 20
    pass_bytes_all: int = 4 << 20
    last_error: str = "shard gpt/wte.weight: its bytes are gone"


@dataclass
class TurnStatistics:
    cpu_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    wall_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    cpu_seconds_max: float = 0.001
    wall_seconds_max: float = 0.002
    phases_of_cpu_max: dict[str, float] = field(default_factory=lambda: {"serve": 0.00075})
    phases_of_wall_max: dict[str, float] = field(default_factory=lambda: {"commands": 0.0015})


@dataclass
class SnapshotReadingStatistics:
    count: int = 2
    bytes: int = 12288
    errors: int = 1


@dataclass
class ServerStatistics:
    pool: PoolReport
    pool_bytes_free: int
    nvme_bytes: int
    nvme_bytes_free: int
    nvme_bytes_of_snapshots: int
    devices: list[DeviceStatistics]
    jobs: list[JobStatistics]
    session_count: int
    fence_reason: str = ""
    ring_protocol_errors: int = 0
    room_wait_seconds: float = 0.25
    step_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    commit_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    step_phases: StepPhases = field(default_factory=StepPhases)
    turns: TurnStatistics = field(default_factory=TurnStatistics)
    scrub: ScrubStatistics = field(default_factory=ScrubStatistics)
    exports: SnapshotReadingStatistics = field(default_factory=SnapshotReadingStatistics)


@dataclass
class Activity:
    kind: str
    job: str = ""
    uid: int = 0
    what: str = ""
    waits_on: str = ""
    priority: str = ""
    age_seconds: float = 1.5


@dataclass
class CheckReport:
    volumes: list[CheckedVolume] = field(default_factory=list)
    jobs: list[CheckedJob] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class LiveCheckProgress:
    bytes: int
    bytes_all: int
    findings: list[CheckFinding] = field(default_factory=list)
    report: CheckReport | None = None


@dataclass
class Shard:
    info: ShardInfo
    value: bytearray


@dataclass
class Job:
    info: JobInfo
    shards: dict[str, Shard] = field(default_factory=dict)

    def by_id(self, shard_id: int) -> Shard:
        return next(each for each in self.shards.values() if each.info.shard_id == shard_id)


class FakeLease:
    def __init__(self, shard: Shard, mode: int, *, ends: Callable[[], None]) -> None:
        self._shard = shard
        self._mode = mode
        self._ends = ends
        self._bytes = bytearray(len(shard.value)) if mode == MODE_OVERWRITE else shard.value

    def memory(self) -> memoryview:
        return memoryview(self._bytes)

    def release(self) -> None:
        self._shard.value = self._bytes
        if self._mode == MODE_OVERWRITE:
            self._shard.info.written = True
        self._ends()

    def discard(self) -> None:
        self._bytes = self._shard.value
        self._ends()


class FakeMomentsWrite:
    """It took effect when it was begun."""

    def wait(self, *, timeout_s: float) -> None:
        del timeout_s


class FakeServer:
    """What `detached` and `calls` say is what the tests look at."""

    def __init__(self) -> None:
        self._host_bytes = 64 << 20
        self._nvme_bytes = 1 << 30
        self.load_notes: list[str] = []
        self._lock = threading.RLock()
        self._jobs: dict[int, Job] = {}
        self._sessions: dict[int, int] = {}
        self._ids = iter(range(1, 1 << 30))
        self._beats = 0
        self.fence_reason = ""
        self.scrub_rate = 0
        self.checks: dict[int, tuple[list[int], bool]] = {}  # running: jobs, and whether whole
        self.checks_begun: list[tuple[list[int], bool]] = []
        self.activities: list[Activity] = []
        self.detached: dict[int, float] = {}  # session → when, by the monotonic clock
        self.detached_before_redo: set[int] | None = None
        self.disk_error = ""  # of the steps to come
        self.calls: Counter[str] = Counter()
        self.leases_begun = 0
        self.leases_ended = 0
        self.before_sync: Callable[[], object] = lambda: None
        self.before_step: Callable[[], object] = lambda: None
        self.rank_sessions: dict[int, list[int]] = {}  # job → session of each rank
        self.expected: list[tuple[AdamSettings, list[int]]] = []
        self.moments: dict[int, tuple[bytearray, bytearray, bytearray]] = {}

    def report(self) -> StartReport:
        return StartReport(
            PoolReport(self._host_bytes), ["/volume"], [self._nvme_bytes], job_count=0
        )

    def open_job(
        self,
        name: str,
        *,
        uid: int,
        host_bytes: int = 0,
        nvme_bytes: int = 0,
        fresh: bool = False,
        durability: str = "",
    ) -> JobInfo:
        with self._lock:
            for job in self._jobs.values():
                if job.info.name == name:
                    if fresh:
                        job.shards.clear()
                    return replace(job.info, created=False)
            if host_bytes > self._host_bytes:
                raise status_error(
                    StatusCode.CAPACITY, f"{host_bytes} bytes wanted, {self._host_bytes} free"
                )
            info = JobInfo(
                job_id=next(self._ids),
                name=name,
                uid=uid,
                created=True,
                host_bytes=host_bytes or self._host_bytes // 2,
                nvme_bytes=nvme_bytes or self._nvme_bytes // 2,
                durability=durability or "step",
            )
            self._jobs[info.job_id] = Job(info)
            return info

    def jobs(self) -> list[JobInfo]:
        with self._lock:
            attached = Counter(self._sessions.values())
            return [
                replace(
                    job.info, session_count=attached[job.info.job_id], shard_count=len(job.shards)
                )
                for job in self._jobs.values()
            ]

    def shards(
        self, job_id: int, *, first: int = 0, count_max: int | None = None
    ) -> list[ShardInfo]:
        infos = [shard.info for shard in self._jobs[job_id].shards.values()]
        return [info for info in infos if info.shard_id >= first][:count_max]

    def find_shard(self, job_id: int, name: str) -> ShardInfo:
        if name not in self._jobs[job_id].shards:
            raise status_error(StatusCode.NOT_FOUND, f"the job holds nothing named {name}")
        return self._jobs[job_id].shards[name].info

    def drop_job(self, job_id: int, *, force: bool = False) -> None:
        with self._lock:
            if job_id in self._sessions.values() and not force:
                raise status_error(StatusCode.IN_USE, "sessions are attached; use --force")
            del self._jobs[job_id]

    def set_job_weight(self, job_id: int, weight: float) -> None:
        with self._lock:
            self._jobs[job_id].info.weight = weight

    def attach(
        self,
        job_id: int,
        *,
        pid: int = 0,
        start_time: int = 0,
        uid: int = 0,
        timeout_s: float = 60.0,
    ) -> SessionGrant:
        del pid, start_time, uid, timeout_s
        with self._lock:
            session_id = next(self._ids)
            self._sessions[session_id] = job_id
        return self._grant(session_id)

    def resume_session(
        self, session_id: int, *, pid: int, start_time: int, uid: int
    ) -> SessionGrant:
        del pid, start_time, uid
        return self._grant(session_id)

    def _grant(self, session_id: int) -> SessionGrant:
        info = self._job(session_id).info
        session, table, doorbell = (
            os.memfd_create(name) for name in ("session", "table", "doorbell")
        )
        return SessionGrant(
            session_id,
            session,
            table,
            doorbell,
            committed_step=info.committed_step,
            durable_step=info.durable_step,
        )

    def closing_step(self, job_id: int) -> int:
        """Steps are over when they are answered."""
        del job_id
        return 0

    def sessions(self) -> set[int]:
        """Of the fake alone."""
        with self._lock:
            return set(self._sessions)

    def segment_fds(self, session_id: int, first: int) -> list[int]:
        self._job(session_id)
        return [os.memfd_create(f"segment-{first + index}") for index in range(2)]

    def detach(self, session_id: int) -> int:
        with self._lock:
            del self._sessions[session_id]
            self.detached[session_id] = time.monotonic()
            return 2

    def redo_steps(self) -> None:
        assert self.detached_before_redo is None
        self.detached_before_redo = set(self.detached)

    def declare(self, session_id: int, shards: Iterable[ShardSpec]) -> tuple[list[ShardInfo], bool]:
        job = self._job(session_id)
        infos = []
        for spec in shards:
            if spec.name not in job.shards:
                size_bytes = math.prod(spec.shape) * ELEMENT_BYTES[spec.dtype]
                info = ShardInfo(next(self._ids), spec, size_bytes)
                job.shards[spec.name] = Shard(info, bytearray(size_bytes))
            known = job.shards[spec.name].info
            if (known.spec.dtype, list(known.spec.shape)) != (spec.dtype, list(spec.shape)):
                raise status_error(StatusCode.ALREADY_EXISTS, f"{spec.name!r} has another shape")
            infos.append(known)
        return infos, True

    def step(
        self,
        session_id: int,
        groups: Sequence[tuple[AdamSettings, Sequence[int]]],
        *,
        staged_buffers: Sequence[tuple[int, int]] = (),
        step: int = 0,
        call: int = 0,
        other_ranks: Sequence[tuple[int, int]] = (),
        timeout_s: float,
    ) -> StepReport:
        del step, call, other_ranks
        self.before_step()
        job = self._job(session_id)
        job.info.committed_step += 1
        return StepReport(
            job.info.committed_step,
            written_bytes=sum(len(ids) for _, ids in groups),
            disk_error=self.disk_error,
        )

    def ranks(self, session_id: int) -> RanksReport:
        with self._lock:
            sessions = list(self.rank_sessions[self._sessions[session_id]])
        return RanksReport(1, [f"rank {rank}" for rank in range(len(sessions))], sessions)

    def end_gradients(self, session_id: int) -> None:
        self._job(session_id)

    def gradients_of_other_ranks(self, session_id: int) -> list[int]:
        self._job(session_id)
        return []

    def expect_step(
        self, session_id: int, groups: Sequence[tuple[AdamSettings, Sequence[int]]]
    ) -> None:
        self._job(session_id)
        self.expected = [(settings, list(ids)) for settings, ids in groups]

    def sync(self, session_id: int, *, timeout_s: float) -> StepReport:
        self.calls["sync"] += 1
        self.before_sync()
        return StepReport(self._job(session_id).info.committed_step)

    def drop_gradients(self, session_id: int, shard_ids: Sequence[int]) -> None:
        self.calls["drop_gradients"] += 1

    def delete_shard(self, session_id: int, name: str) -> bool:
        return self._job(session_id).shards.pop(name, None) is not None

    def lease(
        self, session_id: int, shard_id: int, *, part: int = 0, mode: int = 0, timeout_s: float
    ) -> FakeLease:
        with self._lock:
            self.leases_begun += 1
        return FakeLease(self._job(session_id).by_id(shard_id), mode, ends=self._end_lease)

    def _end_lease(self) -> None:
        with self._lock:
            self.leases_ended += 1

    def read_moments(
        self,
        session_id: int,
        shard_id: int,
        element_first: int,
        element_count: int,
        *,
        with_master: bool,
        timeout_s: float,
    ) -> tuple[bytes, bytes, bytes, bytes]:
        assert not with_master  # it updates no values
        first, second, maximum = self._moments_of(session_id, shard_id)
        part = slice(4 * element_first, 4 * (element_first + element_count))
        if not 0 <= part.start < part.stop <= len(first):
            raise status_error(StatusCode.INVALID_ARGUMENT, "ask for elements of the shard")
        return bytes(first[part]), bytes(second[part]), bytes(maximum[part]), b""

    def begin_write_moments(
        self,
        session_id: int,
        shard_id: int,
        generation: int,
        element_first: int,
        exp_avg: bytes,
        exp_avg_sq: bytes,
        max_exp_avg_sq: bytes,
        master: bytes,
    ) -> FakeMomentsWrite:
        assert not master, "this fake has no bfloat16 parameters"
        first, second, maximum = self._moments_of(session_id, shard_id)
        part = slice(4 * element_first, 4 * element_first + len(exp_avg))
        first[part], second[part] = exp_avg, exp_avg_sq
        if max_exp_avg_sq:
            maximum.extend(bytes(len(first) - len(maximum)))
            maximum[part] = max_exp_avg_sq
        else:
            maximum.clear()
        self._job(session_id).by_id(shard_id).info.generation = generation
        return FakeMomentsWrite()

    def begin_write_staged_moments(
        self,
        session_id: int,
        shard_id: int,
        generation: int,
        element_first: int,
        staged_shard_id: int,
        has_maximum: bool,
        has_master: bool,
        *,
        timeout_s: float,
    ) -> FakeMomentsWrite:
        assert not has_master, "this fake has no bfloat16 parameters"
        lease = self.lease(session_id, staged_shard_id, timeout_s=timeout_s)
        staged = bytes(lease.memory())
        size = len(staged) // (3 if has_maximum else 2)
        write = self.begin_write_moments(
            session_id,
            shard_id,
            generation,
            element_first,
            staged[:size],
            staged[size : 2 * size],
            staged[2 * size :],
            b"",
        )
        lease.release()
        return write

    def bytes_of_maxima(self, session_id: int, shard_ids: Sequence[int]) -> int:
        job = self._job(session_id)
        gaining = [job.by_id(shard_id).info.spec for shard_id in shard_ids]
        return sum(4 * math.prod(spec.shape) for spec in gaining if not spec.keeps_maximum)

    def take_load_notes(self) -> list[str]:
        notes, self.load_notes = self.load_notes, []
        return notes

    def statistics(self) -> ServerStatistics:
        device = DeviceStatistics("/volume", self._nvme_bytes, self._nvme_bytes // 4)
        return ServerStatistics(
            pool=PoolReport(self._host_bytes),
            pool_bytes_free=self._host_bytes // 2,
            nvme_bytes=self._nvme_bytes,
            nvme_bytes_free=self._nvme_bytes // 4,
            nvme_bytes_of_snapshots=4096,
            devices=[device],
            jobs=[JobStatistics(job) for job in self.jobs()],
            session_count=len(self._sessions),
            fence_reason=self.fence_reason,
            scrub=ScrubStatistics(self.scrub_rate),
        )

    def begin_check(self, job_ids: Sequence[int], *, whole: bool) -> int:
        if self.checks:
            raise status_error(StatusCode.ALREADY_EXISTS, "a check runs since 1 s")
        check_id = next(self._ids)
        self.checks[check_id] = (list(job_ids), whole)
        self.checks_begun.append(self.checks[check_id])
        return check_id

    def check_progress(self, check_id: int) -> LiveCheckProgress:
        assert check_id in self.checks
        return LiveCheckProgress(bytes=7, bytes_all=7, report=CheckReport(seconds=0.5))

    def end_check(self, check_id: int) -> None:
        del self.checks[check_id]

    def set_scrub_rate(self, bytes_per_second: int) -> None:
        self.scrub_rate = bytes_per_second

    def in_flight(self) -> list[Activity]:
        return self.activities

    @property
    def outlives_process(self) -> bool:
        return False

    def heartbeat(self) -> int:
        self._beats += 1
        return self._beats

    def stop(self, *, timeout_s: float) -> None:
        self.calls["stop"] += 1

    def _job(self, session_id: int) -> Job:
        with self._lock:
            if session_id not in self._sessions:
                raise status_error(StatusCode.NOT_FOUND, f"no session {session_id}")
            return self._jobs[self._sessions[session_id]]

    def _moments_of(self, session_id: int, shard_id: int) -> tuple[bytearray, bytearray, bytearray]:
        """The last one is empty where the shard has no maximum."""
        element_count = math.prod(self._job(session_id).by_id(shard_id).info.spec.shape)
        return self.moments.setdefault(
            shard_id, (bytearray(4 * element_count), bytearray(4 * element_count), bytearray())
        )


def as_server(fake: FakeServer) -> Any:
    """For parameters that are typed as the native class."""
    return fake
