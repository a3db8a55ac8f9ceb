from memd_proto.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "job", "rank", "world_size", "host_bytes", "nvme_bytes", "durability", "fresh", "without_shared_memory", "kept_session_id", "protocol_range")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    KEPT_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_RANGE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    job: str
    rank: int
    world_size: int
    host_bytes: int
    nvme_bytes: int
    durability: str
    fresh: bool
    without_shared_memory: bool
    kept_session_id: int
    protocol_range: _types_pb2.ProtocolRange
    def __init__(self, protocol_version: _Optional[int] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., host_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., durability: _Optional[str] = ..., fresh: bool = ..., without_shared_memory: bool = ..., kept_session_id: _Optional[int] = ..., protocol_range: _Optional[_Union[_types_pb2.ProtocolRange, _Mapping]] = ...) -> None: ...

class RankCall(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session_id", "job_id", "created", "committed_step", "host_bytes", "nvme_bytes", "segment_bytes", "arena_reserved_bytes", "kept", "closing_step", "durable_step", "can_maximize", "can_amsgrad", "daemon_id", "can_take_staged_moments", "can_take_masters", "can_load_in_place", "can_keep_rank_sums", "can_give_masters", "can_keep_scratch", "protocol_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CLOSING_STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    CAN_MAXIMIZE_FIELD_NUMBER: _ClassVar[int]
    CAN_AMSGRAD_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ID_FIELD_NUMBER: _ClassVar[int]
    CAN_TAKE_STAGED_MOMENTS_FIELD_NUMBER: _ClassVar[int]
    CAN_TAKE_MASTERS_FIELD_NUMBER: _ClassVar[int]
    CAN_LOAD_IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    CAN_KEEP_RANK_SUMS_FIELD_NUMBER: _ClassVar[int]
    CAN_GIVE_MASTERS_FIELD_NUMBER: _ClassVar[int]
    CAN_KEEP_SCRATCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    job_id: int
    created: bool
    committed_step: int
    host_bytes: int
    nvme_bytes: int
    segment_bytes: int
    arena_reserved_bytes: int
    kept: bool
    closing_step: int
    durable_step: int
    can_maximize: bool
    can_amsgrad: bool
    daemon_id: str
    can_take_staged_moments: bool
    can_take_masters: bool
    can_load_in_place: bool
    can_keep_rank_sums: bool
    can_give_masters: bool
    can_keep_scratch: bool
    protocol_version: int
    def __init__(self, session_id: _Optional[int] = ..., job_id: _Optional[int] = ..., created: bool = ..., committed_step: _Optional[int] = ..., host_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., arena_reserved_bytes: _Optional[int] = ..., kept: bool = ..., closing_step: _Optional[int] = ..., durable_step: _Optional[int] = ..., can_maximize: bool = ..., can_amsgrad: bool = ..., daemon_id: _Optional[str] = ..., can_take_staged_moments: bool = ..., can_take_masters: bool = ..., can_load_in_place: bool = ..., can_keep_rank_sums: bool = ..., can_give_masters: bool = ..., can_keep_scratch: bool = ..., protocol_version: _Optional[int] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("leases_dropped",)
    LEASES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    leases_dropped: int
    def __init__(self, leases_dropped: _Optional[int] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ("session_id", "shards", "declaration", "shards_before", "more_follows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardSpec]
    declaration: int
    shards_before: int
    more_follows: bool
    def __init__(self, session_id: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.ShardSpec, _Mapping]]] = ..., declaration: _Optional[int] = ..., shards_before: _Optional[int] = ..., more_follows: bool = ...) -> None: ...

class DeclareResponse(_message.Message):
    __slots__ = ("shards", "gradients_fit")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIT_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.Shard]
    gradients_fit: bool
    def __init__(self, shards: _Optional[_Iterable[_Union[_types_pb2.Shard, _Mapping]]] = ..., gradients_fit: bool = ...) -> None: ...

class AdamSettings(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize", "amsgrad")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    DECOUPLED_FIELD_NUMBER: _ClassVar[int]
    MAXIMIZE_FIELD_NUMBER: _ClassVar[int]
    AMSGRAD_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    amsgrad: bool
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., decoupled: bool = ..., maximize: bool = ..., amsgrad: bool = ...) -> None: ...

