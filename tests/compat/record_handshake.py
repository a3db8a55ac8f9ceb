"""Records what client and daemon of a release say to each other, as handshakes/RELEASE.json.

The release's own interpreter runs the client, so that its bytes are those that it sent. Run:
python -m tests.compat.record_handshake RELEASE, a name of releases.toml; a file that is there is
never written again.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def record(address: str) -> dict[str, Any]:
    """In the release's interpreter: every packet and every unary call of one small session."""
    import grpc

    packets: list[str] = []
    calls: list[dict[str, str]] = []
    receive = socket.recv_fds

    def recorded_receive(*arguments: Any) -> Any:
        answer = receive(*arguments)
        packets.append(base64.b64encode(answer[0]).decode())
        return answer

    def recorded_channel(*arguments: Any, **options: Any) -> Any:
        channel: Any = make_channel(*arguments, **options)
        unary_unary = channel.unary_unary

        def recorded_method(path: str, serializer: Any, deserializer: Any, **more: Any) -> Any:
            call = {"path": path}

            def serialize(message: Any) -> bytes:
                data: bytes = serializer(message)
                call["request"] = base64.b64encode(data).decode()
                return data

            def deserialize(data: bytes) -> Any:
                calls.append({**call, "response": base64.b64encode(data).decode()})
                return deserializer(data)

            return unary_unary(path, serialize, deserialize, **more)

        channel.unary_unary = lambda path, request_serializer, response_deserializer, **more: (
            recorded_method(path, request_serializer, response_deserializer, **more)
        )
        return channel

    make_channel = grpc.insecure_channel
    grpc.insecure_channel = recorded_channel
    socket.recv_fds = recorded_receive  # type: ignore[assignment]
    import torch

    import memd_client

    session = memd_client.connect(
        address, job="recorded", durability="step", host_bytes="16MiB", nvme_bytes="32MiB"
    )
    session.put("blob", torch.arange(1000.0))
    session.commit(wait=True)
    session.close()
    return {"packets": packets, "calls": calls}


def main() -> None:
    from tests.compat.built_release import python_of
    from tests.compat.releases import releases
    from tests.compat.upgrades import start
    from tests.daemons import daemons

    (release,) = [release for release in releases() if release.name == sys.argv[1]]
    file = HERE / "handshakes" / f"{release.name}.json"
    if file.exists():
        sys.exit(f"{file} exists: what was recorded is never written again")
    python = python_of(release)
    with daemons() as made:
        daemon = start(made, python)
        answer = subprocess.run(
            [str(python), __file__, "--address", daemon.address], stdout=subprocess.PIPE, check=True
        )
    said = json.loads(answer.stdout)
    file.write_text(json.dumps({"protocol": release.protocol, **said}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--address":
        print(json.dumps(record(sys.argv[2])))
    else:
        main()
