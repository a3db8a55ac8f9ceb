"""The control plane of a real daemon: tensors over gRPC, quotas, and other users."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # googleapis has no types
from grpc_status import rpc_status  # type: ignore[import-untyped]  # has no types

import memd_client
import memd_native
from memd_proto.v1 import job_pb2, session_pb2, status_pb2, tensor_pb2, types_pb2
from tests.daemons import HOST_BYTES, Attached, chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Attached]:
    with Attached(daemon.attach_socket) as client:
        yield client


@pytest.fixture(scope="module")
def session_id(client: Attached) -> int:
    return client.attach("tensors", host_bytes=32 << 20, nvme_bytes=256 << 20).session_id


def spec_of(name: str, size_bytes: int) -> types_pb2.ShardSpec:
    return types_pb2.ShardSpec(
        name=name,
        kind=types_pb2.SHARD_KIND_BLOB,
        dtype=types_pb2.D_TYPE_UINT8,
        shape=[size_bytes],
        tier=types_pb2.TIER_NVME,
    )


def put(client: Attached, session_id: int, name: str, data: bytes) -> types_pb2.Shard:
    def requests() -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(session_id=session_id, spec=spec_of(name, len(data)))
        for chunk in chunks_of(data):
            yield tensor_pb2.PutRequest(data=chunk)

    shard: types_pb2.Shard = client.call(client.tensors.Put, requests()).shard
    return shard


def get(client: Attached, session_id: int, name: str) -> bytes:
    request = tensor_pb2.GetRequest(session_id=session_id, name=name)
    return b"".join(part.data for part in client.call(client.tensors.Get, request))


def details_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    call: Any = error.value
    return call.code(), call.details()


def quota_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[str, str]:
    """The holder and the text of the quota that the call would exceed."""
    failure = error_details_pb2.QuotaFailure()
    status = rpc_status.from_call(error.value)
    assert [detail.Unpack(failure) for detail in status.details].count(True) == 1
    (violation,) = failure.violations
    return violation.subject, violation.description


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 1 << 20, (8 << 20) + 5])
def test_what_was_put_over_grpc_is_got_with_the_same_hash(
    client: Attached, session_id: int, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)
    assert put(client, session_id, f"blob-{size_bytes}", data).written
    assert hashlib.sha256(get(client, session_id, f"blob-{size_bytes}")).digest() == (
        hashlib.sha256(data).digest()
    )


def test_eight_clients_put_and_get_at_once(daemon: Daemon) -> None:
    def serve_one(index: int) -> bool:
        with Attached(daemon.attach_socket) as client:
            session_id = client.attach("tensors").session_id
            data = os.urandom((1 << 20) + index)
            put(client, session_id, f"client-{index}", data)
            same = get(client, session_id, f"client-{index}") == data
            client.call(client.sessions.Detach, session_pb2.DetachRequest(session_id=session_id))
            return same

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(serve_one, range(8))) == [True] * 8


def test_a_put_that_breaks_off_leaves_the_old_bytes(client: Attached, session_id: int) -> None:
    put(client, session_id, "kept", b"good" * 1000)

    def broken() -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(
            session_id=session_id, spec=spec_of("kept", 4000), data=b"bad" * 10
        )
        raise ConnectionAbortedError

    with pytest.raises(grpc.RpcError):
        client.call(client.tensors.Put, broken())
    assert get(client, session_id, "kept") == b"good" * 1000


def test_moments_are_zeros_until_they_are_put(client: Attached, session_id: int) -> None:
    element_count = 300_000  # more than a tile
    spec = spec_of("weight", element_count)
    spec.kind = types_pb2.SHARD_KIND_PARAMETER
    spec.dtype = types_pb2.D_TYPE_FLOAT32
    value = os.urandom(4 * element_count)

    def value_parts() -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(session_id=session_id, spec=spec)
        for chunk in chunks_of(value):
            yield tensor_pb2.PutRequest(data=chunk)

    shard = client.call(client.tensors.Put, value_parts()).shard

    def moments() -> tuple[bytes, bytes, set[int]]:
        request = tensor_pb2.GetMomentsRequest(session_id=session_id, shard_id=shard.shard_id)
        parts = list(client.call(client.tensors.GetMoments, request))
        return (
            b"".join(part.exp_avg for part in parts),
            b"".join(part.exp_avg_sq for part in parts),
            {part.generation for part in parts},
        )

    assert moments() == (bytes(4 * element_count), bytes(4 * element_count), {0})
    first, second = (array("f", [fill]).tobytes() * element_count for fill in (0.25, 0.5))

    def moment_parts() -> Iterator[tensor_pb2.PutMomentsRequest]:
        for offset in range(0, 4 * element_count, 1 << 19):
            yield tensor_pb2.PutMomentsRequest(
                session_id=session_id,
                shard_id=shard.shard_id,
                generation=7,
                element_first=offset // 4,
                exp_avg=first[offset : offset + (1 << 19)],
                exp_avg_sq=second[offset : offset + (1 << 19)],
            )

    client.call(client.tensors.PutMoments, moment_parts())
    assert moments() == (first, second, {7})
    assert get(client, session_id, "weight") == value


def parameter(
    client: Attached, session_id: int, name: str, element_count: int, value: bytes = b""
) -> int:
    """Puts zeros in fp32, or `value` in bf16, and returns the shard id."""
    spec = spec_of(name, element_count)
    spec.kind = types_pb2.SHARD_KIND_PARAMETER
    spec.dtype = types_pb2.D_TYPE_BFLOAT16 if value else types_pb2.D_TYPE_FLOAT32

    def requests() -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(session_id=session_id, spec=spec)
        for chunk in chunks_of(value or bytes(4 * element_count)):
            yield tensor_pb2.PutRequest(data=chunk)

    shard_id: int = client.call(client.tensors.Put, requests()).shard.shard_id
    return shard_id


@pytest.mark.parametrize("has_maximum", [False, True])
def test_moments_are_taken_from_blobs_of_the_job(
    client: Attached, session_id: int, *, has_maximum: bool
) -> None:
    tile, element_count = 1 << 18, 300_000
    shard_id = parameter(client, session_id, f"staged-{has_maximum}", element_count)
    moments = [os.urandom(4 * element_count) for _ in range(3 if has_maximum else 2)]
    requests = []
    for first in (0, tile):
        part = slice(4 * first, min(4 * (first + tile), 4 * element_count))
        data = b"".join(moment[part] for moment in moments)
        blob = put(client, session_id, f"moments-{has_maximum}-{first}", data)
        requests.append(
            tensor_pb2.PutMomentsRequest(
                session_id=session_id,
                shard_id=shard_id,
                generation=9,
                element_first=first,
                staged_shard_id=blob.shard_id,
                staged_has_maximum=has_maximum,
            )
        )
    client.call(client.tensors.PutMoments, iter(requests))
    request = tensor_pb2.GetMomentsRequest(session_id=session_id, shard_id=shard_id)
    answers = list(client.call(client.tensors.GetMoments, request))
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: len(moments)]
    for name, moment in zip(names, moments, strict=True):
        assert b"".join(getattr(answer, name) for answer in answers) == moment, name
    assert {answer.generation for answer in answers} == {9}


@pytest.mark.parametrize("is_staged", [False, True])
def test_masters_are_taken_only_of_the_values_that_the_parameter_has(
    client: Attached, session_id: int, *, is_staged: bool
) -> None:
    count = 5
    name = f"half-{is_staged}"
    shard_id = parameter(client, session_id, name, count, value=bytes.fromhex("803f") * count)

    def put_moments(masters: list[float], generation: int) -> None:
        values = {"exp_avg": [0.25] * count, "exp_avg_sq": [0.5] * count, "master": masters}
        moments = {key: array("f", each).tobytes() for key, each in values.items()}
        request = tensor_pb2.PutMomentsRequest(
            session_id=session_id, shard_id=shard_id, generation=generation
        )
        if is_staged:
            blob = put(client, session_id, f"{name}-{generation}", b"".join(moments.values()))
            request.staged_shard_id = blob.shard_id
            request.staged_has_master = True
        else:
            for key, data in moments.items():
                setattr(request, key, data)
        client.call(client.tensors.PutMoments, iter([request]))

    near = [1.0, 1.001, 0.999, 1.0, 1.0]  # of bf16, 1 is the next to all
    put_moments(near, 7)
    with pytest.raises(grpc.RpcError) as error:
        put_moments([*near[:3], 1.01, 1.0], 8)
    code, message = details_of(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "other bfloat16 values than training publishes of these fp32 values" in message
    assert message.endswith("element 3")
    request = tensor_pb2.GetMomentsRequest(session_id=session_id, shard_id=shard_id)
    (answer,) = client.call(client.tensors.GetMoments, request)
    assert answer.generation == 7
    assert array("f", answer.exp_avg).tolist() == [0.25] * count


def test_what_is_no_blob_of_moments_is_refused(client: Attached, session_id: int) -> None:
    shard_id = parameter(client, session_id, "unstaged", 16)
    odd = put(client, session_id, "odd", bytes(12)).shard_id
    large = put(client, session_id, "large", bytes(4 << 20)).shard_id
    for staged, code, why in (
        (shard_id, grpc.StatusCode.INVALID_ARGUMENT, "is no blob"),
        (odd, grpc.StatusCode.INVALID_ARGUMENT, "has 12 bytes, which are no moments"),
        (large, grpc.StatusCode.INVALID_ARGUMENT, "of at most"),
        (shard_id + 1000, grpc.StatusCode.NOT_FOUND, "has no such shard"),
    ):
        request = tensor_pb2.PutMomentsRequest(
            session_id=session_id, shard_id=shard_id, generation=1, staged_shard_id=staged
        )
        with pytest.raises(grpc.RpcError) as error:
            client.call(client.tensors.PutMoments, iter([request]))
        found, message = details_of(error)
        assert found is code, message
        assert why in message


def test_another_shape_under_the_same_name_is_refused(client: Attached, session_id: int) -> None:
    put(client, session_id, "shaped", b"12345678")
    with pytest.raises(grpc.RpcError) as error:
        put(client, session_id, "shaped", b"1234")
    code, message = details_of(error)
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "shaped" in message
    assert get(client, session_id, "shaped") == b"12345678"


def test_a_tensor_larger_than_the_pool_is_refused(client: Attached, session_id: int) -> None:
    request = session_pb2.DeclareRequest(
        session_id=session_id, shards=[spec_of("huge", 2 * HOST_BYTES)]
    )
    with pytest.raises(grpc.RpcError) as error:
        client.call(client.sessions.Declare, request)
    code, message = details_of(error)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "huge" in message
    holder, quota = quota_of(error)
    assert holder == "job"
    found = re.fullmatch(r"at most (\d+) bytes of host_bytes", quota)
    assert found
    assert message.endswith(f"the arena has at most {found[1]}")


@pytest.mark.parametrize("fields", [{"host_bytes": 1 << 50}, {"nvme_bytes": 1 << 50}])
def test_a_quota_beyond_what_is_free_is_refused_with_both_figures(
    client: Attached, fields: dict[str, int]
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        client.attach("greedy", **fields)
    code, message = details_of(error)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(1 << 50) in message
    holder, quota = quota_of(error)
    (name,) = fields
    free_bytes = message.rpartition("free ")[2]
    assert holder == "daemon"
    assert quota == f"at most {free_bytes} bytes of {name.partition('_')[0]}, which are free"
    jobs = client.call(client.jobs.ListJobs, job_pb2.ListJobsRequest()).jobs
    assert "greedy" not in {job.name for job in jobs}


@pytest.mark.parametrize("quota", ["host_bytes", "nvme_bytes"])
def test_shards_beyond_a_quota_of_their_job_are_refused_with_that_quota(
    client: Attached, quota: str
) -> None:
    quotas = {"host_bytes": 16 << 20, "nvme_bytes": 28 << 20}
    session_id = client.attach("quotas", **quotas).session_id
    specs = [spec_of(f"blob{number}", 4 << 20) for number in range(8)]
    if quota == "host_bytes":
        # The arena would hold its value, and not its moments beside it.
        specs = [spec_of("parameter", 1 << 20)]
        specs[0].kind = types_pb2.SHARD_KIND_PARAMETER
        specs[0].dtype = types_pb2.D_TYPE_FLOAT32
        specs[0].tier = types_pb2.TIER_HOST
    request = session_pb2.DeclareRequest(session_id=session_id, shards=specs)
    with pytest.raises(grpc.RpcError) as error:
        client.call(client.sessions.Declare, request)
    assert quota_of(error) == ("job", f"at most {quotas[quota]} bytes of {quota}")
    client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="quotas", force=True))


@pytest.mark.parametrize("last", ["bad", "too much", "good"])
def test_5000_shards_are_declared_or_none_of_them(
    daemon: Daemon, client: Attached, last: str
) -> None:
    with memd_client.connect(
        daemon.address, job="declares", host_bytes=16 << 20, nvme_bytes=28 << 20
    ) as session:
        specs = [spec_of(f"shard{number}", 4) for number in range(5000)]
        specs[-1] = {
            # Declared twice.
            "bad": specs[0],
            # The state of each fits, and that of all does not.
            "too much": spec_of("large", 12 << 20),
            "good": specs[-1],
        }[last]
        error = {"bad": memd_client.InvalidArgument, "too much": memd_client.CapacityError}.get(
            last
        )
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            declared = session._job.declare(specs)
            assert [shard.spec.name for shard in declared] == [spec.name for spec in specs]
        assert len(list(session._job.shards.list_all())) == (0 if error else 5000)
    # The module's daemon has memory for four such jobs.
    client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="declares"))


def test_another_protocol_version_is_refused(client: Attached) -> None:
    with pytest.raises(grpc.RpcError) as error:
        client.attach("versioned", protocol_version=memd_native.PROTOCOL_VERSION + 1)
    code, message = details_of(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"version {memd_native.PROTOCOL_VERSION + 1}" in message
    assert f"version {memd_native.PROTOCOL_VERSION}" in message


def test_a_job_that_is_attached_is_dropped_only_by_force(daemon: Daemon, client: Attached) -> None:
    with Attached(daemon.attach_socket) as other:
        other.attach("held", host_bytes=16 << 20, nvme_bytes=64 << 20)
        with pytest.raises(grpc.RpcError):
            client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="held"))
        client.call(client.jobs.DropJob, job_pb2.DropJobRequest(name="held", force=True))
    jobs = client.call(client.jobs.ListJobs, job_pb2.ListJobsRequest()).jobs
    assert "held" not in {job.name for job in jobs}


def test_status_agrees_with_what_was_configured(client: Attached) -> None:
    status = client.call(client.status.GetStatus, status_pb2.GetStatusRequest())
    assert status.pool.bytes == HOST_BYTES
    assert status.io_engine in ("io_uring", "threads")
    assert sum(device.bytes for device in status.devices) == 512 << 20


# Another user may enter neither the checkout, which may lie below a closed home directory, nor the
# temporary folder. So this loads all it needs and goes to the sockets' folder before it becomes
# that user. Without finders a later import fails wherever the checkout stands.
STRANGER = """
import os, sys
from pathlib import Path
import grpc
from tests.daemons import Attached
grpc.insecure_channel("unix:memd.sock").close()  # the first channel loads the rest of gRPC
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.meta_path.clear()
try:
    Attached(Path("attach.sock"), control_address="unix:memd.sock").attach("tensors", fresh=True)
except grpc.RpcError as error:
    print(error.code().name, error.details())
except PermissionError as error:
    print("PermissionError")
"""


@contextlib.contextmanager
def with_mode(mode: int, *paths: Path) -> Iterator[None]:
    before = [path.stat().st_mode for path in paths]
    try:
        for path in paths:
            path.chmod(mode)
        yield
    finally:
        for path, mode_before in zip(paths, before, strict=True):
            path.chmod(mode_before)


def test_another_users_job_is_refused_and_outsiders_cannot_connect(
    daemon: Daemon, client: Attached, session_id: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    put(client, session_id, "mine", b"mine")
    command = [sys.executable, "-c", STRANGER, str(daemon.socket.parent)]

    def said() -> str:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert said() == "PermissionError\n", "the folder's mode keeps strangers out"
    with with_mode(0o755, daemon.socket.parent):
        assert said() == "PermissionError\n", "the sockets' modes do too"
        with with_mode(0o666, daemon.attach_socket, daemon.socket):  # as if in the sockets' group
            refusal = said()
    assert refusal.startswith(
        "PERMISSION_DENIED job 'tensors' belongs to user root and you are user nobody;"
    )
    assert get(client, session_id, "mine") == b"mine"
