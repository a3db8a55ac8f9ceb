"""TensorService: tensor bytes for clients that share no memory, and optimizer state in and out."""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode
from memd.service import wire
from memd_native import MODE_OVERWRITE, MODE_READ, PART_VALUE, StatusError
from memd_proto.v1 import tensor_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from memd.peers import Peers, Session
    from memd.service.call import Call
    from memd_native import MomentsWrite, Server, ShardInfo

# Below gRPC's own limit of 4 MiB, and large enough that the messages' cost is not seen.
CHUNK_BYTES = 1 << 20
# Two moments of fp32 for each: again a chunk.
_MOMENTS_ELEMENTS = CHUNK_BYTES // 8
# The store works on as many of a job at a time; one more of a call waits for it.
_WRITES_AT_ONCE = 4


class TensorService:
    def __init__(self, server: Server, *, peers: Peers) -> None:
        self._server = server
        self._peers = peers

    def Put(self, requests: Iterator[tensor_pb2.PutRequest], call: Call) -> tensor_pb2.PutResponse:
        first = _first(requests)
        session = self._peers.session(call.peer, first.session_id)
        (shard,), _ = self._server.declare(session.session_id, [wire.native_spec(first.spec)])
        with self._overwritten(session, shard, call) as memory:
            _fill(memory, first, requests, name=shard.spec.name)
        return tensor_pb2.PutResponse(shard=_written(shard))

    def Get(self, request: tensor_pb2.GetRequest, call: Call) -> Iterator[tensor_pb2.GetResponse]:
        session = self._peers.session(call.peer, request.session_id)
        shard = self._server.find_shard(session.job_id, request.name)
        lease = self._server.lease(
            session.session_id,
            shard.shard_id,
            part=PART_VALUE,
            mode=MODE_READ,
            timeout_s=call.timeout_s(),
        )
        try:
            memory = lease.memory()
            yield tensor_pb2.GetResponse(shard=_written(shard), data=bytes(memory[:CHUNK_BYTES]))
            for offset in range(CHUNK_BYTES, len(memory), CHUNK_BYTES):
                yield tensor_pb2.GetResponse(data=bytes(memory[offset : offset + CHUNK_BYTES]))
        finally:
            lease.release()

    def GetMoments(
        self, request: tensor_pb2.GetMomentsRequest, call: Call
    ) -> Iterator[tensor_pb2.GetMomentsResponse]:
        session = self._peers.session(call.peer, request.session_id)
        shard = self._shard(session, request.shard_id)
        element_count = math.prod(shard.spec.shape)
        for first in range(0, element_count, _MOMENTS_ELEMENTS):
            exp_avg, exp_avg_sq, max_exp_avg_sq, master = self._server.read_moments(
                session.session_id,
                shard.shard_id,
                first,
                min(_MOMENTS_ELEMENTS, element_count - first),
                with_master=request.with_master,
                timeout_s=call.timeout_s(),
            )
            yield tensor_pb2.GetMomentsResponse(
                generation=shard.generation,
                element_first=first,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                max_exp_avg_sq=max_exp_avg_sq,
                master=master,
            )

    def PutMoments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest], call: Call
    ) -> tensor_pb2.PutMomentsResponse:
        """Durable when it returns, but not whole or nothing: each message takes effect when it
        arrives, since the moments of one parameter may be larger than the host pool. Of a stream
        that breaks off, the elements that had arrived stay changed, and the job's next commit makes
        them durable; the same call made again, to its end, replaces them all.

        If all come from blobs, the caller syncs: one commit has them, and the blobs no more."""
        session: Session | None = None
        carries_bytes = False
        with _Writes(call) as writes:
            for request in requests:
                session = self._peers.session(call.peer, request.session_id)
                writes.add(self._begin_write(session, request, call))
                carries_bytes |= not request.HasField("staged_shard_id")
        if session is None:
            raise _empty_stream()
        if carries_bytes:
            self._server.sync(session.session_id, timeout_s=call.timeout_s())
        return tensor_pb2.PutMomentsResponse()

    def _begin_write(
        self, session: Session, request: tensor_pb2.PutMomentsRequest, call: Call
    ) -> MomentsWrite:
        place = (session.session_id, request.shard_id, request.generation, request.element_first)
        if request.HasField("staged_shard_id"):
            return self._server.begin_write_staged_moments(
                *place,
                request.staged_shard_id,
                request.staged_has_maximum,
                request.staged_has_master,
                timeout_s=call.timeout_s(),
            )
        return self._server.begin_write_moments(
            *place, request.exp_avg, request.exp_avg_sq, request.max_exp_avg_sq, request.master
        )

    @contextmanager
    def _overwritten(self, session: Session, shard: ShardInfo, call: Call) -> Iterator[memoryview]:
        """The shard's new bytes, which readers see when the block ends, and never if it fails."""
        lease = self._server.lease(
            session.session_id,
            shard.shard_id,
            part=PART_VALUE,
            mode=MODE_OVERWRITE,
            timeout_s=call.timeout_s(),
        )
        try:
            yield lease.memory()
        except BaseException:
            lease.discard()
            raise
        lease.release()
        # The question is answered after the release took effect: a caller that has its answer has
        # put, even if this daemon is killed the next moment.
        self._server.find_shard(session.job_id, shard.spec.name)

    def _shard(self, session: Session, shard_id: int) -> ShardInfo:
        for shard in self._server.shards(session.job_id, first=shard_id, count_max=1):
            if shard.shard_id == shard_id:
                return shard
        raise Refused(StatusCode.NOT_FOUND, f"job {session.job_name!r} has no shard {shard_id}")


class _Writes(AbstractContextManager["_Writes"]):
    """Writes of moments of one call. The next message is read while some are under way; all have
    ended with the context, which raises the first error."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._begun: deque[MomentsWrite] = deque()

    def add(self, write: MomentsWrite) -> None:
        self._begun.append(write)
        if len(self._begun) > _WRITES_AT_ONCE:
            self._wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failures = []
        while self._begun:
            try:
                self._wait()
            except StatusError as failure:
                failures.append(failure)
        if error is None and failures:
            raise failures[0]

    def _wait(self) -> None:
        self._begun.popleft().wait(timeout_s=self._call.timeout_s())


def _written(shard: ShardInfo) -> types_pb2.Shard:
    """A write that has ended is noted in the shard's record by the data plane's next turn; leases
    wait for that, and the record as it was read may be older."""
    message = wire.shard_message(shard)
    message.written = True
    return message


def _first(requests: Iterator[tensor_pb2.PutRequest]) -> tensor_pb2.PutRequest:
    for request in requests:
        return request
    raise _empty_stream()


def _empty_stream() -> Refused:
    return Refused(StatusCode.INVALID_ARGUMENT, "the stream ended before its first message")


def _fill(
    memory: memoryview,
    first: tensor_pb2.PutRequest,
    rest: Iterator[tensor_pb2.PutRequest],
    *,
    name: str,
) -> None:
    filled = len(first.data)
    if filled <= len(memory):
        memory[:filled] = first.data
    for request in rest:
        end = filled + len(request.data)
        if end <= len(memory):
            memory[filled:end] = request.data
        filled = end
    if filled != len(memory):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"{name!r} was declared with {len(memory)} bytes and the stream carried {filled}; "
            "nothing was changed",
        )
