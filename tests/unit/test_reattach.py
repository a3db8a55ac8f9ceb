"""The way back to a daemon that was away: what is waited out, and what other threads see of it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest

import memd_client
from memd_client.base.address import UnixAddress
from memd_client.connection import reattach
from memd_client.connection.reattach import Reattach, ReattachingControl
from memd_client.errors import from_code
from memd_proto.v1 import session_pb2, tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memd_client.connection.attach import AttachConnection
    from memd_client.connection.control import Control

PATIENCE_S = 30.0
SESSION = 7


class FakeConnection:
    """To the daemon that runs when it is made."""

    def __init__(self, world: World) -> None:
        self.control_address = "unix:///run/memd.sock"
        self.token = f"token {len(world.connections)}"
        self.daemon_process_id = 100 + world.daemon
        self.is_closed_here = False
        self._world = world
        self._daemon = world.daemon

    def is_closed_there(self) -> bool:
        return not self.is_closed_here and self._daemon != self._world.daemon

    def duplicate(self) -> int:
        if self._world.duplicate_failures:
            raise self._world.duplicate_failures.pop(0)
        return 4711

    def segments(self, session_id: int, first: int) -> list[int]:
        assert session_id == self._world.session_claimed
        return [first]

    def close(self) -> None:
        self.is_closed_here = True


class World:
    """One daemon after the other, control plane and data plane of one session."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self.daemon = 1
        self.connections: list[FakeConnection] = []
        self.connect_failures: list[Exception] = []
        self.attach_failures: list[Exception] = []
        self.duplicate_failures: list[Exception] = []
        self.during_attach: Callable[[], None] = lambda: None
        self.keeps = True
        self.attach_count = 0
        self.session_claimed = SESSION
        self.token = "token 0"
        self.is_suspended = False
        self.detach: Callable[[], session_pb2.DetachResponse] = session_pb2.DetachResponse
        self.reattach = Reattach(
            UnixAddress(socket=Path("/run/memd.sock")),
            connection=cast("AttachConnection", self.connect()),
            control=cast("Control", self),
            request=session_pb2.AttachRequest(job="gpt"),
            seconds=seconds,
        )
        self.reattach.begin(SESSION, self)

    def restart(self) -> None:
        self.daemon += 1
        self.session_claimed = 0

    def connect(self, _: object = None) -> FakeConnection:
        if self.connect_failures:
            raise self.connect_failures.pop(0)
        self.connections.append(FakeConnection(self))
        return self.connections[-1]

    def call(self) -> str:
        """A call over gRPC, as it is answered."""
        made = cast("FakeConnection", self.reattach.connection)
        if made.is_closed_there():
            raise memd_client.DaemonUnavailable("nobody answers")
        if self.token != self.connections[-1].token:
            raise memd_client.PermissionDenied("the token is not known")
        if self.session_claimed != SESSION:
            raise memd_client.UnknownName("this connection has no session 7")
        return "answered"

    def leased(self) -> str:
        if self.is_suspended or cast("FakeConnection", self.reattach.connection).is_closed_there():
            raise memd_client.DaemonUnavailable("the daemon has ended")
        return "leased"

    # Control plane

    def renew(self, *, address: str, token: str) -> None:
        assert address
        self.token = token

    def attach(self, request: session_pb2.AttachRequest) -> session_pb2.AttachResponse:
        assert request.kept_session_id == SESSION
        self.attach_count += 1
        self.during_attach()
        if self.attach_failures:
            raise self.attach_failures.pop(0)
        if self.keeps:
            self.session_claimed = SESSION
        return session_pb2.AttachResponse(kept=self.keeps, committed_step=3)

    # Data plane

    def suspend(self) -> None:
        self.is_suspended = True

    def reconnect(self, connection_fd: int) -> None:
        assert connection_fd == 4711
        self.is_suspended = False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(reattach, "AttachConnection", made.connect)
    return made


CAPACITY = from_code(5, "too many short calls at once")
DEADLINE = from_code(9, "resuming is not done yet")
REFUSED = memd_client.PermissionDenied("user 7 has 128 of at most 128 connections")
NO_DESCRIPTORS = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("attach_failures", CAPACITY),
        ("attach_failures", DEADLINE),
        ("attach_failures", REFUSED),
        ("attach_failures", memd_client.MemdError("a packet arrived cut short")),
        ("connect_failures", REFUSED),
        ("connect_failures", NO_DESCRIPTORS),
        ("duplicate_failures", NO_DESCRIPTORS),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_daemon_that_cannot_take_the_session_yet_is_asked_again(
    world: World, what: str, failure: Exception
) -> None:
    getattr(world, what).extend([failure, failure])
    world.restart()
    assert world.reattach.calling(world.leased, lease=True) == "leased"
    assert world.reattach.calling(world.call) == "answered"
    assert world.reattach.epoch == 1
    assert [connection.is_closed_here for connection in world.connections[:-1]] == [True] * (
        len(world.connections) - 1
    )


