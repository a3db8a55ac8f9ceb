"""The daemon restarts while a session is open: wait for it, claim the session again, go on. A
daemon that refuses a call for a while is asked again.

The daemon's memory outlives it if a holder or systemd keeps its descriptors. Then leases, gradients
and rings are as they were, and every call without an answer is repeated. Repeating does no harm:
a step, for example, carries its number.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from memd_client.base.interrupts import pause
from memd_client.base.process import OwnProcess
from memd_client.connection.attach import AttachConnection
from memd_client.connection.snapshot_reading import SnapshotReading
from memd_client.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    MemdError,
    NotYet,
    PermissionDenied,
    SessionFenced,
    UnknownName,
)
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memd_client.base.address import UnixAddress
    from memd_client.connection.calls import PutMomentsCall, StepCall, SyncCall
    from memd_client.connection.control import Control
    from memd_client.connection.retry import OnReturn
    from memd_proto.v1 import job_pb2, tensor_pb2

T = TypeVar("T")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)

_log = logging.getLogger("memd_client")

VARIABLE = "MEMD_REATTACH_SECONDS"
_DEFAULT_S = 120.0
# How long to wait for a daemon that answered "unavailable" to end. A stopping daemon refuses leases
# that wait, and ends soon after; but one that stays may answer "unavailable" too.
_STOPPING_S = 5.0
# The same for other calls, before they are repeated.
_PAUSE_S = 1.0
_LOOK_S = 0.05


class SuspendablePlane(Protocol):
    """The part of `memd_native.ClientSession` that re-attaching uses."""

    def suspend(self) -> None: ...
    def reconnect(self, connection_fd: int) -> None: ...


def reattach_seconds() -> float:
    """How long a session waits for its daemon to come back; 0: it does not wait."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return _DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(
            f"{VARIABLE} is a number of seconds, 0 to fail at once: {text!r}; the default is "
            f"{_DEFAULT_S:.0f}"
        )
    return seconds