class StepGroup(_message.Message):
    __slots__ = ("settings", "shard_ids")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_IDS_FIELD_NUMBER: _ClassVar[int]
    settings: AdamSettings
    shard_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, settings: _Optional[_Union[AdamSettings, _Mapping]] = ..., shard_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "groups", "buffers", "step", "call", "rank_call")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    RANK_CALL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    groups: _containers.RepeatedCompositeFieldContainer[StepGroup]
    buffers: _containers.RepeatedCompositeFieldContainer[StagedBuffer]
    step: int
    call: int
    rank_call: RankCall
    def __init__(self, session_id: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[StepGroup, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[StagedBuffer, _Mapping]]] = ..., step: _Optional[int] = ..., call: _Optional[int] = ..., rank_call: _Optional[_Union[RankCall, _Mapping]] = ...) -> None: ...

class StagedBuffer(_message.Message):
    __slots__ = ("staged_shard_id", "buffer_shard_id")
    STAGED_SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    staged_shard_id: int
    buffer_shard_id: int
    def __init__(self, staged_shard_id: _Optional[int] = ..., buffer_shard_id: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("committed_step", "read_seconds", "update_seconds", "write_seconds", "commit_seconds", "read_bytes", "written_bytes", "durable_step", "disk_error")
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    DISK_ERROR_FIELD_NUMBER: _ClassVar[int]
    committed_step: int
    read_seconds: float
    update_seconds: float
    write_seconds: float
    commit_seconds: float
    read_bytes: int
    written_bytes: int
    durable_step: int
    disk_error: str
    def __init__(self, committed_step: _Optional[int] = ..., read_seconds: _Optional[float] = ..., update_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., commit_seconds: _Optional[float] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., durable_step: _Optional[int] = ..., disk_error: _Optional[str] = ...) -> None: ...

class ExpectStepRequest(_message.Message):
    __slots__ = ("session_id", "groups")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    groups: _containers.RepeatedCompositeFieldContainer[StepGroup]
    def __init__(self, session_id: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[StepGroup, _Mapping]]] = ...) -> None: ...

class ExpectStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class SyncResponse(_message.Message):
    __slots__ = ("committed_step", "written_bytes")
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    committed_step: int
    written_bytes: int
    def __init__(self, committed_step: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class DropGradientsRequest(_message.Message):
    __slots__ = ("session_id", "shard_ids", "rank_call")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_IDS_FIELD_NUMBER: _ClassVar[int]
    RANK_CALL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    shard_ids: _containers.RepeatedScalarFieldContainer[int]
    rank_call: RankCall
    def __init__(self, session_id: _Optional[int] = ..., shard_ids: _Optional[_Iterable[int]] = ..., rank_call: _Optional[_Union[RankCall, _Mapping]] = ...) -> None: ...

class DropGradientsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndGradientsRequest(_message.Message):
    __slots__ = ("session_id", "rank_call", "accumulated_count", "is_without_backward")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_CALL_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_WITHOUT_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    rank_call: RankCall
    accumulated_count: int
    is_without_backward: bool
    def __init__(self, session_id: _Optional[int] = ..., rank_call: _Optional[_Union[RankCall, _Mapping]] = ..., accumulated_count: _Optional[int] = ..., is_without_backward: bool = ...) -> None: ...

class EndGradientsResponse(_message.Message):
    __slots__ = ("shard_ids",)
    SHARD_IDS_FIELD_NUMBER: _ClassVar[int]
    shard_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListRanksRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class ListRanksResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session_id", "names")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("names_unknown",)
    NAMES_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    names_unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names_unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("session_id", "page_first")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    page_first: int
    def __init__(self, session_id: _Optional[int] = ..., page_first: _Optional[int] = ...) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards", "page_next")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_NEXT_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.Shard]
    page_next: int
    def __init__(self, shards: _Optional[_Iterable[_Union[_types_pb2.Shard, _Mapping]]] = ..., page_next: _Optional[int] = ...) -> None: ...

class GetMaximaBytesRequest(_message.Message):
    __slots__ = ("session_id", "shard_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    shard_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., shard_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetMaximaBytesResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class GetShardRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    name: str
    def __init__(self, session_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class GetShardResponse(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.Shard
    def __init__(self, shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ...) -> None: ...
