from memd_proto.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "daemon_version", "token", "control_address", "refusal", "protocol_range", "takes_kinds")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_RANGE_FIELD_NUMBER: _ClassVar[int]
    TAKES_KINDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    daemon_version: str
    token: str
    control_address: str
    refusal: str
    protocol_range: _types_pb2.ProtocolRange
    takes_kinds: bool
    def __init__(self, protocol_version: _Optional[int] = ..., daemon_version: _Optional[str] = ..., token: _Optional[str] = ..., control_address: _Optional[str] = ..., refusal: _Optional[str] = ..., protocol_range: _Optional[_Union[_types_pb2.ProtocolRange, _Mapping]] = ..., takes_kinds: bool = ...) -> None: ...

class Descriptors(_message.Message):
    __slots__ = ("kind", "session_id", "segment_first", "segment_count", "reading_id", "refusal")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Descriptors.Kind]
        KIND_SESSION: _ClassVar[Descriptors.Kind]
        KIND_SEGMENTS: _ClassVar[Descriptors.Kind]
        KIND_EXPORT: _ClassVar[Descriptors.Kind]
        KIND_REFUSED: _ClassVar[Descriptors.Kind]
    KIND_UNSPECIFIED: Descriptors.Kind
    KIND_SESSION: Descriptors.Kind
    KIND_SEGMENTS: Descriptors.Kind
    KIND_EXPORT: Descriptors.Kind
    KIND_REFUSED: Descriptors.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    READING_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    kind: Descriptors.Kind
    session_id: int
    segment_first: int
    segment_count: int
    reading_id: int
    refusal: str
    def __init__(self, kind: _Optional[_Union[Descriptors.Kind, str]] = ..., session_id: _Optional[int] = ..., segment_first: _Optional[int] = ..., segment_count: _Optional[int] = ..., reading_id: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class ClientPacket(_message.Message):
    __slots__ = ("session_id", "segment_first", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ClientPacket.Kind]
        KIND_SEGMENTS: _ClassVar[ClientPacket.Kind]
    KIND_UNSPECIFIED: ClientPacket.Kind
    KIND_SEGMENTS: ClientPacket.Kind
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    segment_first: int
    kind: ClientPacket.Kind
    def __init__(self, session_id: _Optional[int] = ..., segment_first: _Optional[int] = ..., kind: _Optional[_Union[ClientPacket.Kind, str]] = ...) -> None: ...

class SegmentsWanted(_message.Message):
    __slots__ = ("session_id", "segment_first")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    segment_first: int
    def __init__(self, session_id: _Optional[int] = ..., segment_first: _Optional[int] = ...) -> None: ...
