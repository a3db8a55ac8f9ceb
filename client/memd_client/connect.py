"""Attaching to a job: from an address to a session."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import memd_native
from memd_client.base.address import EmbeddedAddress, UnixAddress, parse_address
from memd_client.base.interrupts import defer_interrupts
from memd_client.base.sizes import parse_size
from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from memd_client.connection.embedded import embedded_daemon
from memd_client.connection.reattach import Reattach, ReattachingControl, reattach_seconds
from memd_client.core.job import Job
from memd_client.core.leases import Leases
from memd_client.core.rank_group import RankGroup
from memd_client.errors import InUse, InvalidArgument, MemdError, NotYet
from memd_client.session import Session
from memd_native.protocol import SPOKEN
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from memd_client.core.ranks import Ranks


def connect(
    address: str | None = None,
    *,
    job: str,
    rank: int | None = None,
    world_size: int | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
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
        rank, world_size: default to torch.distributed's, or 0 and 1. Where the environment's
            WORLD_SIZE is above 1 there is a process group, or `world_size=1` says that this process
            works alone.
        process_group: the ranks that train the job and average its gradients: the default process
            group, or another one, or a DeviceMesh of one dimension, such as `mesh["dp"]`. All of
            them call this together, with the same arguments and one daemon: they are on one node.
            They wait for each other, here and in every call that they make together, as long as in
            that group: the `timeout` of `init_process_group`, half an hour by default. Ranks of
            another group, as those with other parts of tensor-parallel layers, train a job of
            another name.
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
    group = RankGroup.find(process_group, rank, world_size)
    ranks = group.meet()
    request = session_pb2.AttachRequest(
        protocol_range=types_pb2.ProtocolRange(oldest=SPOKEN.oldest, newest=SPOKEN.newest),
        job=job,
        rank=ranks.rank,
        world_size=ranks.world_size,
        # The first rank attaches before the others: what they find is what it has begun.
        fresh=fresh and ranks.is_first,
        without_shared_memory=not shared_memory,
    )
    found: list[UnixAddress | EmbeddedAddress] = []

    def look() -> None:
        if not job:
            raise InvalidArgument("a job needs a name")
        found.append(parse_address(address))
        if ranks.are_several:
            _refuse_for_ranks(found[0], shared_memory=shared_memory)
        if host_bytes is not None:
            request.host_bytes = parse_size(host_bytes, name="host_bytes")
        if nvme_bytes is not None:
            request.nvme_bytes = parse_size(nvme_bytes, name="nvme_bytes")
        request.durability = _durability(durability)

    arguments = {
        "job": job,
        "host_bytes": host_bytes,
        "nvme_bytes": nvme_bytes,
        "durability": durability,
        "fresh": fresh,
    }
    try:
        ranks.refuse_different(arguments, "connect", look=look)
        return _connected(found[0], request, ranks, is_part=group.is_part)
    except BaseException:
        ranks.end()
        raise


def _connected(
    where: UnixAddress | EmbeddedAddress,
    request: session_pb2.AttachRequest,
    ranks: Ranks,
    *,
    is_part: bool,
) -> Session:
    """All ranks call it, with what they attach by."""
    defer_interrupts()
    made: list[Session] = []

    def attach() -> session_pb2.AttachResponse:
        try:
            attached, session = _attach(where, request, ranks)
        except InUse as error:
            if not is_part:
                raise
            raise InUse(f"{error}; each process group trains a job of another name") from error
        made.append(session)
        return attached

    try:
        attached = ranks.in_order(attach, "connect")
        _refuse_apart(
            ranks.exchange(
                {"daemon": attached.daemon_id, "committed step": attached.committed_step}, "connect"
            )
        )
    except MemdError:
        for session in made:
            session.close()
        raise
    return made[0]


def _attach(
    where: UnixAddress | EmbeddedAddress, request: session_pb2.AttachRequest, ranks: Ranks
) -> tuple[session_pb2.AttachResponse, Session]:
    # A private daemon ends with its parent and does not come back.
    seconds = 0.0 if isinstance(where, EmbeddedAddress) else reattach_seconds()
    last_words = None
    if isinstance(where, EmbeddedAddress):
        private = embedded_daemon(where)
        where = private.address
        last_words = private.last_words
    connection = AttachConnection(where)
    request.protocol_version = connection.protocol_version
    try:
        control = Control(
            address=connection.control_address,
            token=connection.token,
            last_words=last_words,
            ranks_limit_s=ranks.limit_s,
        )
    except MemdError:  # of the file that MEMD_TOKEN_FILE names
        connection.close()
        raise
    reattach = Reattach(
        where, connection=connection, control=control, request=request, seconds=seconds
    )
    try:
        attached = control.attach(request)
        plane = None if request.without_shared_memory else _data_plane(reattach, attached)
    except BaseException:
        control.close()
        connection.close()
        raise
    reattach.begin(attached.session_id, plane)
    own = session_pb2.ListRanksRequest(session_id=attached.session_id)
    ranks.ask_for_ended(partial(control.list_ranks, own))
    leases = None
    if plane is not None:
        leases = Leases(plane, job=request.job, retrying=reattach, ranks=ranks)
    return attached, Session(
        Job(
            request.job,
            attached=attached,
            control=ReattachingControl(control, reattach),
            leases=leases,
            daemon_process_id=connection.daemon_process_id,
            close_connection=reattach.close,
            retrying=reattach,
            ranks=ranks,
        )
    )


def _refuse_apart(found: Sequence[Mapping[str, Any]]) -> None:
    for rank, each in enumerate(found):
        if each["daemon"] != found[0]["daemon"]:
            raise NotYet(
                f"rank {rank} is attached to another daemon than rank 0; in this version all ranks "
                "of a job are on one node, and use one daemon: give all the same address"
            )
        if each != found[0]:
            raise MemdError(
                f"rank {rank} has found the job at step {each['committed step']}, and rank 0 at "
                f"{found[0]['committed step']}, as a step of its last start was being made; start "
                "all ranks again"
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


def _refuse_for_ranks(where: UnixAddress | EmbeddedAddress, *, shared_memory: bool) -> None:
    if isinstance(where, EmbeddedAddress):
        raise InvalidArgument(
            "an embedded: daemon is private to its process, and the ranks of a job share one; "
            "start `memd serve`, and give all of them its address"
        )
    if not shared_memory:
        raise NotYet("several ranks without shared memory come in a later version")


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
