from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]
    D_TYPE_FLOAT64: _ClassVar[DType]
    D_TYPE_INT8: _ClassVar[DType]
    D_TYPE_INT16: _ClassVar[DType]
    D_TYPE_INT32: _ClassVar[DType]
    D_TYPE_INT64: _ClassVar[DType]
    D_TYPE_UINT8: _ClassVar[DType]
    D_TYPE_BOOL: _ClassVar[DType]

class ShardKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARD_KIND_UNSPECIFIED: _ClassVar[ShardKind]
    SHARD_KIND_PARAMETER: _ClassVar[ShardKind]
    SHARD_KIND_BLOB: _ClassVar[ShardKind]
    SHARD_KIND_BUFFER: _ClassVar[ShardKind]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_BFLOAT16: DType
D_TYPE_FLOAT16: DType
D_TYPE_FLOAT64: DType
D_TYPE_INT8: DType
D_TYPE_INT16: DType
D_TYPE_INT32: DType
D_TYPE_INT64: DType
D_TYPE_UINT8: DType
D_TYPE_BOOL: DType
SHARD_KIND_UNSPECIFIED: ShardKind
SHARD_KIND_PARAMETER: ShardKind
SHARD_KIND_BLOB: ShardKind
SHARD_KIND_BUFFER: ShardKind
TIER_UNSPECIFIED: Tier
TIER_HOST: Tier
TIER_NVME: Tier

class ProtocolRange(_message.Message):
    __slots__ = ("oldest", "newest")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class ShardSpec(_message.Message):
    __slots__ = ("name", "kind", "dtype", "shape", "tier", "value_only", "keeps_maximum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    VALUE_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEEPS_MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: ShardKind
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    tier: Tier
    value_only: bool
    keeps_maximum: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[ShardKind, str]] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[Tier, str]] = ..., value_only: bool = ..., keeps_maximum: bool = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("shard_id", "spec", "generation", "written", "bytes", "lost", "unreadable")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    spec: ShardSpec
    generation: int
    written: bool
    bytes: int
    lost: bool
    unreadable: bool
    def __init__(self, shard_id: _Optional[int] = ..., spec: _Optional[_Union[ShardSpec, _Mapping]] = ..., generation: _Optional[int] = ..., written: bool = ..., bytes: _Optional[int] = ..., lost: bool = ..., unreadable: bool = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "error_number", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    error_number: int
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., error_number: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
