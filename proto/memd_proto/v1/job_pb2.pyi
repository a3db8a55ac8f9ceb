from memd_proto.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_PART_UNSPECIFIED: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_VALUE: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_EXP_AVG: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_EXP_AVG_SQ: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_MAX_EXP_AVG_SQ: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_MASTER: _ClassVar[SnapshotPart]
SNAPSHOT_PART_UNSPECIFIED: SnapshotPart
SNAPSHOT_PART_VALUE: SnapshotPart
SNAPSHOT_PART_EXP_AVG: SnapshotPart
SNAPSHOT_PART_EXP_AVG_SQ: SnapshotPart
SNAPSHOT_PART_MAX_EXP_AVG_SQ: SnapshotPart
SNAPSHOT_PART_MASTER: SnapshotPart

class Job(_message.Message):
    __slots__ = ("job_id", "name", "uid", "committed_step", "session_count", "host_bytes", "host_bytes_used", "nvme_bytes", "nvme_bytes_used", "shard_count", "element_count", "lease_count", "lost_shards", "durability", "durable_step", "unreadable_shards", "lost_shard_count", "weight", "snapshot_count", "snapshot_bytes", "host_tier_bytes", "counters")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_SHARDS_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    name: str
    uid: int
    committed_step: int
    session_count: int
    host_bytes: int
    host_bytes_used: int
    nvme_bytes: int
    nvme_bytes_used: int
    shard_count: int
    element_count: int
    lease_count: int
    lost_shards: _containers.RepeatedScalarFieldContainer[str]
    durability: str
    durable_step: int
    unreadable_shards: _containers.RepeatedScalarFieldContainer[str]
    lost_shard_count: int
    weight: float
    snapshot_count: int
    snapshot_bytes: int
    host_tier_bytes: int
    counters: JobCounters
    def __init__(self, job_id: _Optional[int] = ..., name: _Optional[str] = ..., uid: _Optional[int] = ..., committed_step: _Optional[int] = ..., session_count: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_bytes_used: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., nvme_bytes_used: _Optional[int] = ..., shard_count: _Optional[int] = ..., element_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., lost_shards: _Optional[_Iterable[str]] = ..., durability: _Optional[str] = ..., durable_step: _Optional[int] = ..., unreadable_shards: _Optional[_Iterable[str]] = ..., lost_shard_count: _Optional[int] = ..., weight: _Optional[float] = ..., snapshot_count: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., host_tier_bytes: _Optional[int] = ..., counters: _Optional[_Union[JobCounters, _Mapping]] = ...) -> None: ...

class JobCounters(_message.Message):
    __slots__ = ("fetched_bytes", "spilled_bytes", "step_wall_seconds", "stalls")
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    fetched_bytes: int
    spilled_bytes: int
    step_wall_seconds: float
    stalls: _containers.RepeatedCompositeFieldContainer[Stall]
    def __init__(self, fetched_bytes: _Optional[int] = ..., spilled_bytes: _Optional[int] = ..., step_wall_seconds: _Optional[float] = ..., stalls: _Optional[_Iterable[_Union[Stall, _Mapping]]] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("phase", "reason", "seconds")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    reason: str
    seconds: float
    def __init__(self, phase: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_first",)
    PAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    page_first: int
    def __init__(self, page_first: _Optional[int] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "page_next")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    PAGE_NEXT_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    page_next: int
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., page_next: _Optional[int] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("name", "page_first")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_first: int
    def __init__(self, name: _Optional[str] = ..., page_first: _Optional[int] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job", "shards", "page_next")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_NEXT_FIELD_NUMBER: _ClassVar[int]
    job: Job
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.Shard]
    page_next: int
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.Shard, _Mapping]]] = ..., page_next: _Optional[int] = ...) -> None: ...

class DropJobRequest(_message.Message):
    __slots__ = ("name", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    force: bool
    def __init__(self, name: _Optional[str] = ..., force: bool = ...) -> None: ...

class DropJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetJobWeightRequest(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class SetJobWeightResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("name", "step", "created_s", "bytes", "is_lost", "lost_shards", "lost_shard_count", "is_exported", "exported_part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_EXPORTED_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    created_s: int
    bytes: int
    is_lost: bool
    lost_shards: _containers.RepeatedScalarFieldContainer[str]
    lost_shard_count: int
    is_exported: bool
    exported_part: float
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., created_s: _Optional[int] = ..., bytes: _Optional[int] = ..., is_lost: bool = ..., lost_shards: _Optional[_Iterable[str]] = ..., lost_shard_count: _Optional[int] = ..., is_exported: bool = ..., exported_part: _Optional[float] = ...) -> None: ...

class CreateSnapshotRequest(_message.Message):
    __slots__ = ("job", "name", "number", "session_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    number: int
    session_id: int
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., number: _Optional[int] = ..., session_id: _Optional[int] = ...) -> None: ...

class CreateSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "is_load")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_LOAD_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    is_load: bool
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., is_load: bool = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots",)
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    def __init__(self, snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ...) -> None: ...

class RestoreSnapshotRequest(_message.Message):
    __slots__ = ("job", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RestoreSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...

class DropSnapshotRequest(_message.Message):
    __slots__ = ("job", "name", "session_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    session_id: int
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., session_id: _Optional[int] = ...) -> None: ...

class DropSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadSnapshotRequest(_message.Message):
    __slots__ = ("job", "name", "piece_first", "identity")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIRST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    piece_first: int
    identity: int
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., piece_first: _Optional[int] = ..., identity: _Optional[int] = ...) -> None: ...

class ReadSnapshotResponse(_message.Message):
    __slots__ = ("contents", "shards", "runs", "piece_next")
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PIECE_NEXT_FIELD_NUMBER: _ClassVar[int]
    contents: SnapshotContents
    shards: _containers.RepeatedCompositeFieldContainer[SnapshotShard]
    runs: _containers.RepeatedCompositeFieldContainer[SnapshotRun]
    piece_next: int
    def __init__(self, contents: _Optional[_Union[SnapshotContents, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[SnapshotShard, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[SnapshotRun, _Mapping]]] = ..., piece_next: _Optional[int] = ...) -> None: ...

class SnapshotContents(_message.Message):
    __slots__ = ("snapshot", "identity", "shard_count", "piece_first", "piece_count", "reading_id")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIRST_FIELD_NUMBER: _ClassVar[int]
    PIECE_COUNT_FIELD_NUMBER: _ClassVar[int]
    READING_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    identity: int
    shard_count: int
    piece_first: int
    piece_count: int
    reading_id: int
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., identity: _Optional[int] = ..., shard_count: _Optional[int] = ..., piece_first: _Optional[int] = ..., piece_count: _Optional[int] = ..., reading_id: _Optional[int] = ...) -> None: ...

class SnapshotShard(_message.Message):
    __slots__ = ("spec", "generation", "written", "has_moments")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    HAS_MOMENTS_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ShardSpec
    generation: int
    written: bool
    has_moments: bool
    def __init__(self, spec: _Optional[_Union[_types_pb2.ShardSpec, _Mapping]] = ..., generation: _Optional[int] = ..., written: bool = ..., has_moments: bool = ...) -> None: ...

class SnapshotRun(_message.Message):
    __slots__ = ("shard", "part", "offset_bytes", "memory_offset_bytes", "length_bytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    part: SnapshotPart
    offset_bytes: int
    memory_offset_bytes: int
    length_bytes: int
    def __init__(self, shard: _Optional[int] = ..., part: _Optional[_Union[SnapshotPart, str]] = ..., offset_bytes: _Optional[int] = ..., memory_offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...
