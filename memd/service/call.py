"""Checks before every call: the caller's token, a deadline, and errors as gRPC statuses."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]  # googleapis has no types
from grpc_status import rpc_status  # type: ignore[import-untyped]  # nor has grpcio-status

from memd.identity import UidIdentity
from memd.refusal import Refused, StatusCode
from memd.service.answers import Answers
from memd.service.error_details import details_of, job_of
from memd.service.places import RANKS, SHORT_CALLS, STEPS, STREAMS, Holder, Places
from memd_native import StatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from memd.identity import Identity
    from memd.peers import Peer, Peers
    from memd.service.places import Kind

    Handler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger(__name__)

_TOKEN = "memd-token"
_CREDENTIAL = "memd-credential"
_OURS = "/memd.v1."
_REFLECTION = "/grpc.reflection."
# They wait for a commit, and what is in flight before it. Streams are told by their form.
_STEPS = {
    "Step",
    "EndGradients",
    "DropGradients",
    "Sync",
    "Delete",
    "DropJob",
    "CreateSnapshot",
    "RestoreSnapshot",
    "DropSnapshot",
}
# They wait for other ranks where they have a number.
_RANKS = {"Step", "EndGradients", "DropGradients"}
# They only look: without a deadline they hold nothing up.
_READING = {
    "Check",
    "GetStatus",
    "InFlight",
    "ListJobs",
    "GetJob",
    "ListShards",
    "GetShard",
    "GetMaximaBytes",
    "ListRanks",
    "ListSnapshots",
    "ReadSnapshot",
}
# Metadata travels in HTTP/2 headers, of which gRPC takes 8 KiB.
_MESSAGE_CHARACTERS_MAX = 2000
# The native wait ends before the caller's deadline, so that its message still arrives.
_ANSWER_S = 0.2
_NOTICE_S = 0.02
_DEADLINE_S_MAX = 86_400.0
# At the top of one request: shards that are declared, names, groups of a step. What is packed, such
# as the shard ids of a group, is one.
FIELDS_MAX = 65_536
# Wire types of protobuf.
_VARINT, _LENGTH = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}

_GRPC_CODES = {
    StatusCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    StatusCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    StatusCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    StatusCode.CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.DEVICE: grpc.StatusCode.FAILED_PRECONDITION,
    StatusCode.INTEGRITY: grpc.StatusCode.DATA_LOSS,
    StatusCode.FENCED: grpc.StatusCode.ABORTED,
    StatusCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    StatusCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    StatusCode.NOT_YET: grpc.StatusCode.UNIMPLEMENTED,
    StatusCode.IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call as a servicer sees it: who, and for how long it will wait."""

    peer: Peer
    context: grpc.ServicerContext
    places: Places

    def takes(self, kind: Kind, request: Any) -> AbstractContextManager[None]:
        """A place of another kind besides its own. Refused where there is none."""
        return self.places.taken(kind, self.holder(request))

    def holder(self, request: Any) -> Holder:
        """The caller that the call counts against: its process, or its connection if nothing tells
        that process from others."""
        session = self.peer.sessions.get(getattr(request, "session_id", 0))
        return Holder(
            caller=self.peer.process if self.peer.is_known else self.peer.token,
            user=self.peer.owner.key,
            job=session.job_id if session is not None else None,
        )

    def is_waited_for(self) -> bool:
        """False once the caller has cancelled or its deadline has passed. gRPC tells the handler
        of a deadline a moment later than the caller."""
        return self.context.is_active() and self.context.time_remaining() > _NOTICE_S

    def timeout_s(self) -> float:
        # Without a deadline gRPC counts down from the end of time.
        remaining_s = self.context.time_remaining()
        if remaining_s > _DEADLINE_S_MAX:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                "this call needs a deadline, of at most a day; give it a timeout",
            )
        return float(max(remaining_s - _ANSWER_S, remaining_s / 2))