class Reattach:
    """Re-attaches one session when its daemon has restarted, and owns the attach connection. Any
    thread may call; one re-attaches, and the others wait for it.
    """

    def __init__(
        self,
        where: UnixAddress,
        *,
        connection: AttachConnection,
        control: Control,
        request: session_pb2.AttachRequest,
        seconds: float,
    ) -> None:
        self._connection = connection
        self._where = where
        self._control = control
        self._seconds = seconds
        self._request = session_pb2.AttachRequest()
        self._request.CopyFrom(request)
        self._request.fresh = False
        self._request.durability = ""
        self._plane: SuspendablePlane | None = None
        self._process = OwnProcess()
        # Held while a thread re-attaches.
        self._lock = threading.RLock()
        self._epoch = 0
        # From the start of re-attaching until a daemon has taken the session back. Stays true if
        # the attempt was given up: the connection may then be new and open.
        self._is_away = False
        self._gone_since: float | None = None
        self._fenced: str | None = None
        self._closed = False
        self._on_return: OnReturn | None = None

    def begin(self, session_id: int, plane: SuspendablePlane | None) -> None:
        """The session is open: from now on it can be claimed again."""
        self._request.kept_session_id = session_id
        self._plane = plane

    def tell_returns(self, listener: OnReturn) -> None:
        """From now on `listener` is called when the next daemon has taken the session over, before
        any other thread goes on.
        """
        self._on_return = listener

    @property
    def where(self) -> UnixAddress:
        return self._where

    @property
    def connection(self) -> AttachConnection:
        """The connection to the present daemon."""
        return self._connection

    def segments(self, session_id: int, first: int) -> list[int]:
        self._wait_while_away()  # before that, the next daemon does not know this process
        return self._connection.segments(session_id, first)

    def close(self) -> None:
        self._closed = True
        self._connection.close()

    @property
    def epoch(self) -> int:
        """How often the session was claimed again."""
        return self._epoch

    def calling(self, call: Callable[[], T], *, lease: bool = False, epoch: int | None = None) -> T:
        """Returns the result of `call`, which is repeated if the daemon restarted, or refused it
        for a while, and must therefore be idempotent. `epoch` is the one in which it was first
        made, if not the present one.

        Raises:
            SessionFenced: the daemon is back, and does not have this session.
            DaemonUnavailable: it did not come back in time.
        """
        self._refuse_in_forked_child()
        began = time.monotonic()
        while True:
            self._wait_while_away()
            made = self._epoch if epoch is None else epoch
            epoch = None
            if self._fenced is not None:
                raise SessionFenced(self._fenced)
            try:
                return call()
            except (DaemonUnavailable, PermissionDenied, UnknownName) as failure:
                # PermissionDenied: the next daemon does not know our token. UnknownName: it knows
                # the token, but the session is not claimed yet.
                if not self._seconds or self._closed:
                    raise
                if not self._may_come_back(made, failure, lease=lease) and (
                    lease
                    or not isinstance(failure, DaemonUnavailable)
                    or time.monotonic() - began > self._seconds
                ):
                    raise
            except MemdError as refusal:
                wait_s = refusal.retry_after_s
                waited_s = time.monotonic() - began
                if wait_s is None or self._closed or waited_s + wait_s > self._seconds:
                    raise
                pause(wait_s)

    def _refuse_in_forked_child(self) -> None:
        """The session is the parent's, and the lock may be held for ever in the child."""
        if self._process.is_another:
            raise MemdError(
                f"job {self._request.job!r}: this session belongs to process {self._process.id}, "
                "from which this one was forked; connect again in the child"
            )

    def _wait_while_away(self) -> None:
        """Waits while another thread re-attaches. If that has given up, the caller finds out by its
        call."""
        if self._is_away:
            with self._lock:
                pass

    def _may_come_back(self, made: int, failure: MemdError, *, lease: bool) -> bool:
        """Whether the daemon that failed a call of epoch `made` has ended; if so, this returns when
        another one is there. A stopping daemon refuses new calls while it finishes others, and has
        not ended yet."""
        patience_s = _STOPPING_S if lease else _PAUSE_S
        until = time.monotonic() + min(patience_s, self._seconds)
        while True:
            with self._lock:
                if self._fenced is not None:
                    raise SessionFenced(self._fenced) from failure
                if self._epoch != made:
                    return True
                if self._is_away or self._connection.is_closed_there():
                    self._reattach(failure)
                    return True
            if not isinstance(failure, DaemonUnavailable) or time.monotonic() >= until:
                return False
            pause(_LOOK_S)

    def _reattach(self, failure: MemdError) -> None:
        """The caller has the lock, and the daemon has closed the old connection."""
        self._is_away = True
        if self._plane is not None:
            self._plane.suspend()
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            _log.warning(
                "job %r: the daemon at %s has ended or closed the connection; waiting up to %.0f s "
                "for it to come back",
                self._request.job,
                self._where,
                self._seconds,
            )
        answer, connection_fd = self._ask_until(self._gone_since + self._seconds, failure)
        gone_s = time.monotonic() - self._gone_since
        self._gone_since = None
        if not answer.kept:
            raise self._fence(
                "this session's leases and gradients are lost with its memory; the job stands at "
                f"committed step {answer.committed_step}: connect again, offload the model again "
                f"and go on from step {answer.committed_step}, which session.resume() of the new "
                "session returns"
            ) from failure
        if self._on_return is not None:
            self._on_return(answer, self._connection.daemon_process_id)
        if self._plane is not None and connection_fd is not None:
            self._plane.reconnect(connection_fd)
        self._epoch += 1
        self._is_away = False
        _log.info(
            "job %r: the daemon is back after %.1f s, at committed step %d%s; going on",
            self._request.job,
            gone_s,
            answer.committed_step,
            f" and finishing step {answer.closing_step}" if answer.closing_step else "",
        )

    def _ask_until(
        self, deadline: float, failure: MemdError
    ) -> tuple[session_pb2.AttachResponse, int | None]:
        while True:
            if self._closed:
                raise DaemonUnavailable(
                    f"job {self._request.job!r}: the session was closed while it waited for its "
                    "daemon; connect again"
                ) from failure
            try:
                return self._ask()
            except (InvalidArgument, NotYet, SessionFenced) as refusal:
                raise self._fence(f"connect again: {refusal}") from refusal
            except (MemdError, OSError) as still:
                # All other errors are transient: many sessions re-attach at once, and each needs a
                # connection, a thread of the daemon and descriptors.
                if time.monotonic() >= deadline:
                    raise self._not_back(still) from failure
            pause(_LOOK_S)

    def _not_back(self, still: Exception) -> DaemonUnavailable:
        """The error of this call. Each later call tries once more."""
        limit = f"within {self._seconds:.0f} s ({VARIABLE})"
        if isinstance(still, DaemonUnavailable):
            return DaemonUnavailable(
                f"job {self._request.job!r}: the daemon at {self._where} has not come back "
                f"{limit}; start it with `memd serve`, then call or connect again: {still}"
            )
        return DaemonUnavailable(
            f"job {self._request.job!r}: the daemon at {self._where} is back and has not taken "
            f"this session back {limit}; follow its message, then call or connect again: {still}"
        )

    def _fence(self, reason: str) -> SessionFenced:
        """The error of this call and of every later use of the session."""
        self._fenced = (
            f"job {self._request.job!r}: the daemon at {self._where} was restarted and does not "
            f"have this session any more; {reason}"
        )
        return SessionFenced(self._fenced)

    def _ask(self) -> tuple[session_pb2.AttachResponse, int | None]:
        """The daemon's answer, and a descriptor of the connection for the data plane if the session
        was kept."""
        connection = AttachConnection(self._where)
        self._connection.close()
        self._connection = connection
        self._control.renew(address=connection.control_address, token=connection.token)
        answer = self._control.attach(self._request)
        if self._plane is None or not answer.kept:
            return answer, None
        return answer, connection.duplicate()


