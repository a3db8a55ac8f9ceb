"""Today's daemon answers the clients of earlier releases, and today's client understands their
daemons, or each refuses the other in one sentence if they speak different versions of the protocol.
The bytes are those that tests/compat/record_handshake.py recorded."""

from __future__ import annotations

import base64
import json
import os
import socket
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory, unknown_fields

from memd_client.base.address import UnixAddress, parse_address
from memd_client.connection.attach import AttachConnection
from memd_client.errors import MemdError
from memd_native import PROTOCOL_VERSION
from memd_proto.v1 import attach_pb2, session_pb2
from tests.compat import releases as compat
from tests.daemons import TIMEOUT_S, Daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

RELEASES = compat.releases()
HANDSHAKES = Path(compat.__file__).parent / "handshakes"


def recorded_of(release: compat.Release) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((HANDSHAKES / f"{release.name}.json").read_text())
    assert said["protocol"] == release.protocol
    return said


def each(*, is_spoken: bool) -> pytest.MarkDecorator:
    """Every release that speaks today's protocol, or every other one."""
    chosen = [release for release in RELEASES if is_of_today(release) == is_spoken]
    said = [recorded_of(release) for release in chosen]
    return pytest.mark.parametrize("recorded", said, ids=[release.name for release in chosen])


def is_of_today(release: compat.Release) -> bool:
    return release.protocol == PROTOCOL_VERSION


def packets_of(recorded: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(packet) for packet in recorded["packets"]]


def request_of(call: dict[str, str], session_id: int) -> bytes:
    """As recorded, byte for byte, but for the session, which has another id here."""
    request = _message(call, "input_type", base64.b64decode(call["request"]))
    if "session_id" in names_of(request):
        request.session_id = session_id  # type: ignore[attr-defined]
    return request.SerializeToString(deterministic=True)


def response_of(call: dict[str, str], data: bytes) -> Message:
    return _message(call, "output_type", data)


def _message(call: dict[str, str], kind: str, data: bytes) -> Message:
    service, _, method = call["path"].removeprefix("/").partition("/")
    found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    message: Message = message_factory.GetMessageClass(getattr(found, kind))()
    message.ParseFromString(data)
    return message


def names_of(message: Message) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


def test_every_release_has_a_handshake_and_an_image() -> None:
    assert any(is_of_today(release) for release in RELEASES)
    for release in RELEASES:
        assert (HANDSHAKES / f"{release.name}.json").exists()
        assert (compat.ROOT / "tests/golden" / f"format-{release.format}.xz.b64").exists()


@each(is_spoken=False)
def test_a_client_of_another_protocol_is_refused_with_both_versions_named(
    recorded: dict[str, Any], daemons: Daemons
) -> None:
    daemon = daemons.start()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        grpc.insecure_channel(daemon.address) as channel,
    ):
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(daemon.attach_socket))
        # It refuses by this number; a client that goes on is refused when it attaches.
        welcome = attach_pb2.Welcome.FromString(connection.recv(4096))
        assert welcome.protocol_version == PROTOCOL_VERSION
        metadata = (("memd-token", welcome.token),)
        (call,) = (call for call in recorded["calls"] if call["path"].endswith("/Attach"))
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call["path"])
        with pytest.raises(grpc.RpcError) as error:
            method(request_of(call, 0), timeout=TIMEOUT_S, metadata=metadata)
    refused: Any = error.value
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"version {recorded['protocol']} and this daemon" in refused.details()
    assert f"version {PROTOCOL_VERSION}; install the same memd" in refused.details()
    assert daemon.stop() == 0


@each(is_spoken=False)
def test_a_daemon_of_another_protocol_is_refused_with_both_versions_named(
    recorded: dict[str, Any],
) -> None:
    versions = f"{PROTOCOL_VERSION} here, {recorded['protocol']} there"
    with (
        replayed([(packets_of(recorded)[0], 0)]) as address,
        pytest.raises(MemdError, match=versions),
    ):
        AttachConnection(address)


@each(is_spoken=True)
def test_an_earlier_client_is_served(
    recorded: dict[str, Any], daemons: Daemons, request: pytest.FixtureRequest
) -> None:
    # Each makes the job that was made when it was recorded.
    daemon = daemons.start(name=request.node.callspec.id)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        grpc.insecure_channel(daemon.address) as channel,
    ):
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(daemon.attach_socket))
        welcome = attach_pb2.Welcome.FromString(connection.recv(4096))
        assert welcome.protocol_version == PROTOCOL_VERSION
        metadata = (("memd-token", welcome.token),)
        session_id = 0
        for call in recorded["calls"]:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call["path"])
            answer = method(request_of(call, session_id), timeout=TIMEOUT_S, metadata=metadata)
            before = response_of(call, base64.b64decode(call["response"]))
            now = response_of(call, answer)
            # The bytes of the blob went through shared memory: here nobody writes them.
            assert names_of(before) - {"written_bytes"} <= names_of(now), call["path"]
            if isinstance(now, session_pb2.AttachResponse):
                session_id = now.session_id
                _, fds, _, _ = socket.recv_fds(connection, 4096, 64)
                for fd in fds:
                    os.close(fd)
                assert len(fds) == 3
        assert session_id != 0
    assert daemon.stop() == 0


@each(is_spoken=True)
def test_an_earlier_daemon_is_understood(recorded: dict[str, Any]) -> None:
    welcome, session = packets_of(recorded)[:2]
    session_id = attach_pb2.Descriptors.FromString(session).session_id
    with replayed([(welcome, 0), (session, 3)]) as address:
        connection = AttachConnection(address)
        assert connection.token == attach_pb2.Welcome.FromString(welcome).token
        fds = connection.session_descriptors(session_id)
        connection.close()
    for fd in fds:
        os.close(fd)
    for call in recorded["calls"]:
        response = response_of(call, base64.b64decode(call["response"]))
        assert len(unknown_fields.UnknownFieldSet(response)) == 0, call["path"]


@contextmanager
def replayed(packets: list[tuple[bytes, int]]) -> Iterator[UnixAddress]:
    """A daemon's attach socket that sends these packets, each with so many descriptors."""
    with tempfile.TemporaryDirectory(prefix="memd-") as folder:
        address = parse_address(f"unix://{folder}/memd.sock")
        assert isinstance(address, UnixAddress)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(address.attach_socket))
        listener.listen(1)

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                for packet, count in packets:
                    socket.send_fds(connection, [packet], [listener.fileno()] * count)
                connection.recv(1)  # until the client has closed

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield address
        finally:
            thread.join(TIMEOUT_S)
            listener.close()
