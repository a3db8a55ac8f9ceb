from memd_proto.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutRequest(_message.Message):
    __slots__ = ("session_id", "spec", "data")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    spec: _types_pb2.ShardSpec
    data: bytes
    def __init__(self, session_id: _Optional[int] = ..., spec: _Optional[_Union[_types_pb2.ShardSpec, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.Shard
    def __init__(self, shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    name: str
    def __init__(self, session_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("shard", "data")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.Shard
    data: bytes
    def __init__(self, shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetMomentsRequest(_message.Message):
    __slots__ = ("session_id", "shard_id", "with_master")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_MASTER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    shard_id: int
    with_master: bool
    def __init__(self, session_id: _Optional[int] = ..., shard_id: _Optional[int] = ..., with_master: bool = ...) -> None: ...

class GetMomentsResponse(_message.Message):
    __slots__ = ("generation", "element_first", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    EXP_AVG_FIELD_NUMBER: _ClassVar[int]
    EXP_AVG_SQ_FIELD_NUMBER: _ClassVar[int]
    MAX_EXP_AVG_SQ_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    generation: int
    element_first: int
    exp_avg: bytes
    exp_avg_sq: bytes
    max_exp_avg_sq: bytes
    master: bytes
    def __init__(self, generation: _Optional[int] = ..., element_first: _Optional[int] = ..., exp_avg: _Optional[bytes] = ..., exp_avg_sq: _Optional[bytes] = ..., max_exp_avg_sq: _Optional[bytes] = ..., master: _Optional[bytes] = ...) -> None: ...

class PutMomentsRequest(_message.Message):
    __slots__ = ("session_id", "shard_id", "generation", "element_first", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "staged_shard_id", "staged_has_maximum", "master", "staged_has_master")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    EXP_AVG_FIELD_NUMBER: _ClassVar[int]
    EXP_AVG_SQ_FIELD_NUMBER: _ClassVar[int]
    MAX_EXP_AVG_SQ_FIELD_NUMBER: _ClassVar[int]
    STAGED_SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    STAGED_HAS_MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    STAGED_HAS_MASTER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    shard_id: int
    generation: int
    element_first: int
    exp_avg: bytes
    exp_avg_sq: bytes
    max_exp_avg_sq: bytes
    staged_shard_id: int
    staged_has_maximum: bool
    master: bytes
    staged_has_master: bool
    def __init__(self, session_id: _Optional[int] = ..., shard_id: _Optional[int] = ..., generation: _Optional[int] = ..., element_first: _Optional[int] = ..., exp_avg: _Optional[bytes] = ..., exp_avg_sq: _Optional[bytes] = ..., max_exp_avg_sq: _Optional[bytes] = ..., staged_shard_id: _Optional[int] = ..., staged_has_maximum: bool = ..., master: _Optional[bytes] = ..., staged_has_master: bool = ...) -> None: ...

class PutMomentsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
