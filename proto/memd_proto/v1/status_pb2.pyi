from memd_proto.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "uptime_seconds", "pool", "devices", "jobs", "io_engine", "io_engine_reason", "fence_reason", "scrub", "jobs_page_next")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    IO_ENGINE_FIELD_NUMBER: _ClassVar[int]
    IO_ENGINE_REASON_FIELD_NUMBER: _ClassVar[int]
    FENCE_REASON_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    JOBS_PAGE_NEXT_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    pool: Pool
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    jobs: _containers.RepeatedCompositeFieldContainer[_job_pb2.Job]
    io_engine: str
    io_engine_reason: str
    fence_reason: str
    scrub: Scrub
    jobs_page_next: int
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[_job_pb2.Job, _Mapping]]] = ..., io_engine: _Optional[str] = ..., io_engine_reason: _Optional[str] = ..., fence_reason: _Optional[str] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ..., jobs_page_next: _Optional[int] = ...) -> None: ...

class Scrub(_message.Message):
    __slots__ = ("bytes_per_second", "bytes", "error_count", "pass_count", "last_pass_age_seconds", "in_pass", "pass_bytes", "pass_bytes_all", "last_error")
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_PASS_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_PASS_FIELD_NUMBER: _ClassVar[int]
    PASS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PASS_BYTES_ALL_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: int
    bytes: int
    error_count: int
    pass_count: int
    last_pass_age_seconds: float
    in_pass: bool
    pass_bytes: int
    pass_bytes_all: int
    last_error: str
    def __init__(self, bytes_per_second: _Optional[int] = ..., bytes: _Optional[int] = ..., error_count: _Optional[int] = ..., pass_count: _Optional[int] = ..., last_pass_age_seconds: _Optional[float] = ..., in_pass: bool = ..., pass_bytes: _Optional[int] = ..., pass_bytes_all: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("bytes", "bytes_free", "segment_bytes", "page_bytes", "locked", "note")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    bytes_free: int
    segment_bytes: int
    page_bytes: int
    locked: bool
    note: str
    def __init__(self, bytes: _Optional[int] = ..., bytes_free: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., page_bytes: _Optional[int] = ..., locked: bool = ..., note: _Optional[str] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("path", "bytes", "bytes_free", "read_bytes", "written_bytes", "read_seconds", "write_seconds", "error_count", "io_depth", "io_chunk_bytes", "inflight_count", "waiting_count")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    IO_DEPTH_FIELD_NUMBER: _ClassVar[int]
    IO_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    bytes_free: int
    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float
    error_count: int
    io_depth: int
    io_chunk_bytes: int
    inflight_count: int
    waiting_count: int
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., bytes_free: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., error_count: _Optional[int] = ..., io_depth: _Optional[int] = ..., io_chunk_bytes: _Optional[int] = ..., inflight_count: _Optional[int] = ..., waiting_count: _Optional[int] = ...) -> None: ...

class InFlightRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InFlightResponse(_message.Message):
    __slots__ = ("activities",)
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    activities: _containers.RepeatedCompositeFieldContainer[Activity]
    def __init__(self, activities: _Optional[_Iterable[_Union[Activity, _Mapping]]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("kind", "job", "what", "waits_on", "seconds", "priority")
    KIND_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WAITS_ON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    job: str
    what: str
    waits_on: str
    seconds: float
    priority: str
    def __init__(self, kind: _Optional[str] = ..., job: _Optional[str] = ..., what: _Optional[str] = ..., waits_on: _Optional[str] = ..., seconds: _Optional[float] = ..., priority: _Optional[str] = ...) -> None: ...
