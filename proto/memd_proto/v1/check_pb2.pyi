from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("bytes", "bytes_all", "findings", "report")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_ALL_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    bytes_all: int
    findings: _containers.RepeatedCompositeFieldContainer[CheckFinding]
    report: CheckReport
    def __init__(self, bytes: _Optional[int] = ..., bytes_all: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[CheckFinding, _Mapping]]] = ..., report: _Optional[_Union[CheckReport, _Mapping]] = ...) -> None: ...

class CheckFinding(_message.Message):
    __slots__ = ("is_lost", "path", "offset_bytes", "length_bytes", "job", "shards", "part", "reason", "snapshot")
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    is_lost: bool
    path: str
    offset_bytes: int
    length_bytes: int
    job: str
    shards: _containers.RepeatedScalarFieldContainer[str]
    part: str
    reason: str
    snapshot: str
    def __init__(self, is_lost: bool = ..., path: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., job: _Optional[str] = ..., shards: _Optional[_Iterable[str]] = ..., part: _Optional[str] = ..., reason: _Optional[str] = ..., snapshot: _Optional[str] = ...) -> None: ...

class CheckReport(_message.Message):
    __slots__ = ("volumes", "jobs", "seconds")
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedCompositeFieldContainer[CheckedVolume]
    jobs: _containers.RepeatedCompositeFieldContainer[CheckedJob]
    seconds: float
    def __init__(self, volumes: _Optional[_Iterable[_Union[CheckedVolume, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[CheckedJob, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class CheckedVolume(_message.Message):
    __slots__ = ("path", "bytes", "uuid", "index", "sequence", "format", "features", "holder", "damaged_superblock_offsets")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_SUPERBLOCK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    uuid: str
    index: int
    sequence: int
    format: str
    features: _containers.RepeatedScalarFieldContainer[int]
    holder: str
    damaged_superblock_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., uuid: _Optional[str] = ..., index: _Optional[int] = ..., sequence: _Optional[int] = ..., format: _Optional[str] = ..., features: _Optional[_Iterable[int]] = ..., holder: _Optional[str] = ..., damaged_superblock_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckedJob(_message.Message):
    __slots__ = ("name", "job_id", "step", "shard_count", "extent_count", "bytes", "lost_shards", "snapshots")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    job_id: int
    step: int
    shard_count: int
    extent_count: int
    bytes: int
    lost_shards: _containers.RepeatedScalarFieldContainer[str]
    snapshots: _containers.RepeatedCompositeFieldContainer[CheckedSnapshot]
    def __init__(self, name: _Optional[str] = ..., job_id: _Optional[int] = ..., step: _Optional[int] = ..., shard_count: _Optional[int] = ..., extent_count: _Optional[int] = ..., bytes: _Optional[int] = ..., lost_shards: _Optional[_Iterable[str]] = ..., snapshots: _Optional[_Iterable[_Union[CheckedSnapshot, _Mapping]]] = ...) -> None: ...

class CheckedSnapshot(_message.Message):
    __slots__ = ("name", "step", "extent_count", "bytes", "lost_shards", "is_lost")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    extent_count: int
    bytes: int
    lost_shards: _containers.RepeatedScalarFieldContainer[str]
    is_lost: bool
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., extent_count: _Optional[int] = ..., bytes: _Optional[int] = ..., lost_shards: _Optional[_Iterable[str]] = ..., is_lost: bool = ...) -> None: ...