class ReattachingControl:
    """The calls of one session, repeated if the daemon restarted. Streams of tensor bytes are not:
    their readers start again from the beginning.
    """

    def __init__(self, control: Control, reattach: Reattach) -> None:
        self._control = control
        self._reattach = reattach

    def detach(self, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        is_unanswered = False

        def detach() -> session_pb2.DetachResponse:
            nonlocal is_unanswered
            try:
                return self._control.detach(request)
            except (DaemonUnavailable, PermissionDenied):
                is_unanswered = True
                raise

        try:
            return self._reattach.calling(detach)
        except (SessionFenced, UnknownName):
            # The previous daemon may have detached it and died before it answered.
            if not is_unanswered:
                raise
            return session_pb2.DetachResponse()

    def declare(self, request: session_pb2.DeclareRequest) -> session_pb2.DeclareResponse:
        return self._reattach.calling(lambda: self._control.declare(request))

    def begin_step(self, request: session_pb2.StepRequest) -> StepCall:
        return RepeatedStep(self._control, self._reattach, request)

    def expect_step(self, request: session_pb2.ExpectStepRequest) -> session_pb2.ExpectStepResponse:
        return self._reattach.calling(lambda: self._control.expect_step(request))

    def sync(self, request: session_pb2.SyncRequest) -> session_pb2.SyncResponse:
        return self._reattach.calling(lambda: self._control.sync(request))

    def begin_sync(self, request: session_pb2.SyncRequest) -> SyncCall:
        return RepeatedCall(
            self._reattach,
            begin=lambda: self._control.begin_sync(request),
            again=lambda: self._control.sync(request),
        )

    def drop_gradients(
        self, request: session_pb2.DropGradientsRequest
    ) -> session_pb2.DropGradientsResponse:
        return self._reattach.calling(lambda: self._control.drop_gradients(request))

    def end_gradients(
        self, request: session_pb2.EndGradientsRequest
    ) -> session_pb2.EndGradientsResponse:
        return self._reattach.calling(lambda: self._control.end_gradients(request))

    def delete(self, request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse:
        calls = 0

        def delete() -> session_pb2.DeleteResponse:
            nonlocal calls
            calls += 1
            response = self._control.delete(request)
            # The previous daemon may have deleted it and died before it answered.
            return session_pb2.DeleteResponse() if calls > 1 else response

        return self._reattach.calling(delete)

    def list_shards(self, request: session_pb2.ListShardsRequest) -> session_pb2.ListShardsResponse:
        return self._reattach.calling(lambda: self._control.list_shards(request))

    def get_maxima_bytes(
        self, request: session_pb2.GetMaximaBytesRequest
    ) -> session_pb2.GetMaximaBytesResponse:
        return self._reattach.calling(lambda: self._control.get_maxima_bytes(request))

    def get_job(self, request: job_pb2.GetJobRequest) -> job_pb2.GetJobResponse:
        return self._reattach.calling(lambda: self._control.get_job(request))

    def drop_job(self, request: job_pb2.DropJobRequest) -> job_pb2.DropJobResponse:
        return self._control.drop_job(request)  # the session has ended and cannot be claimed

    def create_snapshot(
        self, request: job_pb2.CreateSnapshotRequest
    ) -> job_pb2.CreateSnapshotResponse:
        # Its number tells the next daemon whether the previous one has made it.
        return self._reattach.calling(lambda: self._control.create_snapshot(request))

    def list_snapshots(
        self, request: job_pb2.ListSnapshotsRequest
    ) -> job_pb2.ListSnapshotsResponse:
        return self._reattach.calling(lambda: self._control.list_snapshots(request))

    def read_snapshot(self, request: job_pb2.ReadSnapshotRequest) -> SnapshotReading:
        return SnapshotReading(self._reattach.where, request)

    def drop_snapshot(self, request: job_pb2.DropSnapshotRequest) -> job_pb2.DropSnapshotResponse:
        return self._reattach.calling(lambda: self._control.drop_snapshot(request))

    def put(self, requests: Iterator[tensor_pb2.PutRequest]) -> tensor_pb2.PutResponse:
        return self._control.put(requests)

    def get(self, request: tensor_pb2.GetRequest) -> Iterator[tensor_pb2.GetResponse]:
        return self._control.get(request)

    def get_moments(
        self, request: tensor_pb2.GetMomentsRequest
    ) -> Iterator[tensor_pb2.GetMomentsResponse]:
        return self._control.get_moments(request)

    def put_moments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest]
    ) -> tensor_pb2.PutMomentsResponse:
        return self._control.put_moments(requests)

    def begin_put_moments(self, requests: Sequence[tensor_pb2.PutMomentsRequest]) -> PutMomentsCall:
        return RepeatedCall(
            self._reattach,
            begin=lambda: self._control.begin_put_moments(requests),
            again=lambda: self._control.put_moments(iter(requests)),
        )

    def close(self) -> None:
        self._control.close()