def bounded(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`decode`, or a Refused in its place where the message would be many times as large in memory
    as it is: an empty submessage takes 2 bytes of it and some hundred here."""

    def decode_bounded(data: bytes) -> Any:
        if holds_more_fields(data, FIELDS_MAX):
            return Refused(
                StatusCode.INVALID_ARGUMENT,
                f"a request has at most {FIELDS_MAX} fields, as many shards, names or groups; send "
                "it in several calls",
            )
        return decode(data)

    return decode_bounded


def holds_more_fields(data: bytes, count_max: int) -> bool:
    """Whether the encoded message has more than that at its top. What is no message is the
    decoder's to refuse."""
    at = count = 0
    try:
        while at < len(data) and count <= count_max:
            tag, at = _varint(data, at)
            count += 1
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _LENGTH:
                length, at = _varint(data, at)
                at += length
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                return False
    except IndexError:
        return False
    return count > count_max


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _decoded(request: Any) -> Any:
    """The message, or an iterator of them."""
    if isinstance(request, Refused):
        raise request
    return map(_decoded, request) if hasattr(request, "__next__") else request


def _out_of_memory() -> Refused:
    return Refused(
        StatusCode.CAPACITY,
        "the daemon has no memory for this request; ask for less at once, or give its process more",
    )


class Gate(grpc.ServerInterceptor):
    """Lets a call of memd.v1 through with the token of a living process, where calls of its kind
    have a place left; health and reflection, which reveal nothing, without a token."""

    def __init__(self, peers: Peers, *, identity: Identity | None = None) -> None:
        self._peers = peers
        self._identity = identity or UidIdentity()
        self._places = Places()
        self.answers = Answers()
        self._lock = Lock()
        self._rejections: Counter[str] = Counter()
        self._under_way = 0

    def admission_rejections(self) -> Counter[str]:
        """Attach calls refused, by the name of the status code."""
        with self._lock:
            return Counter(self._rejections)

    def places_taken(self, kind: Kind) -> int:
        return self._places.count(kind)

    def is_idle(self) -> bool:
        """No caller of memd.v1 waits for an answer, or for the rest of one that was sent."""
        with self._lock:
            return self._under_way == 0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None:
            return None
        method = path.rpartition("/")[2]
        # gRPC gives generated handlers a deserializer each, and its own services too.
        assert handler.request_deserializer is not None
        codec = (bounded(handler.request_deserializer), handler.response_serializer)
        if path.startswith(_REFLECTION) and handler.stream_stream:
            streams = self._reflecting(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(streams, *codec)
        if not path.startswith(_OURS):
            return handler
        if handler.unary_stream:
            streaming = self._counted_stream(method, self._streaming(method, handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(streaming, *codec)
        if handler.stream_unary:
            unary = self._counted(method, self._unary(method, handler.stream_unary, STREAMS))
            return grpc.stream_unary_rpc_method_handler(unary, *codec)
        assert handler.unary_unary is not None  # memd.v1 has no calls that stream both ways
        kind = STEPS if method in _STEPS else SHORT_CALLS
        unary = self._counted(method, self._unary(method, handler.unary_unary, kind))
        return grpc.unary_unary_rpc_method_handler(unary, *codec)

    def _counted(self, method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def counted(request: Any, context: grpc.ServicerContext) -> Any:
            with self.answers.counted(method, context):
                return answer(request, context)

        return counted

    def _counted_stream(self, method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def counted(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self.answers.counted(method, context):
                yield from answer(request, context)

        return counted

    def _unary(self, method: str, serve: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            job = ""
            try:
                call = self._admit(method, context)
                message = _decoded(request)
                job = job_of(message, call.peer)
                its = RANKS if method in _RANKS and message.rank_call.number else kind
                with call.takes(its, message):
                    return serve(message, call)
            except (Refused, StatusError) as error:
                self._fail(method, context, error, job=job)
            except MemoryError:
                self._fail(method, context, _out_of_memory(), job=job)

        return answer

    def _streaming(self, method: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            job = ""
            try:
                call = self._admit(method, context)
                message = _decoded(request)
                job = job_of(message, call.peer)
                with call.takes(STREAMS, message):
                    yield from serve(message, call)
            except (Refused, StatusError) as error:
                self._fail(method, context, error, job=job)
            except MemoryError:
                self._fail(method, context, _out_of_memory(), job=job)

        return answer

    def _reflecting(self, method: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        """Nobody tells who asks: all of them together are one caller."""

        def answer(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with self._places.taken(STREAMS, Holder(caller=_REFLECTION)):
                    yield from serve(requests, context)
            except Refused as error:
                self._fail(method, context, error)

        return answer

    def _admit(self, method: str, context: grpc.ServicerContext) -> Call:
        tokens = [value for key, value in context.invocation_metadata() if key == _TOKEN]
        peer = self._peers.find(tokens[0]) if tokens and isinstance(tokens[0], str) else None
        if peer is None:
            wrong = "is not known to this daemon" if tokens else "is missing"
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the token in metadata {_TOKEN} {wrong}; connect to attach.sock beside the "
                "control socket, which gives one to the process that connects",
            )
        if self._identity.needs_token and peer.identified is None:
            self._identify(peer, context)
        call = Call(peer=peer, context=context, places=self._places)
        with self._lock:
            self._under_way += 1
        if not context.add_callback(self._end):
            self._end()
        if method not in _READING:
            call.timeout_s()
        return call

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _identify(self, peer: Peer, context: grpc.ServicerContext) -> None:
        """At the first call, since the attach socket takes no words of a client."""
        shown = [value for key, value in context.invocation_metadata() if key == _CREDENTIAL]
        if not shown or not isinstance(shown[0], str):
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                "this daemon knows users by the tokens of their service accounts, and none came; "
                "mount a projected token into the pod and set MEMD_TOKEN_FILE to its path",
            )
        self._peers.identify(peer, self._identity.of_token(peer, shown[0]))

    def _fail(
        self,
        method: str,
        context: grpc.ServicerContext,
        error: Refused | StatusError,
        *,
        job: str = "",
    ) -> NoReturn:
        code = StatusCode(error.code)
        message = str(error)[:_MESSAGE_CHARACTERS_MAX]
        log.info("call refused", extra={"method": method, "code": code.name, "reason": message})
        if method == "Attach":
            with self._lock:
                self._rejections[code.name.lower()] += 1
        details = details_of(error, method=method, job=job)
        rich = status_pb2.Status(code=_GRPC_CODES[code].value[0], message=message, details=details)
        # memd's own stands alone once more, so that a client needs no server packages to read it.
        plain = ("memd-error-bin", details[0].value)
        context.set_trailing_metadata((*rpc_status.to_status(rich).trailing_metadata, plain))
        context.abort(_GRPC_CODES[code], message)
        raise AssertionError("abort raises")
