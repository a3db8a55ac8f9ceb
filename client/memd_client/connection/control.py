"""The control plane: gRPC calls that carry the session's token, and raise exceptions."""

# The generated gRPC stubs have no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from memd_client.base.credential import credential
from memd_client.base.interrupts import Latch
from memd_client.errors import DaemonFailed, DaemonUnavailable, InvalidArgument, from_code
from memd_proto.v1 import (
    job_pb2,
    job_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    tensor_pb2,
    tensor_pb2_grpc,
    types_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

AnswerT = TypeVar("AnswerT")

# Calls that read or change memory only.
_SHORT_S = 60.0
# In one declaration: a shard takes 1.5 KiB at most, and a gRPC message 4 MiB.
_SHARDS_IN_CALL = 2048
# Calls that wait for the disk to take everything a job has.
_LONG_S = 600.0
# The server sets it beside the rich status, which only server packages can read.
_ERROR_METADATA = "memd-error-bin"
# Used for errors that gRPC itself reports. The numbers are those of StatusCode in
# native/base/status.h.
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 1,
    grpc.StatusCode.NOT_FOUND: 2,
    grpc.StatusCode.ALREADY_EXISTS: 3,
    grpc.StatusCode.PERMISSION_DENIED: 4,
    grpc.StatusCode.UNAUTHENTICATED: 4,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 5,
    grpc.StatusCode.FAILED_PRECONDITION: 6,
    grpc.StatusCode.DATA_LOSS: 7,
    grpc.StatusCode.ABORTED: 8,
    grpc.StatusCode.DEADLINE_EXCEEDED: 9,
    grpc.StatusCode.UNAVAILABLE: 10,
    grpc.StatusCode.UNIMPLEMENTED: 11,
}


# Each session has its own connection. gRPC would otherwise share one with an earlier session of
# this process, and refuse a new session because the old one met a daemon that was down.
_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class SentCall(Generic[AnswerT]):
    """A call that was sent. Any thread may ask for its answer, any number of times."""

    def __init__(self, future: Any, translated: Callable[[Any], Exception]) -> None:
        self._future = future
        self._translated = translated
        self._sent = time.perf_counter()
        self._answered: float | None = None
        self._is_done = Latch()
        future.add_done_callback(self._note_answer)

    def wait_until_sent(self) -> None:
        """It is, since it was made."""

    def done(self) -> bool:
        return bool(self._future.done())

    def result(self) -> AnswerT:
        self._is_done.wait()
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._translated(error) from error
        except grpc.FutureCancelledError as error:
            raise DaemonUnavailable("the session was closed before the daemon answered") from error

    def seconds(self) -> float:
        """The time from the call to its answer, which has arrived."""
        assert self._answered is not None  # `result` has returned
        return self._answered - self._sent

    def _note_answer(self, future: Any) -> None:
        # Runs in a thread of gRPC, or at once if the answer is there.
        del future
        self._answered = time.perf_counter()
        self._is_done.open()


StepCall = SentCall[session_pb2.StepResponse]
SyncCall = SentCall[session_pb2.SyncResponse]
PutMomentsCall = SentCall[tensor_pb2.PutMomentsResponse]


@dataclass(frozen=True, slots=True)
class _Channel:
    """A channel and all its stubs. They are made together: gRPC crashes the process if a stub is
    made on a closed channel, and another thread may close it at any time."""

    channel: Any
    sessions: Any
    tensors: Any
    jobs: Any

    @classmethod
    def open(cls, address: str) -> _Channel:
        channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return cls(
            channel=channel,
            sessions=session_pb2_grpc.SessionServiceStub(channel),
            tensors=tensor_pb2_grpc.TensorServiceStub(channel),
            jobs=job_pb2_grpc.JobServiceStub(channel),
        )

    def close(self) -> None:
        """Cancels the calls that are running; later ones get a ValueError."""
        self.channel.close()