def test_a_daemon_that_took_no_session_in_time_is_asked_by_every_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(seconds=0.01)
    monkeypatch.setattr(reattach, "AttachConnection", world.connect)
    world.restart()

    def refuse() -> None:
        raise CAPACITY

    world.during_attach = refuse
    for call, lease in ((world.leased, True), (world.call, False)):
        with pytest.raises(
            memd_client.DaemonUnavailable, match=r"is back and has not taken.*too many short"
        ):
            world.reattach.calling(call, lease=lease)
    world.during_attach = lambda: None
    assert world.reattach.calling(world.leased, lease=True) == "leased"
    assert world.reattach.calling(world.call) == "answered"


def test_what_is_no_matter_of_time_ends_the_session(world: World) -> None:
    world.connect_failures = [memd_client.InvalidArgument("another protocol version")]
    world.restart()
    for _ in range(2):
        with pytest.raises(memd_client.SessionFenced, match="connect again: another protocol"):
            world.reattach.calling(world.call)


def test_a_session_that_is_closed_meanwhile_waits_no_longer(world: World) -> None:
    def close() -> None:
        world.reattach.close()
        raise CAPACITY

    world.during_attach = close
    world.restart()
    with pytest.raises(memd_client.DaemonUnavailable, match="was closed while it waited"):
        world.reattach.calling(world.call)
    assert world.attach_count == 1


class Other:
    """A thread that calls while the one of the test re-attaches."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.results: list[Any] = []

        def run() -> None:
            try:
                self.results.append(act())
            except memd_client.MemdError as failure:
                self.results.append(failure)

        self._thread = threading.Thread(target=run)

    def start(self) -> None:
        self._thread.start()

    def join(self, patience_s: float = PATIENCE_S) -> list[Any]:
        self._thread.join(patience_s)
        return self.results


@pytest.mark.parametrize(
    "met",
    [
        memd_client.UnknownName("this connection has no session 7"),
        memd_client.PermissionDenied("the token is not known"),
        memd_client.DaemonUnavailable("the channel was closed before this call was sent"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_another_threads_call_that_meets_the_next_daemon_too_early_is_made_again(
    world: World, met: Exception
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    calls = 0

    def call() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            has_begun.set()
            assert may_go_on.wait(PATIENCE_S)
            raise met
        return world.call()

    other = Other(lambda: world.reattach.calling(call))
    other.start()
    assert has_begun.wait(PATIENCE_S)

    def let_it_fail() -> None:
        may_go_on.set()
        other.join(0.1)  # where it does not wait for this thread, it has failed by then

    world.during_attach = let_it_fail
    world.restart()
    assert world.reattach.calling(world.call) == "answered"
    assert other.join() == ["answered"]
    assert (calls, world.attach_count) == (2, 1)


def test_calls_and_segments_wait_while_another_thread_re_attaches(world: World) -> None:
    others = [
        Other(lambda: world.reattach.calling(world.call)),
        Other(lambda: world.reattach.calling(world.leased, lease=True)),
        Other(lambda: world.reattach.segments(SESSION, 3)),
    ]
    met: list[list[Any]] = []

    def begin_others() -> None:
        for other in others:
            other.start()
        # None has an answer before this thread has: not even one that is wrong.
        met.extend(list(other.join(0.05)) for other in others)

    world.during_attach = begin_others
    world.restart()
    assert world.reattach.calling(world.call) == "answered"
    assert [other.join() for other in others] == [["answered"], ["leased"], [[3]]]
    assert met == [[], [], []]
    assert world.attach_count == 1


def test_a_name_that_is_not_there_is_told_at_once(world: World) -> None:
    with pytest.raises(memd_client.UnknownName, match="nothing named x"):
        world.reattach.calling(lambda: _raise(memd_client.UnknownName("nothing named x")))
    with pytest.raises(memd_client.PermissionDenied, match="user 8"):
        world.reattach.calling(lambda: _raise(memd_client.PermissionDenied("job of user 8")))
    assert world.attach_count == 0


def _raise(failure: Exception) -> None:
    raise failure


def busy(retry_after_s: float | None) -> memd_client.MemdError:
    return from_code(5, "too many steps at once", retry_after_s=retry_after_s)


class Refusing:
    """Refuses calls for a while, and notes the pauses between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refusals: memd_client.MemdError) -> None:
        self.refusals = list(refusals)
        self.pauses: list[float] = []
        self.numbers: list[int] = []
        monkeypatch.setattr(reattach, "pause", self.pauses.append)

    def call(self) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        return "answered"

    def begin_step(self, request: session_pb2.StepRequest) -> Refusing:
        self.numbers.append(request.step)
        return self

    def done(self) -> bool:
        return True

    def result(self) -> session_pb2.StepResponse:
        self.call()
        return session_pb2.StepResponse(committed_step=self.numbers[-1])

    def step(self, request: session_pb2.StepRequest) -> session_pb2.StepResponse:
        return self.begin_step(request).result()


