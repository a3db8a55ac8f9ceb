"""The gRPC services over a real channel: who may call, what is refused, and what bytes arrive."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import (  # type: ignore[import-untyped]  # no types
    error_details_pb2,
)
from google.rpc import (
    status_pb2 as rich_status_pb2,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]  # no types
    reflection_pb2,
    reflection_pb2_grpc,
)

from memd import owner
from memd.peers import SESSIONS_PER_PROCESS_MAX, Peer, Peers
from memd.refusal import Refused, StatusCode
from memd.service import access, control, declarations, wire
from memd.service import session as session_service
from memd.service.call import FIELDS_MAX, holds_more_fields
from memd.service.control import SERVICES, ControlServer
from memd.service.places import RANKS, SHORT_CALLS, STEPS, STREAMS
from memd.service.tensor import CHUNK_BYTES
from memd.users import user_name
from memd_native import PROTOCOL_VERSION, RANKS_MAX
from memd_native.protocol import ProtocolVersions
from memd_proto.v1 import (
    check_pb2,
    check_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    tensor_pb2,
    tensor_pb2_grpc,
    types_pb2,
)
from tests.unit.fake_native import FakeServer, as_server, status_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OTHER_UID = 4242
TIMEOUT_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < TIMEOUT_S
        time.sleep(0.001)


@dataclass
class Service:
    server: FakeServer
    peers: Peers
    control: ControlServer
    channel: grpc.Channel
    jobs_max: int = 64
    far_ends: list[socket.socket] = field(default_factory=list)

    def caller(self, *, uid: int | None = None) -> Caller:
        connection, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(
            pid=os.getpid(),
            uid=os.getuid() if uid is None else uid,
            pidfd=os.pidfd_open(os.getpid()),
            connection=connection,
        )
        self.peers.add(peer)
        self.far_ends.append(far_end)
        return Caller(self.channel, peer, far_end)


class Caller:
    """One attached process's view of the control plane."""

    def __init__(self, channel: grpc.Channel, peer: Peer, far_end: socket.socket) -> None:
        self.peer = peer
        self.far_end = far_end
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)
        self.tensors = tensor_pb2_grpc.TensorServiceStub(channel)
        self.jobs = job_pb2_grpc.JobServiceStub(channel)
        self.status = status_pb2_grpc.StatusServiceStub(channel)
        self.checks = check_pb2_grpc.CheckServiceStub(channel)

    def call(self, method: Any, request: Any, *, timeout: float | None = TIMEOUT_S) -> Any:
        return method(request, timeout=timeout, metadata=(("memd-token", self.peer.token),))

    def attach(self, **fields: Any) -> session_pb2.AttachResponse:
        request = {
            "protocol_version": PROTOCOL_VERSION,
            "job": "gpt",
            "world_size": 1,
            "durability": "step",
            "without_shared_memory": True,
            **fields,
        }
        answer = self.call(self.sessions.Attach, session_pb2.AttachRequest(**request))
        assert isinstance(answer, session_pb2.AttachResponse)
        return answer

    def put(self, session_id: int, spec: types_pb2.ShardSpec, chunks: list[bytes]) -> Any:
        return self.call(self.tensors.Put, iter(put_requests(session_id, spec, chunks)))

    def get(self, session_id: int, name: str) -> bytes:
        request = tensor_pb2.GetRequest(session_id=session_id, name=name)
        return b"".join(part.data for part in self.call(self.tensors.Get, request))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    server, peers = FakeServer(), Peers()
    held: list[Service] = []
    control = ControlServer(as_server(server), peers=peers, jobs_max=lambda: held[0].jobs_max)
    control.listen(tmp_path / "memd.sock")
    with grpc.insecure_channel(f"unix://{tmp_path}/memd.sock") as channel:
        held.append(Service(server, peers, control, channel))
        yield held[0]
    control.stop(grace_s=1)
    for peer in peers.all():
        peers.remove(peer, reason="test ended")
    for far_end in held[0].far_ends:
        far_end.close()


def blob(name: str, size_bytes: int) -> types_pb2.ShardSpec:
    return types_pb2.ShardSpec(
        name=name,
        kind=types_pb2.SHARD_KIND_BLOB,
        dtype=types_pb2.D_TYPE_UINT8,
        shape=[size_bytes],
        tier=types_pb2.TIER_NVME,
    )


def put_requests(
    session_id: int, spec: types_pb2.ShardSpec, chunks: list[bytes]
) -> Iterator[tensor_pb2.PutRequest]:
    yield tensor_pb2.PutRequest(session_id=session_id, spec=spec, data=chunks[0])
    for chunk in chunks[1:]:
        yield tensor_pb2.PutRequest(data=chunk)


@dataclass
class Refusal:
    code: grpc.StatusCode
    message: str
    detail: types_pb2.ErrorDetail
    rich: Any


def refusal_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> Refusal:
    call: Any = error.value
    trailing = dict(call.trailing_metadata())
    return Refusal(
        code=call.code(),
        message=call.details(),
        detail=types_pb2.ErrorDetail.FromString(trailing.get("memd-error-bin", b"")),
        rich=rich_status_pb2.Status.FromString(trailing.get("grpc-status-details-bin", b"")),
    )


def test_the_control_socket_is_for_owner_and_group(service: Service, tmp_path: Path) -> None:
    assert (tmp_path / "memd.sock").stat().st_mode & 0o777 == 0o660


def test_a_call_without_a_token_is_refused(service: Service) -> None:
    stub = status_pb2_grpc.StatusServiceStub(service.channel)
    for metadata in ((), (("memd-token", "0" * 64),)):
        with pytest.raises(grpc.RpcError) as error:
            stub.GetStatus(status_pb2.GetStatusRequest(), timeout=TIMEOUT_S, metadata=metadata)
        assert refusal_of(error).code is grpc.StatusCode.UNAUTHENTICATED
        assert "connect to attach.sock" in refusal_of(error).message