class Control:
    """Calls to one daemon. Any thread may call; each call has a deadline and raises MemdError.

    The channel is made at the first call, because gRPC threads that exist before a fork make the
    child hang.
    """

    def __init__(
        self,
        *,
        address: str,
        token: str,
        last_words: Callable[[], str] | None = None,
        ranks_limit_s: float = _LONG_S,
    ) -> None:
        """`ranks_limit_s`: of calls that wait for other ranks of the job."""
        self._address = address
        self._ranks_limit_s = ranks_limit_s
        self._last_words = last_words  # the end of a private daemon's log
        self._metadata = (("memd-token", token), *credential())
        self._lock = threading.Lock()
        self._channel: _Channel | None = None
        self._declaring = threading.Lock()

    def renew(self, *, address: str, token: str) -> None:
        """From now on calls go to the next daemon. Running calls are cancelled."""
        with self._lock:
            old, self._channel = self._channel, None
            self._address = address
            self._metadata = (("memd-token", token), *credential())
        if old is not None:
            old.close()

    def attach(self, request: session_pb2.AttachRequest) -> session_pb2.AttachResponse:
        attached = self._call(self._open().sessions.Attach, request, _LONG_S)
        agreed = attached.protocol_version  # 0: a daemon that takes the client's word for it
        if agreed not in (0, request.protocol_version):
            raise InvalidArgument(
                f"the daemon has opened the session in protocol version {agreed}, and this client "
                f"in {request.protocol_version}; install the same version of memd for both"
            )
        return attached

    def detach(self, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        return self._call(self._open().sessions.Detach, request, _SHORT_S)

    def declare(self, request: session_pb2.DeclareRequest) -> session_pb2.DeclareResponse:
        """All of them, or none if it fails, in as many calls as it takes."""
        declare = self._open().sessions.Declare
        if len(request.shards) <= _SHARDS_IN_CALL:
            return self._call(declare, request, _SHORT_S)
        firsts = range(0, len(request.shards), _SHARDS_IN_CALL)
        parts = [request.shards[first : first + _SHARDS_IN_CALL] for first in firsts]
        declaration = secrets.randbits(63) + 1
        # The daemon knows one declaration of a session at a time.
        with self._declaring:
            for first, shards in zip(firsts, parts, strict=True):
                last = self._call(
                    declare,
                    session_pb2.DeclareRequest(
                        session_id=request.session_id,
                        shards=shards,
                        declaration=declaration,
                        shards_before=first,
                        more_follows=first != firsts[-1],
                    ),
                    _SHORT_S,
                )
        answer = session_pb2.DeclareResponse(gradients_fit=last.gradients_fit)
        # From here on they are found.
        for shards in parts[:-1]:
            part = session_pb2.DeclareRequest(session_id=request.session_id, shards=shards)
            answer.shards.extend(self._call(declare, part, _SHORT_S).shards)
        answer.shards.extend(last.shards)
        return answer

    def begin_step(self, request: session_pb2.StepRequest) -> StepCall:
        """Sends the step and returns at once; the result has the answer later."""
        method = self._open().sessions.Step.future
        return StepCall(self._invoke(method, request, self._step_s(request)), self._translated)

    def step(self, request: session_pb2.StepRequest) -> session_pb2.StepResponse:
        """Sends the step and waits for the answer."""
        return self._call(self._open().sessions.Step, request, self._step_s(request))

    def _step_s(self, request: session_pb2.StepRequest) -> float:
        return self._ranks_limit_s if request.rank_call.number else _LONG_S

    def expect_step(self, request: session_pb2.ExpectStepRequest) -> session_pb2.ExpectStepResponse:
        return self._call(self._open().sessions.ExpectStep, request, _SHORT_S)

    def sync(self, request: session_pb2.SyncRequest) -> session_pb2.SyncResponse:
        return self._call(self._open().sessions.Sync, request, _LONG_S)

    def begin_sync(self, request: session_pb2.SyncRequest) -> SyncCall:
        """Sends the call and returns at once; the result has the answer later."""
        method = self._open().sessions.Sync.future
        return SyncCall(self._invoke(method, request, _LONG_S), self._translated)

    def drop_gradients(
        self, request: session_pb2.DropGradientsRequest
    ) -> session_pb2.DropGradientsResponse:
        waits_s = self._ranks_limit_s if request.rank_call.number else _SHORT_S
        return self._call(self._open().sessions.DropGradients, request, waits_s)

    def end_gradients(
        self, request: session_pb2.EndGradientsRequest
    ) -> session_pb2.EndGradientsResponse:
        """Waits for all ranks."""
        return self._call(self._open().sessions.EndGradients, request, self._ranks_limit_s)

    def list_ranks(self, request: session_pb2.ListRanksRequest) -> session_pb2.ListRanksResponse:
        return self._call(self._open().sessions.ListRanks, request, _SHORT_S)

    def delete(self, request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse:
        return self._call(self._open().sessions.Delete, request, _SHORT_S)

    def list_shards(self, request: session_pb2.ListShardsRequest) -> session_pb2.ListShardsResponse:
        """All of them, page by page."""
        answer = session_pb2.ListShardsResponse()
        page = session_pb2.ListShardsRequest(session_id=request.session_id)
        while True:
            response = self._call(self._open().sessions.ListShards, page, _SHORT_S)
            answer.shards.extend(response.shards)
            if not response.page_next:
                return answer
            page.page_first = response.page_next

    def get_maxima_bytes(
        self, request: session_pb2.GetMaximaBytesRequest
    ) -> session_pb2.GetMaximaBytesResponse:
        return self._call(self._open().sessions.GetMaximaBytes, request, _SHORT_S)

    def get_job(self, request: job_pb2.GetJobRequest) -> job_pb2.GetJobResponse:
        """One page of its shards."""
        return self._call(self._open().jobs.GetJob, request, _SHORT_S)

    def drop_job(self, request: job_pb2.DropJobRequest) -> job_pb2.DropJobResponse:
        return self._call(self._open().jobs.DropJob, request, _SHORT_S)

    def create_snapshot(
        self, request: job_pb2.CreateSnapshotRequest
    ) -> job_pb2.CreateSnapshotResponse:
        return self._call(self._open().jobs.CreateSnapshot, request, _LONG_S)

    def list_snapshots(
        self, request: job_pb2.ListSnapshotsRequest
    ) -> job_pb2.ListSnapshotsResponse:
        return self._call(self._open().jobs.ListSnapshots, request, _SHORT_S)

    def read_snapshot(
        self, request: job_pb2.ReadSnapshotRequest
    ) -> Generator[job_pb2.ReadSnapshotResponse]:
        """Takes as long as training leaves it. Close it: the daemon then ends the reading."""
        call = self._invoke(self._open().jobs.ReadSnapshot, request, None)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translated(error) from error
        finally:
            call.cancel()

    def drop_snapshot(self, request: job_pb2.DropSnapshotRequest) -> job_pb2.DropSnapshotResponse:
        return self._call(self._open().jobs.DropSnapshot, request, _LONG_S)

    def put(self, requests: Iterator[tensor_pb2.PutRequest]) -> tensor_pb2.PutResponse:
        return self._call(self._open().tensors.Put, requests, _LONG_S)

    def get(self, request: tensor_pb2.GetRequest) -> Iterator[tensor_pb2.GetResponse]:
        return self._stream(self._open().tensors.Get, request)

    def get_moments(
        self, request: tensor_pb2.GetMomentsRequest
    ) -> Iterator[tensor_pb2.GetMomentsResponse]:
        return self._stream(self._open().tensors.GetMoments, request)

    def put_moments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest]
    ) -> tensor_pb2.PutMomentsResponse:
        return self._call(self._open().tensors.PutMoments, requests, _LONG_S)

    def begin_put_moments(self, requests: Sequence[tensor_pb2.PutMomentsRequest]) -> PutMomentsCall:
        """Sends them and returns at once; the result has the answer later."""
        method = self._open().tensors.PutMoments.future
        return PutMomentsCall(self._invoke(method, iter(requests), _LONG_S), self._translated)

    def close(self) -> None:
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.close()

    def _open(self) -> _Channel:
        with self._lock:
            if self._channel is None:
                self._channel = _Channel.open(self._address)
            return self._channel

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            return self._invoke(method, request, timeout_s)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def _stream(self, method: Callable[..., Iterable[Any]], request: Any) -> Iterator[Any]:
        try:
            yield from self._invoke(method, request, _LONG_S)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def _invoke(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:
            # This text is all that gRPC says of a channel that another thread has closed after
            # `method` was made.
            if not str(error).startswith("Cannot invoke RPC"):
                raise
            raise DaemonUnavailable(
                f"the channel to {self._address} was closed before this call was sent, because the "
                "daemon has ended or the session was closed; connect again"
            ) from error

    def _translated(self, error: Any) -> Exception:
        """`error` is a grpc.RpcError and a grpc.Call at once, which gRPC has no type for.

        Its traceback refers to frames of gRPC that refer to the call. This cycle would hold the
        callers' frames, with leased tensors and moments in them, until the garbage collector runs,
        so the traceback is dropped here.
        """
        error.__traceback__ = None
        message = error.details() or "the daemon gave no reason"
        for key, value in error.trailing_metadata() or ():
            if key == _ERROR_METADATA:
                detail = types_pb2.ErrorDetail.FromString(value)
                retry_after_s = detail.retry_after_ms / 1e3 if detail.retry_after_ms else None
                return from_code(
                    detail.code, message, detail.error_number, retry_after_s=retry_after_s
                )
        # CANCELLED: the daemon stops, or the channel was renewed.
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            said = self._last_words() if self._last_words is not None else ""
            return DaemonUnavailable(
                f"the daemon at {self._address} is gone; start it and connect again: {message}"
                + (f"\nits last output:\n{said}" if said else "")
            )
        code = _CODES.get(error.code())
        return from_code(code, message) if code else DaemonFailed(f"{error.code().name}: {message}")