class RepeatedStep:
    """A Step call that is sent again if it got no answer. It carries its number, so the daemon does
    not make the same step twice.
    """

    def __init__(
        self, control: Control, reattach: Reattach, request: session_pb2.StepRequest
    ) -> None:
        self._control = control
        self._reattach = reattach
        self._request = request
        self._lock = threading.Lock()
        self._epoch = reattach.epoch
        self._is_lost = False
        self._call: StepCall | _Answered | None = None
        try:
            self._call = control.begin_step(request)
        except DaemonUnavailable:
            self._is_lost = True  # another thread is re-attaching; `result` sends it

    def wait_until_sent(self) -> None:
        """It was sent at once, or `result` sends it."""

    def done(self) -> bool:
        return self._is_lost or (self._call is not None and self._call.done())

    def result(self) -> session_pb2.StepResponse:
        with self._lock:
            return self._reattach.calling(self._answer, epoch=self._epoch)

    def seconds(self) -> float:
        """Counted from the last time it was sent."""
        assert self._call is not None  # `result` has returned
        return self._call.seconds()

    def _answer(self) -> session_pb2.StepResponse:
        if self._is_lost:
            self._epoch = self._reattach.epoch
            began = time.perf_counter()
            # This one waits, which costs nothing here. A call that does not wait needs a thread,
            # and a process that is about to exit cannot start one.
            answer = self._control.step(self._request)
            self._call = _Answered(answer, time.perf_counter() - began)
            self._is_lost = False
        assert self._call is not None
        try:
            return self._call.result()
        except (DaemonUnavailable, DeadlineExceeded, PermissionDenied, UnknownName):
            self._is_lost = True
            raise
        except MemdError as refusal:
            self._is_lost = refusal.retry_after_s is not None
            raise


class _Sent(Protocol[AnswerT_co]):
    def result(self) -> AnswerT_co: ...


class RepeatedCall(Generic[T]):
    """A call that was sent, and is sent again if it got no answer."""

    def __init__(
        self, reattach: Reattach, *, begin: Callable[[], _Sent[T]], again: Callable[[], T]
    ) -> None:
        self._reattach = reattach
        self._again = again
        self._epoch = reattach.epoch
        self._call: _Sent[T] | None = None
        # Another thread may be re-attaching; `result` sends it then.
        with suppress(DaemonUnavailable):
            self._call = begin()

    def result(self) -> T:
        """Waits for the answer: once, or again after an interrupt. Raises MemdError if there is
        none, or it is an error."""
        return self._reattach.calling(self._answer, epoch=self._epoch)

    def _answer(self) -> T:
        if self._call is None:
            return self._again()
        try:
            return self._call.result()
        except Exception:
            self._call = None
            raise


class _Answered:
    """A Step call that has its answer."""

    def __init__(self, answer: session_pb2.StepResponse, seconds: float) -> None:
        self._answer = answer
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def result(self) -> session_pb2.StepResponse:
        return self._answer

    def seconds(self) -> float:
        return self._seconds