def test_health_and_reflection_answer_without_a_token(service: Service) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", *SERVICES):
        request = health_pb2.HealthCheckRequest(service=name)
        answer = health.Check(request, timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
    listed = {each.name for each in answer.list_services_response.service}
    assert set(SERVICES) <= listed


def test_health_tells_when_the_volumes_are_fenced(service: Service) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    service.server.fence_reason = "a sync failed"
    for name in ("", *SERVICES):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watched.cancel()


def test_dropping_a_job_in_use_says_how_to_force_it(service: Service) -> None:
    caller = service.caller()
    caller.attach()
    with pytest.raises(grpc.RpcError) as error:
        caller.call(caller.jobs.DropJob, job_pb2.DropJobRequest(name="gpt"))
    assert refusal_of(error).code is grpc.StatusCode.FAILED_PRECONDITION
    assert refusal_of(error).detail.code == StatusCode.IN_USE
    assert "--force" in refusal_of(error).message


def test_shards_are_listed_in_pages_and_found_by_name(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SHARDS_IN_PAGE", 2)
    caller = service.caller()
    session_id = caller.attach().session_id
    names = [f"b{number}" for number in range(5)]
    request = session_pb2.DeclareRequest(
        session_id=session_id, shards=[blob(name, 4) for name in names]
    )
    caller.call(caller.sessions.Declare, request)
    listed, pages, first = [], 0, 0
    while first or not pages:
        page = caller.call(
            caller.sessions.ListShards,
            session_pb2.ListShardsRequest(session_id=session_id, page_first=first),
        )
        assert len(page.shards) <= 2
        listed += [shard.spec.name for shard in page.shards]
        pages, first = pages + 1, page.page_next
    assert (listed, pages) == (names, 3)
    shown = caller.call(caller.jobs.GetJob, job_pb2.GetJobRequest(name="gpt"))
    assert [shard.spec.name for shard in shown.shards] == names[:2]
    found = caller.call(
        caller.sessions.GetShard, session_pb2.GetShardRequest(session_id=session_id, name="b3")
    )
    assert found.shard.spec == blob("b3", 4)
    with pytest.raises(grpc.RpcError) as error:
        caller.call(
            caller.sessions.GetShard, session_pb2.GetShardRequest(session_id=session_id, name="c")
        )
    assert refusal_of(error).code is grpc.StatusCode.NOT_FOUND


def test_jobs_are_listed_in_pages(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "JOBS_IN_PAGE", 2)
    caller, other = service.caller(), service.caller(uid=OTHER_UID)
    for number in range(5):
        caller.attach(job=f"j{number}")
    other.attach(job="theirs")
    first = other.call(other.jobs.ListJobs, job_pb2.ListJobsRequest())
    assert ([job.name for job in first.jobs], first.page_next) == (["theirs"], 0)
    status = caller.call(caller.status.GetStatus, status_pb2.GetStatusRequest())
    assert [job.name for job in status.jobs] == ["j0", "j1"]
    listed, page_first = [], status.jobs_page_next
    while page_first:
        page = caller.call(caller.jobs.ListJobs, job_pb2.ListJobsRequest(page_first=page_first))
        listed += [job.name for job in page.jobs]
        page_first = page.page_next
    assert listed == ["j2", "j3", "j4", "theirs"]


def test_a_message_that_grows_as_it_is_decoded_is_refused_before_it_is(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    head = session_pb2.DeclareRequest(session_id=session_id).SerializeToString()
    packet = head + b"\x12\x00" * (FIELDS_MAX + 1)  # specs without a byte each
    declare: Any = service.channel.unary_unary("/memd.v1.SessionService/Declare")
    with pytest.raises(grpc.RpcError) as error:
        caller.call(declare, packet)
    assert refusal_of(error).code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"at most {FIELDS_MAX} fields" in refusal_of(error).message
    # A part of a stream is a message too.
    put: Any = service.channel.stream_unary("/memd.v1.TensorService/Put")
    with pytest.raises(grpc.RpcError) as error:
        caller.call(put, iter([b"\x1a\x00" * (FIELDS_MAX + 1)]))
    assert f"at most {FIELDS_MAX} fields" in refusal_of(error).message


@pytest.mark.parametrize(
    ("packet", "count"),
    [
        (b"", 0),
        (session_pb2.SyncRequest(session_id=1 << 40).SerializeToString(), 1),
        (session_pb2.DropGradientsRequest(shard_ids=range(1000)).SerializeToString(), 1),
        (session_pb2.DeleteRequest(names=["a" * 300, "", "b"]).SerializeToString(), 3),
        (b"\x09" + bytes(8) + b"\x15" + bytes(4), 2),  # fixed 64 and 32 bits
    ],
)
def test_fields_of_a_message_are_counted_without_decoding_it(packet: bytes, count: int) -> None:
    assert not holds_more_fields(packet, count)
    if count:
        assert holds_more_fields(packet, count - 1)
    for end in range(len(packet)):
        holds_more_fields(packet[:end], 10)  # a message that is cut off ends too


def test_a_tensor_of_too_many_dimensions_is_refused(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    spec = blob("deep", 1)
    spec.shape.extend([1] * 32)
    with pytest.raises(grpc.RpcError) as error:
        caller.call(
            caller.sessions.Declare,
            session_pb2.DeclareRequest(session_id=session_id, shards=[spec]),
        )
    assert "33 dimensions; at most 32" in refusal_of(error).message


def test_a_user_leaves_jobs_to_others(service: Service) -> None:
    service.jobs_max = 4
    for number in range(3):
        service.caller(uid=OTHER_UID).attach(job=f"j{number}")
    with pytest.raises(grpc.RpcError) as error:
        service.caller(uid=OTHER_UID).attach(job="j3")
    assert f"user {OTHER_UID} has 3 of at most 3 jobs" in refusal_of(error).message
    service.caller(uid=OTHER_UID + 1).attach(job="another")


@pytest.mark.parametrize("is_full", [True, False])
def test_nobody_waits_for_the_users_name_of_a_refusal(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    if is_full:
        service.jobs_max = 4
        for number in range(3):
            service.caller(uid=OTHER_UID).attach(job=f"j{number}")
    else:
        service.caller().attach()
    asked, answered = threading.Event(), threading.Event()

    def slow(uid: int) -> str:
        asked.set()
        answered.wait(TIMEOUT_S)
        return str(uid)

    monkeypatch.setattr(owner, "user_name", slow)
    stranger = service.caller(uid=OTHER_UID)
    request = session_pb2.AttachRequest(
        protocol_version=PROTOCOL_VERSION, job="j9" if is_full else "gpt", world_size=1
    )
    call = stranger.sessions.Attach.future(
        request, timeout=TIMEOUT_S, metadata=(("memd-token", stranger.peer.token),)
    )
    assert asked.wait(TIMEOUT_S)
    service.jobs_max = 64
    try:
        service.caller(uid=OTHER_UID + 1).attach(job="another")
        assert not call.done()
    finally:
        answered.set()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_full else grpc.StatusCode.PERMISSION_DENIED
    assert call.code() is code


def test_a_caller_that_did_not_wait_has_no_session(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = service.caller()
    is_gone = threading.Event()
    attach = service.server.attach

    def late(*arguments: Any, **names: Any) -> Any:
        grant = attach(*arguments, **names)
        assert is_gone.wait(TIMEOUT_S)
        return grant

    monkeypatch.setattr(service.server, "attach", late)
    with pytest.raises(grpc.RpcError) as error:
        caller.call(
            caller.sessions.Attach,
            session_pb2.AttachRequest(
                protocol_version=PROTOCOL_VERSION, job="gpt", without_shared_memory=True
            ),
            timeout=0.5,
        )
    assert refusal_of(error).code is grpc.StatusCode.DEADLINE_EXCEEDED
    is_gone.set()
    wait_until(lambda: service.control.gate.places_taken(SHORT_CALLS) == 0)
    assert not caller.peer.sessions
    assert not service.server.sessions()


def test_a_changing_call_without_a_deadline_is_refused(service: Service) -> None:
    caller = service.caller()
    request = session_pb2.SyncRequest(session_id=1)
    with pytest.raises(grpc.RpcError) as error:
        caller.call(caller.sessions.Sync, request, timeout=None)
    assert refusal_of(error).code is grpc.StatusCode.INVALID_ARGUMENT
    assert "needs a deadline" in refusal_of(error).message
    assert service.server.calls["sync"] == 0
    assert caller.call(caller.jobs.ListJobs, job_pb2.ListJobsRequest(), timeout=None).jobs == []


def test_an_error_carries_code_and_detail_in_both_forms(service: Service) -> None:
    caller = service.caller()
    with pytest.raises(grpc.RpcError) as error:
        caller.attach(host_bytes=1 << 50)
    refusal = refusal_of(error)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.detail.code == StatusCode.CAPACITY
    assert refusal.rich.message == refusal.message
    unpacked = types_pb2.ErrorDetail()
    assert refusal.rich.details[0].Unpack(unpacked)
    assert unpacked == refusal.detail
    assert service.control.gate.admission_rejections() == {"capacity": 1}
    assert service.server.jobs() == []


def test_calls_are_counted_by_method_and_what_they_were_answered(service: Service) -> None:
    caller = service.caller()
    with pytest.raises(grpc.RpcError):
        caller.attach(host_bytes=1 << 50)
    for _ in range(2):
        caller.call(caller.jobs.ListJobs, job_pb2.ListJobsRequest())
    with pytest.raises(grpc.RpcError):
        caller.jobs.ListJobs(job_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
    answers = service.control.gate.answers.by_method()
    assert answers.keys() == {"Attach", "ListJobs"}
    assert answers["Attach"].codes == {"resource_exhausted": 1}
    assert answers["ListJobs"].codes == {"ok": 2, "unauthenticated": 1}
    assert answers["ListJobs"].cumulative()[-1] == 3
    assert answers["ListJobs"].seconds > 0


def details_by_name(refusal: Refusal) -> dict[str, Any]:
    """Those of google.rpc."""
    found = {}
    for packed in refusal.rich.details[1:]:
        detail = getattr(error_details_pb2, packed.TypeName().removeprefix("google.rpc."))()
        assert packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


@pytest.mark.parametrize(
    ("attempt", "reason", "metadata"),
    [
        (
            lambda caller: caller.attach(job="bert", host_bytes=1 << 50),
            "CAPACITY",
            {"method": "Attach", "job": "bert"},
        ),
        (
            lambda caller: caller.get(caller.attach(job="gpt").session_id, "none"),
            "NOT_FOUND",
            {"method": "Get", "job": "gpt"},
        ),
        (
            lambda caller: caller.call(caller.jobs.GetJob, job_pb2.GetJobRequest(name="none")),
            "NOT_FOUND",
            {"method": "GetJob", "job": "none"},
        ),
        (
            lambda caller: caller.call(
                caller.jobs.GetJob, job_pb2.GetJobRequest(name="\N{SNOWMAN}" * 129)
            ),
            "NOT_FOUND",
            {"method": "GetJob"},
        ),
        (  # as long as a message may be
            lambda caller: caller.call(caller.jobs.GetJob, job_pb2.GetJobRequest(name="x" * 3000)),
            "NOT_FOUND",
            {"method": "GetJob"},
        ),
        (
            lambda caller: caller.call(
                caller.sessions.Sync, session_pb2.SyncRequest(session_id=9), timeout=None
            ),
            "INVALID_ARGUMENT",
            {"method": "Sync"},
        ),
    ],
)
def test_an_error_tells_its_reason_call_and_job_as_google_rpc_does(
    service: Service,
    attempt: Callable[[Caller], object],
    reason: str,
    metadata: dict[str, str],
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        attempt(service.caller())
    details = details_by_name(refusal_of(error))
    assert list(details) == ["ErrorInfo"]
    info = details["ErrorInfo"]
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "memd", metadata)


def test_an_error_of_the_data_plane_tells_its_errno_and_the_job_that_waits_for_the_device(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = service.caller()
    session_id = caller.attach(job="gpt").session_id

    def fail(*_: object, **__: object) -> None:
        failed = status_error(StatusCode.DEVICE, "sync of /volume: Input/output error")
        failed.error_number = errno.EIO
        raise failed

    monkeypatch.setattr(service.server, "sync", fail)
    with pytest.raises(grpc.RpcError) as error:
        caller.call(caller.sessions.Sync, session_pb2.SyncRequest(session_id=session_id))
    refusal = refusal_of(error)
    assert refusal.detail == types_pb2.ErrorDetail(code=6, error_number=errno.EIO)
    details = details_by_name(refusal)
    assert list(details) == ["ErrorInfo", "PreconditionFailure"]
    assert details["ErrorInfo"].metadata == {"method": "Sync", "job": "gpt", "errno": "EIO"}
    (violation,) = details["PreconditionFailure"].violations
    assert (violation.type, violation.subject) == ("DEVICE", "gpt")


def test_a_job_in_use_is_a_precondition_that_fails(service: Service) -> None:
    caller = service.caller()
    caller.attach(job="gpt")
    with pytest.raises(grpc.RpcError) as error:
        caller.call(caller.jobs.DropJob, job_pb2.DropJobRequest(name="gpt"))
    refusal = refusal_of(error)
    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
    (violation,) = details_by_name(refusal)["PreconditionFailure"].violations
    assert (violation.type, violation.subject) == ("IN_USE", "gpt")


def test_a_limit_of_sessions_is_a_quota_that_does_not_pass_by_itself(service: Service) -> None:
    caller = service.caller()
    for number in range(SESSIONS_PER_PROCESS_MAX):
        caller.attach(job=f"job-{number}")
    with pytest.raises(grpc.RpcError) as error:
        caller.attach(job="another")
    details = details_by_name(refusal_of(error))
    assert list(details) == ["ErrorInfo", "QuotaFailure"]
    (violation,) = details["QuotaFailure"].violations
    assert violation.subject == "process"
    assert violation.description == "at most 32 sessions"


@pytest.mark.parametrize(
    ("name", "subject", "description"),
    [
        ("host_bytes", "job", "at most 4096 bytes of host_bytes"),
        ("nvme_bytes", "job", "at most 4096 bytes of nvme_bytes"),
        ("host", "daemon", "at most 4096 bytes of host, which are free"),
        ("nvme", "daemon", "at most 4096 bytes of nvme, which are free"),
    ],
)
def test_a_quota_of_bytes_that_the_data_plane_names_is_told(
    service: Service, monkeypatch: pytest.MonkeyPatch, name: str, subject: str, description: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        failed = status_error(StatusCode.CAPACITY, "no room")
        failed.quota_name, failed.quota_bytes = name, 4096
        raise failed

    monkeypatch.setattr(service.server, "attach", fail)
    with pytest.raises(grpc.RpcError) as error:
        service.caller().attach()
    details = details_by_name(refusal_of(error))
    assert list(details) == ["ErrorInfo", "QuotaFailure"]
    (violation,) = details["QuotaFailure"].violations
    assert (violation.subject, violation.description) == (subject, description)


@pytest.mark.parametrize(
    ("here", "there", "asked", "agreed"),
    [
        ((4, 5), (4, 5), 5, 5),
        ((4, 5), (3, 4), 4, 4),  # an older client
        ((4, 5), (5, 9), 5, 5),  # a newer one
        ((4, 6), (3, 9), 6, 6),
        ((4, 5), None, 4, 4),  # one that knows no ranges
        ((4, 5), (4, 5), 4, 5),  # the ranges count, not the client's choice
        ((4, 5), (1, 3), 3, None),
        ((4, 5), (6, 7), 6, None),
        ((4, 5), None, 6, None),
        ((4, 5), (5, 4), 5, None),  # no range at all
    ],
)
def test_a_session_has_the_newest_version_that_both_sides_speak(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    here: tuple[int, int],
    there: tuple[int, int] | None,
    asked: int,
    agreed: int | None,
) -> None:
    monkeypatch.setattr(session_service, "SPOKEN", versions(here))
    spoken = {} if there is None else {"protocol_range": range_of(there)}
    if agreed is not None:
        attached = service.caller().attach(protocol_version=asked, **spoken)
        assert attached.protocol_version == agreed
        return
    with pytest.raises(grpc.RpcError) as error:
        service.caller().attach(protocol_version=asked, **spoken)
    said = versions(there or (asked, asked))
    assert f"version {said} and this daemon" in refusal_of(error).message
    assert f"version {versions(here)}; install the same memd" in refusal_of(error).message
    assert service.server.jobs() == []


def versions(bounds: tuple[int, int]) -> ProtocolVersions:
    return ProtocolVersions(oldest=bounds[0], newest=bounds[1])


def range_of(bounds: tuple[int, int]) -> types_pb2.ProtocolRange:
    return types_pb2.ProtocolRange(oldest=bounds[0], newest=bounds[1])


@pytest.mark.parametrize(("kept", "is_spoken"), [(3, False), (4, True), (5, True), (6, False)])
def test_a_session_that_was_kept_keeps_its_version(
    service: Service, monkeypatch: pytest.MonkeyPatch, kept: int, is_spoken: bool
) -> None:
    monkeypatch.setattr(session_service, "SPOKEN", versions((4, 5)))
    caller = service.caller()
    caller.peer.start_time = 1  # so that it is known
    session_id = caller.attach(protocol_version=5).session_id
    again = {"protocol_version": kept, "kept_session_id": session_id}
    if is_spoken:
        attached = caller.attach(**again, protocol_range=range_of((3, 6)))
        assert (attached.kept, attached.protocol_version) == (True, kept)
        return
    with pytest.raises(grpc.RpcError) as error:
        caller.attach(**again, protocol_range=range_of((3, 6)))
    assert f"version {kept} and this daemon" in refusal_of(error).message


def test_a_clients_range_is_named_where_it_is_refused(service: Service) -> None:
    newest = PROTOCOL_VERSION + 5
    spoken = types_pb2.ProtocolRange(oldest=newest - 2, newest=newest)
    with pytest.raises(grpc.RpcError) as error:
        service.caller().attach(protocol_version=newest, protocol_range=spoken)
    assert f"version {newest - 2} to {newest} and this daemon" in refusal_of(error).message


def test_another_protocol_version_is_refused_with_both_named(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as error:
        service.caller().attach(protocol_version=7)
    refusal = refusal_of(error)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "version 7" in refusal.message
    assert f"version {PROTOCOL_VERSION}" in refusal.message
    assert "install the same memd" in refusal.message
    assert service.server.jobs() == []


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"job": ""}, grpc.StatusCode.INVALID_ARGUMENT, "a job's name has 1 to 128"),
        ({"job": 'a"\n'}, grpc.StatusCode.INVALID_ARGUMENT, "a job's name has 1 to 128"),
        ({"rank": 2, "world_size": 2}, grpc.StatusCode.INVALID_ARGUMENT, "rank 2 of 2"),
        ({"rank": 0, "world_size": 17}, grpc.StatusCode.INVALID_ARGUMENT, "at most 16"),
    ],
)
def test_an_attach_that_cannot_be_served_is_refused_and_makes_no_job(
    service: Service, fields: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        service.caller().attach(**fields)
    assert refusal_of(error).code is code
    assert message in refusal_of(error).message
    assert service.server.jobs() == []


def test_another_users_job_is_refused_with_its_owner_named(service: Service) -> None:
    session_id = service.caller().attach().session_id
    stranger = service.caller(uid=OTHER_UID)
    refused = [
        lambda: stranger.attach(fresh=True),
        lambda: stranger.call(stranger.jobs.GetJob, job_pb2.GetJobRequest(name="gpt")),
        lambda: stranger.call(stranger.jobs.DropJob, job_pb2.DropJobRequest(name="gpt")),
        lambda: stranger.call(
            stranger.jobs.SetJobWeight, job_pb2.SetJobWeightRequest(name="gpt", weight=0.5)
        ),
    ]
    for attempt in refused:
        with pytest.raises(grpc.RpcError) as error:
            attempt()  # type: ignore[no-untyped-call]  # no types
        assert refusal_of(error).code is grpc.StatusCode.PERMISSION_DENIED
        assert f"belongs to user {user_name(os.getuid())} and you are user {OTHER_UID};" in (
            refusal_of(error).message
        )
    assert stranger.call(stranger.jobs.ListJobs, job_pb2.ListJobsRequest()).jobs == []
    assert stranger.call(stranger.status.GetStatus, status_pb2.GetStatusRequest()).jobs == []
    assert [job.name for job in service.server.jobs()] == ["gpt"]
    assert session_id not in service.server.detached


def test_the_daemons_user_administers_but_does_not_join_other_users_jobs(
    service: Service,
) -> None:
    service.caller(uid=OTHER_UID).attach(job="theirs")
    admin = service.caller()
    listed = admin.call(admin.jobs.ListJobs, job_pb2.ListJobsRequest()).jobs
    assert [(job.name, job.uid) for job in listed] == [("theirs", OTHER_UID)]
    with pytest.raises(grpc.RpcError) as error:
        admin.attach(job="theirs")
    assert refusal_of(error).code is grpc.StatusCode.PERMISSION_DENIED
    admin.call(admin.jobs.DropJob, job_pb2.DropJobRequest(name="theirs", force=True))
    assert service.server.jobs() == []


def test_a_user_gives_own_jobs_less_and_only_the_daemons_user_more(service: Service) -> None:
    stranger = service.caller(uid=OTHER_UID)
    stranger.attach(job="theirs")

    def set_weight(caller: Caller, weight: float) -> float:
        caller.call(
            caller.jobs.SetJobWeight, job_pb2.SetJobWeightRequest(name="theirs", weight=weight)
        )
        answer = caller.call(caller.jobs.GetJob, job_pb2.GetJobRequest(name="theirs"))
        assert isinstance(answer, job_pb2.GetJobResponse)
        return answer.job.weight

    assert set_weight(stranger, 0.25) == 0.25
    assert set_weight(stranger, 1) == 1
    with pytest.raises(grpc.RpcError) as error:
        set_weight(stranger, 1.5)
    assert refusal_of(error).code is grpc.StatusCode.PERMISSION_DENIED
    assert "takes from other users' jobs" in refusal_of(error).message
    assert set_weight(service.caller(), 1.5) == 1.5


def test_a_user_checks_own_jobs_and_the_daemons_user_everything(service: Service) -> None:
    service.caller().attach(job="gpt")
    stranger = service.caller(uid=OTHER_UID)
    stranger.attach(job="theirs")
    ids = {job.name: job.job_id for job in service.server.jobs()}

    def check(caller: Caller, job: str) -> check_pb2.CheckResponse:
        request = check_pb2.CheckRequest(job=job)
        *_, last = caller.call(caller.checks.Check, request, timeout=None)
        assert isinstance(last, check_pb2.CheckResponse)
        return last

    assert check(stranger, "").report.seconds == 0.5
    check(service.caller(), "")
    check(service.caller(), "theirs")
    assert service.server.checks_begun == [
        ([ids["theirs"]], False),
        ([ids["gpt"], ids["theirs"]], True),
        ([ids["theirs"]], False),
    ]
    with pytest.raises(grpc.RpcError) as error:
        check(stranger, "gpt")
    assert refusal_of(error).code is grpc.StatusCode.PERMISSION_DENIED
    assert len(service.server.checks_begun) == 3
    assert not service.server.checks  # each was ended


def test_a_job_beyond_the_limit_is_refused_and_an_existing_one_is_not(service: Service) -> None:
    service.jobs_max = 1
    caller = service.caller()
    caller.attach()
    with pytest.raises(grpc.RpcError) as error:
        caller.attach(job="another")
    assert refusal_of(error).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the daemon has 1 of at most 1 jobs" in refusal_of(error).message
    assert not caller.attach().created


def test_a_session_belongs_to_the_connection_that_opened_it(service: Service) -> None:
    session_id = service.caller().attach().session_id
    other = service.caller()
    with pytest.raises(grpc.RpcError) as error:
        other.call(other.sessions.Detach, session_pb2.DetachRequest(session_id=session_id))
    assert refusal_of(error).code is grpc.StatusCode.NOT_FOUND
    assert session_id not in service.server.detached


def test_a_session_is_no_session_of_another_job(service: Service) -> None:
    caller, again = service.caller(), service.caller()
    caller.peer.start_time = again.peer.start_time = 1
    session_id = caller.attach(job="gpt").session_id
    caller.attach(job="bert")
    answer = again.attach(job="bert", kept_session_id=session_id)
    assert not answer.kept
    assert answer.session_id == 0


def test_what_a_job_uses_of_the_disk_includes_its_records(service: Service) -> None:
    service.caller().attach()
    (job,) = service.server.jobs()
    used = replace(job, nvme_bytes_used=4096, metadata_bytes=512)
    (message,) = wire.job_messages([used], [])  # type: ignore[list-item]  # the fake's own record
    assert message.nvme_bytes_used == 4608
    assert not message.HasField("counters")


def test_the_data_plane_answers_before_the_caller_gives_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    sync = service.server.sync
    waits_s: list[float] = []

    def noted(session: int, *, timeout_s: float) -> Any:
        waits_s.append(timeout_s)
        return sync(session, timeout_s=timeout_s)

    monkeypatch.setattr(service.server, "sync", noted)
    timeouts_s = (10.0, 1.0)
    for timeout_s in timeouts_s:
        request = session_pb2.SyncRequest(session_id=session_id)
        caller.call(caller.sessions.Sync, request, timeout=timeout_s)
    assert len(waits_s) == 2
    assert all(wait < timeout for wait, timeout in zip(waits_s, timeouts_s, strict=True))


def test_attach_passes_three_descriptors_and_detach_ends_the_session(service: Service) -> None:
    caller = service.caller()
    answer = caller.attach(without_shared_memory=False)
    _, fds, _, _ = socket.recv_fds(caller.far_end, 4096, 8)
    for fd in fds:
        os.close(fd)
    assert len(fds) == 3
    request = session_pb2.DetachRequest(session_id=answer.session_id)
    assert caller.call(caller.sessions.Detach, request).leases_dropped == 2
    assert answer.session_id in service.server.detached


def test_a_session_whose_descriptors_cannot_be_passed_is_ended(service: Service) -> None:
    caller = service.caller()
    caller.far_end.close()
    with pytest.raises(grpc.RpcError) as error:
        caller.attach(without_shared_memory=False)
    assert refusal_of(error).code is grpc.StatusCode.UNAVAILABLE
    assert "keep its attach connection open" in refusal_of(error).message
    assert len(service.server.detached) == 1
    assert not caller.peer.sessions


def test_a_step_counts_and_its_shards_reach_the_data_plane(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    adam = session_pb2.AdamSettings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decoupled=True)
    group = session_pb2.StepGroup(settings=adam, shard_ids=[1, 2])
    request = session_pb2.StepRequest(session_id=session_id, groups=[group])
    answer = caller.call(caller.sessions.Step, request)
    assert (answer.committed_step, answer.written_bytes) == (1, 2)


def test_a_step_that_is_in_memory_alone_says_why_and_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    service.server.disk_error = "its commit to the disk failed"
    request = session_pb2.StepRequest(session_id=session_id)
    answer = caller.call(caller.sessions.Step, request)
    assert (answer.committed_step, answer.disk_error) == (1, "its commit to the disk failed")
    (record,) = [each for each in caplog.records if each.message == "a step is not on disk"]
    assert record.__dict__["reason"] == "its commit to the disk failed"


def test_a_declaration_of_several_calls_is_made_with_the_last(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id

    def declare(first: int, count: int, *, more: bool, declaration: int = 7) -> list[str]:
        request = session_pb2.DeclareRequest(
            session_id=session_id,
            shards=[blob(f"b{number}", 4) for number in range(first, first + count)],
            declaration=declaration,
            shards_before=first,
            more_follows=more,
        )
        answer = caller.call(caller.sessions.Declare, request)
        return [shard.spec.name for shard in answer.shards]

    def names() -> list[str]:
        request = session_pb2.ListShardsRequest(session_id=session_id)
        return [
            shard.spec.name for shard in caller.call(caller.sessions.ListShards, request).shards
        ]

    assert declare(0, 3, more=True) == []
    # The answer was lost: the client sends it again.
    assert declare(0, 3, more=True) == []
    assert declare(3, 2, more=True) == []
    assert names() == []
    assert declare(5, 1, more=False) == ["b5"]
    assert names() == [f"b{number}" for number in range(6)]
    # It has ended, and nobody knows the calls before this one.
    with pytest.raises(grpc.RpcError) as error:
        declare(6, 1, more=False)
    assert refusal_of(error).code is grpc.StatusCode.UNAVAILABLE
    assert declare(0, 8, more=True) == []
    with pytest.raises(grpc.RpcError) as error:
        declare(8, 1, more=False, declaration=8)
    assert refusal_of(error).code is grpc.StatusCode.UNAVAILABLE
    assert len(names()) == 6


def test_declarations_that_do_not_end_are_bounded_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    pending = declarations.Declarations(clock_s=lambda: now_s)
    monkeypatch.setattr(declarations, "SHARDS_PENDING_MAX", 10)

    def gather(session_id: int, first: int, count: int) -> int:
        return len(
            pending.gather(
                session_pb2.DeclareRequest(
                    session_id=session_id,
                    shards=[blob("b", 4)] * count,
                    declaration=1,
                    shards_before=first,
                    more_follows=True,
                )
            )
        )

    assert gather(1, 0, 6) == 6
    with pytest.raises(Refused, match="at most 10 shards"):
        gather(2, 0, 5)
    assert gather(1, 6, 4) == 10
    # Its answer was lost: the client sends it again.
    assert gather(1, 6, 4) == 10
    now_s = declarations.ABANDONED_S + 1
    assert gather(2, 0, 5) == 5
    with pytest.raises(Refused, match="not known"):
        gather(1, 10, 1)


def test_a_shard_without_kind_or_dtype_is_refused(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    for wrong in (
        types_pb2.ShardSpec(name="w", shape=[2]),
        types_pb2.ShardSpec(name="", kind=1, dtype=1, tier=1),  # type: ignore[arg-type]
        types_pb2.ShardSpec(name="w", kind=1, dtype=99, tier=1),  # type: ignore[arg-type]
    ):
        request = session_pb2.DeclareRequest(session_id=session_id, shards=[wrong])
        with pytest.raises(grpc.RpcError) as error:
            caller.call(caller.sessions.Declare, request)
        assert refusal_of(error).code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("size_bytes", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 3])
def test_what_was_put_in_pieces_is_got_whole(service: Service, size_bytes: int) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    data = os.urandom(size_bytes)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, size_bytes, CHUNK_BYTES)]
    answer = caller.put(session_id, blob("x", size_bytes), chunks)
    assert answer.shard.written
    assert caller.get(session_id, "x") == data


def test_a_put_of_the_wrong_length_changes_nothing(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    caller.put(session_id, blob("x", 4), [b"good"])
    for chunks in ([b"bad"], [b"bad", b"long"], [b"too long at once"]):
        with pytest.raises(grpc.RpcError) as error:
            caller.put(session_id, blob("x", 4), chunks)
        assert "nothing was changed" in refusal_of(error).message
        assert caller.get(session_id, "x") == b"good"


def test_a_put_that_breaks_off_changes_nothing(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    caller.put(session_id, blob("x", 4), [b"good"])
    server = service.server

    def broken() -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(session_id=session_id, spec=blob("x", 4), data=b"ba")
        wait_until(lambda: server.leases_begun == 2)
        raise ConnectionAbortedError

    with pytest.raises(grpc.RpcError):
        caller.call(caller.tensors.Put, broken())
    # The caller hears of the end first.
    wait_until(lambda: server.leases_ended == 2)
    assert caller.get(session_id, "x") == b"good"


def test_what_was_never_put_is_not_found(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    with pytest.raises(grpc.RpcError) as error:
        caller.get(session_id, "nothing")
    assert refusal_of(error).code is grpc.StatusCode.NOT_FOUND
    assert "holds nothing named nothing" in refusal_of(error).message


@pytest.mark.parametrize("keeps_maximum", [False, True])
def test_moments_go_in_and_come_out(service: Service, keeps_maximum: bool) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    element_count = CHUNK_BYTES // 8 + 5
    spec = types_pb2.ShardSpec(
        name="w",
        kind=types_pb2.SHARD_KIND_PARAMETER,
        dtype=types_pb2.D_TYPE_FLOAT32,
        shape=[element_count],
        tier=types_pb2.TIER_NVME,
        keeps_maximum=keeps_maximum,
    )
    declare = session_pb2.DeclareRequest(session_id=session_id, shards=[spec])
    (shard,) = caller.call(caller.sessions.Declare, declare).shards
    assert shard.spec.keeps_maximum == keeps_maximum
    first, second = os.urandom(4 * element_count), os.urandom(4 * element_count)
    maximum = os.urandom(4 * element_count) if keeps_maximum else b""
    half = 4 * 1000
    parts = [
        tensor_pb2.PutMomentsRequest(
            session_id=session_id,
            shard_id=shard.shard_id,
            generation=3,
            element_first=part.start // 4,
            exp_avg=first[part],
            exp_avg_sq=second[part],
            max_exp_avg_sq=maximum[part],
        )
        for part in (slice(0, half), slice(half, 4 * element_count))
    ]
    caller.call(caller.tensors.PutMoments, iter(parts))
    assert service.server.calls["sync"] == 1
    request = tensor_pb2.GetMomentsRequest(session_id=session_id, shard_id=shard.shard_id)
    answers = list(caller.call(caller.tensors.GetMoments, request))
    assert b"".join(answer.exp_avg for answer in answers) == first
    assert b"".join(answer.exp_avg_sq for answer in answers) == second
    assert b"".join(answer.max_exp_avg_sq for answer in answers) == maximum
    assert {answer.generation for answer in answers} == {3}


def test_moments_of_blobs_are_durable_with_the_sync_that_drops_the_blobs(
    service: Service,
) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    spec = types_pb2.ShardSpec(
        name="w",
        kind=types_pb2.SHARD_KIND_PARAMETER,
        dtype=types_pb2.D_TYPE_FLOAT32,
        shape=[6],
        tier=types_pb2.TIER_NVME,
    )
    declare = session_pb2.DeclareRequest(
        session_id=session_id, shards=[spec, blob("staged", 2 * 24)]
    )
    shard, staged = caller.call(caller.sessions.Declare, declare).shards
    first, second = os.urandom(24), os.urandom(24)
    caller.put(session_id, blob("staged", 2 * 24), [first, second])
    request = tensor_pb2.PutMomentsRequest(
        session_id=session_id, shard_id=shard.shard_id, staged_shard_id=staged.shard_id
    )
    leases_ended = service.server.leases_ended
    caller.call(caller.tensors.PutMoments, iter([request]))
    assert service.server.calls["sync"] == 0
    assert service.server.leases_ended == leases_ended + 1
    look = tensor_pb2.GetMomentsRequest(session_id=session_id, shard_id=shard.shard_id)
    (answer,) = caller.call(caller.tensors.GetMoments, look)
    assert (answer.exp_avg, answer.exp_avg_sq) == (first, second)


def test_what_maxima_need_is_asked_for_parameters_by_their_ids(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    specs = [
        types_pb2.ShardSpec(
            name=name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=types_pb2.D_TYPE_FLOAT32,
            shape=[count],
            tier=types_pb2.TIER_NVME,
        )
        for name, count in (("a", 5), ("b", 7), ("c", 11))
    ]
    declare = session_pb2.DeclareRequest(session_id=session_id, shards=specs)
    shards = caller.call(caller.sessions.Declare, declare).shards
    request = session_pb2.GetMaximaBytesRequest(
        session_id=session_id, shard_ids=[shards[0].shard_id, shards[2].shard_id]
    )
    assert caller.call(caller.sessions.GetMaximaBytes, request).bytes == 4 * (5 + 11)


def test_delete_names_what_was_not_there(service: Service) -> None:
    caller = service.caller()
    session_id = caller.attach().session_id
    caller.put(session_id, blob("x", 1), [b"1"])
    request = session_pb2.DeleteRequest(session_id=session_id, names=["x", "y"])
    assert caller.call(caller.sessions.Delete, request).names_unknown == ["y"]


def test_a_stopping_server_takes_no_new_calls(service: Service) -> None:
    caller = service.caller()
    service.control.stop(grace_s=1)
    with pytest.raises(grpc.RpcError) as error:
        caller.attach()
    assert refusal_of(error).code is grpc.StatusCode.UNAVAILABLE


def open_streams(caller: Caller, count: int, *, job: str = "gpt") -> list[Any]:
    """Puts under way that send nothing more."""
    sessions = [caller.attach(job=job).session_id for _ in range(count)]
    return [open_stream(caller, session_id) for session_id in sessions]


def open_stream(caller: Caller, session_id: int) -> tuple[Any, SimpleQueue[Any]]:
    said: SimpleQueue[tensor_pb2.PutRequest | None] = SimpleQueue()
    said.put(tensor_pb2.PutRequest(session_id=session_id, spec=blob(f"{session_id}", 4)))
    metadata = (("memd-token", caller.peer.token),)
    requests = iter(said.get, None)
    return caller.tensors.Put.future(requests, timeout=TIMEOUT_S, metadata=metadata), said


def test_a_call_for_which_there_is_no_thread_is_refused_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """gRPC itself refuses it: the daemon has as many threads as its own limits let calls through,
    and a stream may hold the only one of this test."""
    monkeypatch.setattr(control, "WORKERS_MAX", 1)
    service: Service = request.getfixturevalue("service")
    caller = service.caller()
    session_id = caller.attach().session_id
    held: list[tuple[Any, SimpleQueue[Any]]] = []

    def ask() -> Any:
        return caller.call(caller.status.GetStatus, status_pb2.GetStatusRequest())

    def is_held() -> bool:
        # The call before it may still be counted when its answer is here.
        if not held or held[-1][0].done():
            held.append(open_stream(caller, session_id))
        return service.control.gate.places_taken(STREAMS) == 1

    wait_until(is_held)
    with pytest.raises(grpc.RpcError) as error:
        ask()
    refusal = refusal_of(error)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.detail.code == 0, "the daemon's own refusals have one"
    for _, said in held:
        said.put(tensor_pb2.PutRequest(data=b"data"))
        said.put(None)
    assert held[-1][0].result().shard.written

    def is_free() -> bool:
        try:
            return bool(ask().version)
        except grpc.RpcError:
            return False

    wait_until(is_free)


def test_streams_that_send_nothing_keep_nobody_from_anything_else(service: Service) -> None:
    streams = []
    for user in range(STREAMS.all_max // STREAMS.caller_max):
        idle = service.caller(uid=OTHER_UID + user)
        streams += open_streams(idle, STREAMS.caller_max, job=f"of-{user}")
    wait_until(lambda: service.control.gate.places_taken(STREAMS) == STREAMS.all_max)
    other = service.caller()
    assert other.call(other.status.GetStatus, status_pb2.GetStatusRequest()).version
    session_id = other.attach(job="other").session_id
    assert other.call(other.sessions.Sync, session_pb2.SyncRequest(session_id=session_id))
    health = health_pb2_grpc.HealthStub(service.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
    with pytest.raises(grpc.RpcError) as error:
        other.put(session_id, blob("x", 4), [b"more"])
    refusal = refusal_of(error)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.detail.code == StatusCode.CAPACITY
    assert "the daemon has 32 of at most 32 under way" in refusal.message
    assert "end one first, or put and get in shared memory" in refusal.message
    for _, said in streams:
        said.put(tensor_pb2.PutRequest(data=b"data"))
        said.put(None)
    for call, _ in streams:
        assert call.result().shard.written
    wait_until(lambda: service.control.gate.places_taken(STREAMS) == 0)
    other.put(session_id, blob("x", 4), [b"more"])
    assert other.get(session_id, "x") == b"more"


def test_one_process_has_not_all_streams(service: Service) -> None:
    greedy, other = service.caller(), service.caller()
    streams = open_streams(greedy, STREAMS.caller_max)
    wait_until(lambda: service.control.gate.places_taken(STREAMS) == STREAMS.caller_max)
    for attempt in (
        lambda: greedy.get(1, "x"),
        lambda: list(greedy.call(greedy.checks.Check, check_pb2.CheckRequest(), timeout=None)),
    ):
        with pytest.raises(grpc.RpcError) as error:
            attempt()
        refusal = refusal_of(error)
        assert "this process has 8 of at most 8" in refusal.message
        details = details_by_name(refusal)
        (violation,) = details["QuotaFailure"].violations
        assert violation.subject == "process"
        assert violation.description == "at most 8 streams at once"
        assert details["RetryInfo"].retry_delay.ToSeconds() == 1
        assert refusal.detail.retry_after_ms == 1000
    session_id = other.attach().session_id
    other.put(session_id, blob("x", 4), [b"more"])
    for call, said in streams:
        call.cancel()
        said.put(None)  # gRPC's thread for the call waits for it
    wait_until(lambda: service.control.gate.places_taken(STREAMS) == 0)
    list(greedy.call(greedy.checks.Check, check_pb2.CheckRequest(), timeout=None))


def open_syncs(caller: Caller, count: int, *, job: str) -> list[Any]:
    request = session_pb2.SyncRequest(session_id=caller.attach(job=job).session_id)
    metadata = (("memd-token", caller.peer.token),)
    method = caller.sessions.Sync
    return [method.future(request, timeout=TIMEOUT_S, metadata=metadata) for _ in range(count)]


def test_neither_a_job_nor_a_user_has_all_steps(service: Service) -> None:
    is_durable = threading.Event()
    service.server.before_sync = lambda: is_durable.wait(TIMEOUT_S)
    syncs: list[Any] = []
    refusals: list[str] = []

    def fill(*, job: str, count: int) -> None:
        """From as many processes as it takes."""
        caller = service.caller(uid=OTHER_UID)
        made = open_syncs(caller, count, job=job)
        syncs.extend(made)
        wait_until(lambda: service.control.gate.places_taken(STEPS) >= len(syncs))

    def refused(*, job: str) -> str:
        caller = service.caller(uid=OTHER_UID)
        (call,) = open_syncs(caller, 1, job=job)
        with pytest.raises(grpc.RpcError) as error:
            call.result()
        return refusal_of(error).message

    fill(job="greedy", count=STEPS.caller_max)
    fill(job="greedy", count=STEPS.job_max - STEPS.caller_max)
    refusals.append(refused(job="greedy"))
    fill(job="second", count=STEPS.caller_max)
    fill(job="third", count=STEPS.user_max - STEPS.job_max - STEPS.caller_max)
    refusals.append(refused(job="fourth"))
    syncs += open_syncs(service.caller(), 1, job="of-another-user")
    wait_until(lambda: service.control.gate.places_taken(STEPS) == len(syncs))
    is_durable.set()
    for sync in syncs:
        sync.result()
    assert f"this job has {STEPS.job_max} of at most {STEPS.job_max}" in refusals[0]
    assert f"this user has {STEPS.user_max} of at most {STEPS.user_max}" in refusals[1]


def test_steps_that_wait_for_the_disk_keep_nobody_from_status(service: Service) -> None:
    is_durable = threading.Event()
    service.server.before_sync = lambda: is_durable.wait(TIMEOUT_S)
    syncs = []
    for user in range(STEPS.all_max // STEPS.caller_max):
        trainer = service.caller(uid=OTHER_UID + user)
        syncs += open_syncs(trainer, STEPS.caller_max, job=f"of-{user}")
    wait_until(lambda: service.control.gate.places_taken(STEPS) == STEPS.all_max)
    other = service.caller()
    assert other.call(other.status.GetStatus, status_pb2.GetStatusRequest()).version
    session_id = other.attach().session_id
    refused: list[tuple[Any, Any]] = [
        (other.sessions.Sync, session_pb2.SyncRequest(session_id=session_id)),
        (other.sessions.Delete, session_pb2.DeleteRequest(session_id=session_id)),
        (other.jobs.DropJob, job_pb2.DropJobRequest(name="gpt")),
    ]
    for method, wanted in refused:
        with pytest.raises(grpc.RpcError) as error:
            other.call(method, wanted)
        assert "too many steps, syncs, snapshots and deletions at once" in refusal_of(error).message
    is_durable.set()
    for sync in syncs:
        sync.result()
    wait_until(lambda: service.control.gate.places_taken(STEPS) == 0)


def ranks_of(service: Service, *, uid: int, job: str) -> list[tuple[Caller, int]]:
    """As many as a job may have, each with its session."""
    callers = [service.caller(uid=uid) for _ in range(RANKS_MAX)]
    answers = [caller.attach(job=job) for caller in callers]
    sessions = [answer.session_id for answer in answers]
    service.server.rank_sessions[answers[0].job_id] = sessions
    return list(zip(callers, sessions, strict=True))


def test_ranks_that_wait_for_each_other_take_no_place_of_steps(service: Service) -> None:
    jobs = [ranks_of(service, uid=OTHER_UID, job=f"of-{job}") for job in range(4)]
    late = [job.pop() for job in jobs]

    def ended(caller: Caller, session_id: int) -> Any:
        request = session_pb2.EndGradientsRequest(
            session_id=session_id, rank_call=session_pb2.RankCall(number=1)
        )
        metadata = (("memd-token", caller.peer.token),)
        return caller.sessions.EndGradients.future(request, timeout=TIMEOUT_S, metadata=metadata)

    calls = [ended(*rank) for job in jobs for rank in job]
    wait_until(lambda: service.control.gate.places_taken(RANKS) == len(calls))
    assert len(calls) > STEPS.user_max
    assert not service.control.gate.places_taken(STEPS)
    (sync,) = open_syncs(service.caller(uid=OTHER_UID), 1, job="alone")
    sync.result()
    for call in [*calls, *[ended(*rank) for rank in late]]:
        assert not call.result().shard_ids


def test_a_rank_asks_who_the_others_are(service: Service) -> None:
    (caller, session_id), *others = ranks_of(service, uid=OTHER_UID, job="of-ranks")
    asked = session_pb2.ListRanksRequest(session_id=session_id)
    answer = caller.call(caller.sessions.ListRanks, asked)
    assert list(answer.names) == [f"rank {rank}" for rank in range(1 + len(others))]


def test_a_step_of_ranks_is_one_step(service: Service) -> None:
    ranks = ranks_of(service, uid=OTHER_UID, job="of-ranks")
    taken: list[int] = []
    service.server.before_step = lambda: taken.append(service.control.gate.places_taken(STEPS))
    calls = []
    for caller, session_id in ranks:
        request = session_pb2.StepRequest(
            session_id=session_id, step=1, rank_call=session_pb2.RankCall(number=1)
        )
        metadata = (("memd-token", caller.peer.token),)
        calls.append(caller.sessions.Step.future(request, timeout=TIMEOUT_S, metadata=metadata))
    assert {call.result().committed_step for call in calls} == {1}
    assert taken == [1]
    wait_until(lambda: not service.control.gate.places_taken(STEPS))


def test_reflection_that_is_left_open_holds_few_threads(service: Service) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    held = []
    for _ in range(STREAMS.caller_max):
        said: SimpleQueue[Any] = SimpleQueue()
        said.put(ask)
        answers = reflection.ServerReflectionInfo(iter(said.get, None), timeout=TIMEOUT_S)
        next(answers)
        held.append((answers, said))
    with pytest.raises(grpc.RpcError) as error:
        next(reflection.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S))
    assert refusal_of(error).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    caller = service.caller()
    session_id = caller.attach().session_id
    caller.put(session_id, blob("x", 4), [b"more"])
    for answers, said in held:
        said.put(None)
        list(answers)