def test_a_call_that_is_refused_for_a_while_is_made_again_no_sooner_than_the_daemon_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Refusing(monkeypatch, busy(1.5), busy(0.5))
    assert world.reattach.calling(daemon.call) == "answered"
    assert daemon.pauses == [1.5, 0.5]
    assert world.attach_count == 0


def test_a_step_that_is_refused_for_a_while_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Refusing(monkeypatch, busy(1.0), busy(1.0))
    control = ReattachingControl(cast("Control", daemon), world.reattach)
    call = control.begin_step(session_pb2.StepRequest(session_id=SESSION, step=4))
    assert call.result().committed_step == 4
    assert (daemon.numbers, daemon.pauses) == ([4, 4, 4], [1.0, 1.0])


@pytest.mark.parametrize(
    ("seconds", "retry_after_s", "is_closed"),
    [
        pytest.param(PATIENCE_S, None, False, id="something has to be done first"),
        pytest.param(PATIENCE_S, 2 * PATIENCE_S, False, id="later than the caller waits"),
        pytest.param(0.0, 1.0, False, id="the caller waits for nothing"),
        pytest.param(PATIENCE_S, 1.0, True, id="the session is closed"),
    ],
)
def test_a_refusal_that_is_not_waited_out_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float, retry_after_s: float | None, is_closed: bool
) -> None:
    world = World(seconds=seconds)
    daemon = Refusing(monkeypatch, busy(retry_after_s))
    if is_closed:
        world.reattach.close()
    with pytest.raises(memd_client.CapacityError, match="too many steps"):
        world.reattach.calling(daemon.call)
    assert daemon.pauses == []


def test_a_detach_whose_answer_died_with_the_daemon_is_done(world: World) -> None:
    control = ReattachingControl(
        cast("Control", FakeDetach(world, dies_first=True)), world.reattach
    )
    world.keeps = False
    control.detach(session_pb2.DetachRequest(session_id=SESSION))


def test_a_session_that_the_daemon_gave_up_is_told_of_by_detach(world: World) -> None:
    control = ReattachingControl(
        cast("Control", FakeDetach(world, dies_first=False)), world.reattach
    )
    with pytest.raises(memd_client.SessionFenced, match="gave this session up"):
        control.detach(session_pb2.DetachRequest(session_id=SESSION))


