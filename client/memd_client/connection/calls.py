"""The control plane as the rest of the client sees it: `reattach.ReattachingControl`, or a fake."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memd_proto.v1 import job_pb2, session_pb2, tensor_pb2


class StepCall(Protocol):
    """A Step call that was sent: `control.StepCall` or `reattach.RepeatedStep`."""

    def wait_until_sent(self) -> None:
        """Until the daemon will hear of it, or `done`."""
        ...

    def done(self) -> bool:
        """The answer has arrived, or the call has to be sent again, which `result` does."""
        ...

    def result(self) -> session_pb2.StepResponse:
        """Waits for the answer. Raises MemdError if there is none or it is an error. After a call
        without an answer it sends the step again.
        """
        ...

    def seconds(self) -> float:
        """The time from the call to the answer that `result` returned."""
        ...


class SyncCall(Protocol):
    """A Sync call that was sent: `control.SyncCall` or a `reattach.RepeatedCall`."""

    def result(self) -> session_pb2.SyncResponse:
        """Waits for the answer: once, or again after an interrupt. Raises MemdError if there is
        none, or it is an error."""
        ...


class PutMomentsCall(Protocol):
    """The same of a PutMoments call."""

    def result(self) -> tensor_pb2.PutMomentsResponse: ...


class TensorCalls(Protocol):
    """The calls of `control.Control` that carry tensors."""

    def put(self, requests: Iterator[tensor_pb2.PutRequest]) -> tensor_pb2.PutResponse: ...
    def get(self, request: tensor_pb2.GetRequest) -> Iterator[tensor_pb2.GetResponse]: ...
    def get_moments(
        self, request: tensor_pb2.GetMomentsRequest
    ) -> Iterator[tensor_pb2.GetMomentsResponse]: ...
    def put_moments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest]
    ) -> tensor_pb2.PutMomentsResponse: ...
    def begin_put_moments(
        self, requests: Sequence[tensor_pb2.PutMomentsRequest]
    ) -> PutMomentsCall: ...


class SnapshotReading(AbstractContextManager["SnapshotReading"], Protocol):
    """A snapshot that the daemon reads: `snapshot_reading.SnapshotReading`. Its memory is given
    back with the end of the context."""

    @property
    def contents(self) -> job_pb2.SnapshotContents: ...
    def shards(self) -> list[job_pb2.SnapshotShard]:
        """In the catalogue's order. Once, before the pieces."""
        ...

    def pieces(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        """Asking for the next one releases the bytes of a piece of which the last message came."""
        ...

    def bytes_of(self, run: job_pb2.SnapshotRun) -> memoryview:
        """Valid until the next message is asked for."""
        ...


class ControlPlane(TensorCalls, Protocol):
    """The calls of one session."""

    def detach(self, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse: ...
    def declare(self, request: session_pb2.DeclareRequest) -> session_pb2.DeclareResponse: ...
    def begin_step(self, request: session_pb2.StepRequest) -> StepCall: ...
    def expect_step(
        self, request: session_pb2.ExpectStepRequest
    ) -> session_pb2.ExpectStepResponse: ...
    def sync(self, request: session_pb2.SyncRequest) -> session_pb2.SyncResponse: ...
    def begin_sync(self, request: session_pb2.SyncRequest) -> SyncCall: ...
    def drop_gradients(
        self, request: session_pb2.DropGradientsRequest
    ) -> session_pb2.DropGradientsResponse: ...
    def end_gradients(
        self, request: session_pb2.EndGradientsRequest
    ) -> session_pb2.EndGradientsResponse: ...
    def delete(self, request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse: ...
    def list_shards(
        self, request: session_pb2.ListShardsRequest
    ) -> session_pb2.ListShardsResponse: ...
    def get_maxima_bytes(
        self, request: session_pb2.GetMaximaBytesRequest
    ) -> session_pb2.GetMaximaBytesResponse: ...
    def get_job(self, request: job_pb2.GetJobRequest) -> job_pb2.GetJobResponse: ...
    def drop_job(self, request: job_pb2.DropJobRequest) -> job_pb2.DropJobResponse: ...
    def create_snapshot(
        self, request: job_pb2.CreateSnapshotRequest
    ) -> job_pb2.CreateSnapshotResponse: ...
    def list_snapshots(
        self, request: job_pb2.ListSnapshotsRequest
    ) -> job_pb2.ListSnapshotsResponse: ...
    def read_snapshot(self, request: job_pb2.ReadSnapshotRequest) -> SnapshotReading: ...
    def drop_snapshot(
        self, request: job_pb2.DropSnapshotRequest
    ) -> job_pb2.DropSnapshotResponse: ...
    def close(self) -> None: ...
