"""Attaching to a job: from an address to a session."""

from __future__ import annotations

import os
import re
from weakref import ref

import torch

import memd_native
from memd_client.base.address import EmbeddedAddress, parse_address
from memd_client.base.interrupts import defer_interrupts
from memd_client.base.sizes import parse_size
from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from memd_client.connection.embedded import embedded_daemon
from memd_client.connection.reattach import Reattach, ReattachingControl, reattach_seconds
from memd_client.core.job import Job
from memd_client.core.leases import Leases
from memd_client.errors import InvalidArgument, MemdError, NotYet
from memd_client.session import Session
from memd_proto.v1 import session_pb2


def connect(
    address: str | None = None,
    *,
    job: str,
    rank: int | None = None,
    world_size: int | None = None,
    host_bytes: int | str | None = None,
    nvme_bytes: int | str | None = None,
    durability: str | None = None,
    fresh: bool = False,
    shared_memory: bool = True,
) -> Session:
    """Attaches to a job, and creates it if it does not exist. Close the session, or use it as a
    context manager; the job's state stays until the job is dropped.

    Args:
        address: `unix:///path`, `embedded:` or `embedded:/path?host=1GiB&nvme=100GiB`. Default:
            MEMD_ADDRESS, or the service's socket.
        job: its name. Users do not share names.
        rank, world_size: default to torch.distributed's, or 0 and 1. More than one rank comes in a
            later version. Where the environment's WORLD_SIZE is above 1 there is a process group,
            or `world_size=1` says that this process works alone.
        host_bytes, nvme_bytes: the quotas of a new job: bytes, or a string such as "4GiB". Default:
            half of what is free, or all of it on an `embedded:` daemon.
        durability: when a step reaches the disk. "step", the default of a new job: before it is
            committed. "every:k", for example "every:10": state that fits into the daemon's memory
            is updated there, and every k-th step and `close()` put it on disk; a power cut loses up
            to k steps, a killed daemon none while its holder keeps the memory. "none": only
            `close()` puts it on disk; after a power cut before that, the job must start over.
            An existing job keeps its own if this is not given.
        fresh: drops what the job held.
        shared_memory: False: tensor bytes go over gRPC; only `put`, `get` and `delete` work, and
            `prefetch` does nothing.

    Raises:
        DaemonUnavailable: no daemon listens there, or it stops.
        CapacityError: a quota is larger than what is free.
        PermissionDenied: the job belongs to another user.
        InvalidArgument, NotYet: an argument is not possible, or not yet; or the daemon has another
            protocol version.
    """
    if not job:
        raise InvalidArgument("a job needs a name")
    rank, world_size = _ranks(rank, world_size)
    defer_interrupts()
    request = session_pb2.AttachRequest(
        protocol_version=memd_native.PROTOCOL_VERSION,
        job=job,
        rank=rank,
        world_size=world_size,
        host_bytes=0 if host_bytes is None else parse_size(host_bytes, name="host_bytes"),
        nvme_bytes=0 if nvme_bytes is None else parse_size(nvme_bytes, name="nvme_bytes"),
        durability=_durability(durability),
        fresh=fresh,
        without_shared_memory=not shared_memory,
    )
    where = parse_address(address)
    # A private daemon ends with its parent and does not come back.
    seconds = 0.0 if isinstance(where, EmbeddedAddress) else reattach_seconds()
    if isinstance(where, EmbeddedAddress):
        private = embedded_daemon(where)
        where = private.address
        last_words = private.last_words
    else:
        last_words = None
    connection = AttachConnection(where)
    try:
        control = Control(
            address=connection.control_address, token=connection.token, last_words=last_words
        )
    except MemdError:  # of the file that MEMD_TOKEN_FILE names
        connection.close()
        raise
    reattach = Reattach(
        where, connection=connection, control=control, request=request, seconds=seconds
    )
    try:
        attached = control.attach(request)
        plane = _data_plane(reattach, attached) if shared_memory else None
    except BaseException:
        control.close()
        connection.close()
        raise
    reattach.begin(attached.session_id, plane)
    return Session(
        Job(
            job,
            attached=attached,
            control=ReattachingControl(control, reattach),
            leases=Leases(plane, job=job, retrying=reattach) if plane is not None else None,
            daemon_process_id=connection.daemon_process_id,
            close_connection=reattach.close,
            retrying=reattach,
        )
    )


def _durability(text: str | None) -> str:
    if text is None:
        return ""
    if text in ("step", "none"):
        return text
    match = re.fullmatch(r"every:([1-9][0-9]{0,9})", text)
    if match is None or int(match[1]) > 2**31:
        raise InvalidArgument(
            f'durability is "step", "every:k" with k from 1 to 2147483648, or "none": {text!r}'
        )
    return text


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else _alone()
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"rank is from 0 to world_size - 1: rank {rank}, world_size {world_size}"
        )
    if world_size > 1:
        raise NotYet(f"more than one rank a job comes in a later version: world_size {world_size}")
    return rank, world_size


def _alone() -> int:
    """The world size of a process without a process group.

    Raises:
        InvalidArgument: its launcher has started others, each of which would train a job of one
            rank on its own share of the data.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdecimal() and int(started) > 1:
        raise InvalidArgument(
            f"WORLD_SIZE is {started}, and no process group says who averages gradients; call "
            "torch.distributed.init_process_group() before connect(), or pass world_size=1 if this "
            "process works alone"
        )
    return 1


def _data_plane(
    reattach: Reattach, attached: session_pb2.AttachResponse
) -> memd_native.ClientSession:
    connection = reattach.connection
    session_fd, table_fd, doorbell_fd = connection.session_descriptors(attached.session_id)
    # The native session outlives this one while tensors share its memory, and `reattach` holds it.
    # A strong reference back would be a cycle that the garbage collector cannot see.
    weak = ref(reattach)

    def more_segments(first: int) -> list[int]:
        held = weak()
        if held is None:
            raise MemdError("the session has ended")
        return held.segments(attached.session_id, first)

    return memd_native.ClientSession(
        session_fd=session_fd,
        table_fd=table_fd,
        doorbell_fd=doorbell_fd,
        connection_fd=connection.duplicate(),
        segment_bytes=attached.segment_bytes,
        arena_reserved_bytes=attached.arena_reserved_bytes,
        more_segments=more_segments,
    )