class FakeDetach:
    def __init__(self, world: World, *, dies_first: bool) -> None:
        self._world = world
        self._dies_first = dies_first

    def detach(self, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        assert request.session_id == SESSION
        if not self._dies_first:
            raise from_code(8, "the daemon gave this session up")
        self._world.restart()
        raise memd_client.DaemonUnavailable("it ended before it answered")


class FakeDeletes:
    """Deletes `x`, once; the daemon may end before it answers."""

    def __init__(self, world: World, *, dies_first: bool) -> None:
        self._world = world
        self._dies = dies_first
        self._is_stored = True

    def delete(self, request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse:
        assert list(request.names) == ["x"]
        was_stored, self._is_stored = self._is_stored, False
        if self._dies:
            self._dies = False
            self._world.restart()
            raise memd_client.DaemonUnavailable("it ended before it answered")
        return session_pb2.DeleteResponse(names_unknown=[] if was_stored else ["x"])


def test_a_delete_whose_answer_died_with_the_daemon_has_deleted_what_the_next_one_misses(
    world: World,
) -> None:
    control = ReattachingControl(
        cast("Control", FakeDeletes(world, dies_first=True)), world.reattach
    )
    request = session_pb2.DeleteRequest(session_id=SESSION, names=["x"])
    assert list(control.delete(request).names_unknown) == []
    assert world.reattach.epoch == 1
    assert list(control.delete(request).names_unknown) == ["x"], "a call of its own"


def test_a_delete_that_is_answered_says_what_is_unknown(world: World) -> None:
    control = ReattachingControl(
        cast("Control", FakeDeletes(world, dies_first=False)), world.reattach
    )
    request = session_pb2.DeleteRequest(session_id=SESSION, names=["x"])
    assert [list(control.delete(request).names_unknown) for _ in range(2)] == [[], ["x"]]


class FakeSteps:
    """Steps over a channel that is closed the first time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def begin_step(self, request: session_pb2.StepRequest) -> None:
        raise memd_client.DaemonUnavailable("the channel was closed before this call was sent")

    def step(self, request: session_pb2.StepRequest) -> session_pb2.StepResponse:
        self.numbers.append(request.step)
        return session_pb2.StepResponse(committed_step=request.step)


class FakeSentCalls:
    """Calls over a channel that is closed while the first one is under way, or before it."""

    def __init__(self, *, is_sent: bool) -> None:
        self._is_sent = is_sent
        self.synced: list[int] = []
        self.put: list[int] = []

    def begin_sync(self, request: session_pb2.SyncRequest) -> FakeSentCalls:
        return self._begin()

    def begin_put_moments(self, requests: Sequence[tensor_pb2.PutMomentsRequest]) -> FakeSentCalls:
        return self._begin()

    def _begin(self) -> FakeSentCalls:
        if not self._is_sent:
            raise memd_client.DaemonUnavailable("the channel was closed before this call was sent")
        return self

    def result(self) -> NoReturn:
        raise memd_client.DaemonUnavailable("the daemon is gone")

    def sync(self, request: session_pb2.SyncRequest) -> session_pb2.SyncResponse:
        self.synced.append(request.session_id)
        return session_pb2.SyncResponse(committed_step=4)

    def put_moments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest]
    ) -> tensor_pb2.PutMomentsResponse:
        self.put += [request.staged_shard_id for request in requests]
        return tensor_pb2.PutMomentsResponse()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_sync_without_an_answer_is_sent_again_when_that_is_waited_for(
    world: World, *, is_sent: bool
) -> None:
    calls = FakeSentCalls(is_sent=is_sent)
    control = ReattachingControl(cast("Control", calls), world.reattach)
    call = control.begin_sync(session_pb2.SyncRequest(session_id=SESSION))
    assert calls.synced == []
    world.restart()
    assert call.result().committed_step == 4
    assert calls.synced == [SESSION]


@pytest.mark.parametrize("is_sent", [False, True])
def test_moments_without_an_answer_are_put_again_when_that_is_waited_for(
    world: World, *, is_sent: bool
) -> None:
    calls = FakeSentCalls(is_sent=is_sent)
    control = ReattachingControl(cast("Control", calls), world.reattach)
    requests = [tensor_pb2.PutMomentsRequest(staged_shard_id=number) for number in (5, 6)]
    call = control.begin_put_moments(requests)
    assert calls.put == []
    world.restart()
    call.result()
    assert calls.put == [5, 6]


def test_a_sent_call_that_was_interrupted_is_waited_for_again_and_not_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = FakeSentCalls(is_sent=True)
    control = ReattachingControl(cast("Control", calls), world.reattach)
    call = control.begin_sync(session_pb2.SyncRequest(session_id=SESSION))
    interrupts = [KeyboardInterrupt()]

    def result() -> session_pb2.SyncResponse:
        if interrupts:
            raise interrupts.pop()
        return session_pb2.SyncResponse(committed_step=7)

    monkeypatch.setattr(calls, "result", result)
    with pytest.raises(KeyboardInterrupt):
        call.result()
    assert call.result().committed_step == 7
    assert calls.synced == []


def test_a_step_that_could_not_be_sent_is_sent_when_its_answer_is_waited_for(world: World) -> None:
    steps = FakeSteps()
    control = ReattachingControl(cast("Control", steps), world.reattach)
    call = control.begin_step(session_pb2.StepRequest(session_id=SESSION, step=4))
    assert call.done(), "somebody has to ask for it"
    assert call.result().committed_step == 4
    assert call.seconds() >= 0
    assert steps.numbers == [4]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_away", [False, True], ids=["there", "while it re-attaches"])
def test_a_forked_child_does_not_re_attach(world: World, is_away: bool) -> None:
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                world.reattach.calling(world.call)
            except memd_client.MemdError as error:
                status = 0 if "connect again in the child" in str(error) else 2
            os._exit(status + 4 * (world.attach_count > (1 if is_away else 0)))
        children.append(child)

    if is_away:
        world.during_attach = fork
    world.restart()
    if not is_away:
        fork()
    assert world.reattach.calling(world.call) == "answered"
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert world.reattach.calling(world.leased, lease=True) == "leased"
