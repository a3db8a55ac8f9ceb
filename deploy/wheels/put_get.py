"""Puts a tensor into a daemon through shared memory, or gets it back, where there is no torch.

Run: python deploy/wheels/put_get.py put|get ATTACH_SOCKET   (memd[server] and numpy installed)
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import types
from typing import Any

import grpc
import numpy as np

import memd_native
from memd_proto.v1 import attach_pb2, session_pb2, session_pb2_grpc, types_pb2

COUNT = 3 << 20  # a few extents, of which the last is not full
TIMEOUT_S = 300.0  # an emulated processor is slow
PACKET_BYTES_MAX = 64 * 1024


class _Capsule:
    """numpy.from_dlpack() asks for these two."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def let_numpy_take_leases() -> None:
    """memd_native makes a tensor of a lease with torch._C._from_dlpack, and asks torch for no
    more."""
    module: Any = types.ModuleType("torch._C")
    module._from_dlpack = lambda capsule: np.from_dlpack(_Capsule(capsule))
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch._C"] = module


class Session:
    def __init__(self, attach_socket: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(TIMEOUT_S)
        self._connection.connect(attach_socket)
        welcome = attach_pb2.Welcome.FromString(self._connection.recv(PACKET_BYTES_MAX))
        if welcome.refusal:
            sys.exit(welcome.refusal)
        self._channel = grpc.insecure_channel(welcome.control_address)
        self._calls: Any = session_pb2_grpc.SessionServiceStub(self._channel)
        self._options: Any = {"metadata": (("memd-token", welcome.token),), "timeout": TIMEOUT_S}
        attached = self._calls.Attach(
            session_pb2.AttachRequest(
                protocol_version=memd_native.PROTOCOL_VERSION,
                job="put-get",
                world_size=1,
                host_bytes=32 << 20,
                nvme_bytes=128 << 20,
            ),
            **self._options,
        )
        self._id = attached.session_id
        _, fds, _, _ = socket.recv_fds(self._connection, PACKET_BYTES_MAX, 64)
        self._plane = memd_native.ClientSession(
            session_fd=fds[0],
            table_fd=fds[1],
            doorbell_fd=fds[2],
            connection_fd=os.dup(self._connection.fileno()),
            segment_bytes=attached.segment_bytes,
            arena_reserved_bytes=attached.arena_reserved_bytes,
            more_segments=self._more_segments,
        )

    def _more_segments(self, first: int) -> list[int]:
        kind = attach_pb2.ClientPacket.KIND_SEGMENTS
        wanted = attach_pb2.ClientPacket(kind=kind, session_id=self._id, segment_first=first)
        self._connection.send(wanted.SerializeToString())
        return list(socket.recv_fds(self._connection, PACKET_BYTES_MAX, 64)[1])

    def lease(self, mode: int) -> Any:
        spec = types_pb2.ShardSpec(
            name="numbers",
            kind=types_pb2.SHARD_KIND_BLOB,
            dtype=types_pb2.D_TYPE_FLOAT32,
            shape=[COUNT],
            tier=types_pb2.TIER_NVME,
        )
        request = session_pb2.DeclareRequest(session_id=self._id, shards=[spec])
        (shard,) = self._calls.Declare(request, **self._options).shards
        part, dtype = memd_native.PART_VALUE, types_pb2.D_TYPE_FLOAT32
        return self._plane.lease(shard.shard_id, part, mode, dtype, [COUNT], TIMEOUT_S)

    def commit(self) -> None:
        self._calls.Sync(session_pb2.SyncRequest(session_id=self._id), **self._options)

    def close(self) -> None:
        self._plane.close()
        self._calls.Detach(session_pb2.DetachRequest(session_id=self._id), **self._options)
        self._channel.close()
        self._connection.close()


def main() -> None:
    verb, attach_socket = sys.argv[1:]
    numbers = np.arange(COUNT, dtype=np.float32)
    let_numpy_take_leases()
    session = Session(attach_socket)
    if verb == "put":
        lease = session.lease(memd_native.MODE_OVERWRITE)
        # numpy takes an array that comes this way for one that may not be written.
        ctypes.memmove(lease.ctypes.data, numbers.ctypes.data, numbers.nbytes)
        del lease
        session.commit()
    else:
        lease = session.lease(memd_native.MODE_READ)
        if not np.array_equal(lease, numbers):
            sys.exit("the tensor that came back is not the one that was put")
        del lease
    session.close()
    print(f"{verb}: {numbers.nbytes} bytes")


if __name__ == "__main__":
    main()
