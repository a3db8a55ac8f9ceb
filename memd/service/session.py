"""SessionService: what a training rank asks beside leases, which travel through shared memory."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from memd import __version__
from memd.attach import send_session
from memd.peers import Session, by_whom
from memd.refusal import Quota, Refused, StatusCode
from memd.service import access, wire
from memd.service.declarations import Declarations
from memd.service.places import STEPS
from memd.service.ranks import RankCall, RankCalls, merged_step, refuse_other_counts
from memd_native import RANKS_MAX, StatusError
from memd_native.protocol import SPOKEN, versions_said
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from memd.owner import Owner
    from memd.peers import Peers
    from memd.service.call import Call
    from memd_native import JobInfo, Server, SessionGrant, StepReport


log = logging.getLogger(__name__)

# For ranks of an earlier start, or a session that loads, whose processes are ending.
_JOIN_S = 10.0
_JOIN_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Full:
    """As many jobs as there may be, of a user or of all."""

    is_user: bool
    count: int
    at_most: int


class SessionService:
    def __init__(self, server: Server, *, peers: Peers, jobs_max: Callable[[], int]) -> None:
        self._server = server
        self._peers = peers
        self._jobs_max = jobs_max
        self._declarations = Declarations()
        self._rank_calls = RankCalls(server)
        self._daemon_id = secrets.token_hex(16)
        # Between the look at who owns a name and the opening of the job nobody else may take it.
        self._opening = Lock()

    def Attach(self, request: session_pb2.AttachRequest, call: Call) -> session_pb2.AttachResponse:
        agreed = _agreed_version(request)
        _check_attach(request)
        if request.kept_session_id:
            return self._resume(request, call)
        peer = call.peer
        # Before a job is made for nobody, and then of the job that there is.
        self._peers.check_session(peer, job_id=0)
        job = self._open_job(request, call)
        self._peers.check_session(peer, job.job_id)
        grant = self._attach(job, request, call)
        if request.world_size > 1:
            self._join_ranks(grant, request, call)
        self._hand_over(grant, job, request, call)
        log.info(
            "session attached",
            extra={
                "session": grant.session_id,
                "job": job.name,
                "step": grant.committed_step,
                **by_whom(peer),
            },
        )
        return session_pb2.AttachResponse(
            session_id=grant.session_id,
            job_id=job.job_id,
            created=job.created,
            committed_step=grant.committed_step,
            durable_step=grant.durable_step,
            host_bytes=job.host_bytes,
            nvme_bytes=job.nvme_bytes,
            segment_bytes=grant.segment_bytes,
            arena_reserved_bytes=grant.arena_reserved_bytes,
            can_maximize=True,
            can_amsgrad=True,
            can_take_staged_moments=True,
            can_take_masters=True,
            can_load_in_place=True,
            can_keep_rank_sums=True,
            can_give_masters=True,
            can_keep_scratch=True,
            daemon_id=self._daemon_id,
            protocol_version=agreed,
        )

    def _attach(self, job: JobInfo, request: session_pb2.AttachRequest, call: Call) -> SessionGrant:
        # A rank that comes late waits for the load of another.
        patience_s = call.timeout_s() if request.world_size > 1 else _JOIN_S
        load_deadline = time.monotonic() + min(call.timeout_s(), patience_s)
        while True:
            try:
                return self._server.attach(
                    job.job_id,
                    pid=call.peer.pid,
                    start_time=call.peer.start_time,
                    uid=call.peer.uid,
                    timeout_s=call.timeout_s(),
                )
            except StatusError as error:
                if error.code != StatusCode.IN_USE or not call.is_waited_for():
                    raise
                # Another session loads into it. That one's process may have died a moment ago. Or
                # it has closed a step, which ends however long it takes.
                is_making_step = self._server.closing_step(job.job_id) != 0
                if not is_making_step and time.monotonic() >= load_deadline:
                    raise
            time.sleep(_JOIN_LOOK_S)

    def _join_ranks(
        self, grant: SessionGrant, request: session_pb2.AttachRequest, call: Call
    ) -> None:
        deadline = time.monotonic() + min(call.timeout_s(), _JOIN_S)
        while True:
            try:
                self._server.join_ranks(
                    grant.session_id, rank=request.rank, world_size=request.world_size
                )
            except StatusError as error:
                is_over_soon = error.code in (StatusCode.UNAVAILABLE, StatusCode.IN_USE)
                if is_over_soon and time.monotonic() < deadline:
                    time.sleep(_JOIN_LOOK_S)
                    continue
                self._server.detach(grant.session_id)
                raise
            except BaseException:
                self._server.detach(grant.session_id)
                raise
            return

    def _resume(self, request: session_pb2.AttachRequest, call: Call) -> session_pb2.AttachResponse:
        """Not kept: no session, and where the job stands."""
        peer = call.peer
        job = access.find(self._server, peer.owner.stored_name(request.job))
        if job is not None and not peer.owner.owns(job):
            raise access.foreign_job(job, owner=peer.owner)
        session = self._peers.claim_session(peer, request.kept_session_id)
        if session is not None and request.world_size > 1:
            # The calls that ranks have made together are not kept: they start again.
            self._peers.remove_session(peer, session.session_id)
            self._server.detach(session.session_id)
            session = None
        if session is None or job is None or session.job_id != job.job_id:
            if job is None:
                return session_pb2.AttachResponse()
            return session_pb2.AttachResponse(
                committed_step=job.committed_step, durable_step=job.durable_step
            )
        grant = self._server.resume_session(
            session.session_id, pid=peer.pid, start_time=peer.start_time, uid=peer.uid
        )
        log.info(
            "session resumed",
            extra={
                "session": session.session_id,
                "job": job.name,
                **by_whom(peer),
            },
        )
        return session_pb2.AttachResponse(
            session_id=session.session_id,
            job_id=job.job_id,
            committed_step=grant.committed_step,
            host_bytes=job.host_bytes,
            nvme_bytes=job.nvme_bytes,
            segment_bytes=grant.segment_bytes,
            arena_reserved_bytes=grant.arena_reserved_bytes,
            kept=True,
            closing_step=self._server.closing_step(job.job_id),
            durable_step=job.durable_step,
            protocol_version=request.protocol_version,
        )

    def Detach(self, request: session_pb2.DetachRequest, call: Call) -> session_pb2.DetachResponse:
        session = self._peers.session(call.peer, request.session_id)
        self._peers.remove_session(call.peer, session.session_id)
        leases = self._server.detach(session.session_id)
        log.info(
            "session detached",
            extra={
                "session": session.session_id,
                "job": session.job_name,
                "leases": leases,
                **by_whom(call.peer),
            },
        )
        return session_pb2.DetachResponse(leases_dropped=leases)

    def Declare(
        self, request: session_pb2.DeclareRequest, call: Call
    ) -> session_pb2.DeclareResponse:
        session = self._peers.session(call.peer, request.session_id)
        gathered = self._declarations.gather(request)
        if request.more_follows:
            return session_pb2.DeclareResponse()
        specs = (wire.native_spec(spec) for spec in gathered)
        shards, gradients_fit = self._server.declare(session.session_id, specs)
        # A message holds as many as came in one.
        own = itertools.islice(shards, len(gathered) - len(request.shards), None)
        return session_pb2.DeclareResponse(
            shards=[wire.shard_message(shard) for shard in own], gradients_fit=gradients_fit
        )

    def Step(self, request: session_pb2.StepRequest, call: Call) -> session_pb2.StepResponse:
        session = self._peers.session(call.peer, request.session_id)

        def step(calls: Mapping[int, RankCall]) -> StepReport:
            names = self._server.ranks(session.session_id).names
            others = [
                (each.session_id, each.request.call) for rank, each in calls.items() if rank > 0
            ]
            merged = merged_step(calls, names)
            with call.takes(STEPS, request):
                return self._step(merged, others, call)

        report: StepReport
        if request.rank_call.number:
            report = self._together(session, "closed its step", request, call, step)
        else:
            report = self._step(request, [], call)
        if report.disk_error:
            log.error(
                "a step is not on disk",
                extra={"job": session.job_name, "reason": report.disk_error},
            )
        return session_pb2.StepResponse(
            committed_step=report.committed_step,
            durable_step=report.durable_step,
            read_seconds=report.read_seconds,
            update_seconds=report.update_seconds,
            write_seconds=report.write_seconds,
            commit_seconds=report.commit_seconds,
            read_bytes=report.read_bytes,
            written_bytes=report.written_bytes,
            disk_error=report.disk_error,
        )

    def _step(
        self, request: session_pb2.StepRequest, others: list[tuple[int, int]], call: Call
    ) -> StepReport:
        return self._server.step(
            request.session_id,
            [(wire.native_adam(group.settings), list(group.shard_ids)) for group in request.groups],
            staged_buffers=[
                (buffer.staged_shard_id, buffer.buffer_shard_id) for buffer in request.buffers
            ],
            step=request.step,
            call=request.call,
            other_ranks=others,
            timeout_s=call.timeout_s(),
        )

    def _together(
        self,
        session: Session,
        what: str,
        request: Any,
        call: Call,
        carry_out: Callable[[Mapping[int, RankCall]], Any],
    ) -> Any:
        sessions = self._server.ranks(session.session_id).sessions
        if session.session_id not in sessions:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"session {session.session_id} is no rank of job {session.job_name}",
            )
        rank = sessions.index(session.session_id)
        mine = RankCall(rank=rank, session_id=session.session_id, what=what, request=request)
        return self._rank_calls.together(
            session, mine, request.rank_call.number, waited=call, carry_out=carry_out
        )

    def EndGradients(
        self, request: session_pb2.EndGradientsRequest, call: Call
    ) -> session_pb2.EndGradientsResponse:
        session = self._peers.session(call.peer, request.session_id)
        # At once: others add to sums that this rank has no part in.
        self._server.end_gradients(session.session_id)

        def list_made(calls: Mapping[int, RankCall]) -> dict[int, list[int]]:
            refuse_other_counts(calls, self._server.ranks(session.session_id).names)
            return {
                each.session_id: self._server.gradients_of_other_ranks(each.session_id)
                for each in calls.values()
            }

        made = self._together(session, "ended its gradients", request, call, list_made)
        return session_pb2.EndGradientsResponse(shard_ids=made[session.session_id])

    def ExpectStep(
        self, request: session_pb2.ExpectStepRequest, call: Call
    ) -> session_pb2.ExpectStepResponse:
        session = self._peers.session(call.peer, request.session_id)
        self._server.expect_step(
            session.session_id,
            [(wire.native_adam(group.settings), list(group.shard_ids)) for group in request.groups],
        )
        return session_pb2.ExpectStepResponse()

    def Sync(self, request: session_pb2.SyncRequest, call: Call) -> session_pb2.SyncResponse:
        session = self._peers.session(call.peer, request.session_id)
        report = self._server.sync(session.session_id, timeout_s=call.timeout_s())
        return session_pb2.SyncResponse(
            committed_step=report.committed_step, written_bytes=report.written_bytes
        )

    def DropGradients(
        self, request: session_pb2.DropGradientsRequest, call: Call
    ) -> session_pb2.DropGradientsResponse:
        session = self._peers.session(call.peer, request.session_id)

        def drop(calls: Mapping[int, RankCall]) -> None:
            shard_ids = {each for one in calls.values() for each in one.request.shard_ids}
            self._server.drop_gradients_of_ranks(session.session_id, sorted(shard_ids))

        if request.rank_call.number:
            self._together(session, "dropped its gradients", request, call, drop)
        else:
            # Each once: the server's thread finds one after the other.
            self._server.drop_gradients(session.session_id, sorted(set(request.shard_ids)))
        return session_pb2.DropGradientsResponse()

    def ListRanks(
        self, request: session_pb2.ListRanksRequest, call: Call
    ) -> session_pb2.ListRanksResponse:
        session = self._peers.session(call.peer, request.session_id)
        report = self._server.ranks(session.session_id)
        return session_pb2.ListRanksResponse(names=report.names)

    def Delete(self, request: session_pb2.DeleteRequest, call: Call) -> session_pb2.DeleteResponse:
        session = self._peers.session(call.peer, request.session_id)
        unknown = [
            name
            for name in request.names
            if not self._server.delete_shard(session.session_id, name)
        ]
        return session_pb2.DeleteResponse(names_unknown=unknown)

    def ListShards(
        self, request: session_pb2.ListShardsRequest, call: Call
    ) -> session_pb2.ListShardsResponse:
        session = self._peers.session(call.peer, request.session_id)
        shards, page_next = wire.shard_page(self._server, session.job_id, first=request.page_first)
        return session_pb2.ListShardsResponse(shards=shards, page_next=page_next)

    def GetMaximaBytes(
        self, request: session_pb2.GetMaximaBytesRequest, call: Call
    ) -> session_pb2.GetMaximaBytesResponse:
        session = self._peers.session(call.peer, request.session_id)
        shard_ids = sorted(set(request.shard_ids))  # each once, as above
        count = self._server.bytes_of_maxima(session.session_id, shard_ids)
        return session_pb2.GetMaximaBytesResponse(bytes=count)

    def GetShard(
        self, request: session_pb2.GetShardRequest, call: Call
    ) -> session_pb2.GetShardResponse:
        session = self._peers.session(call.peer, request.session_id)
        shard = self._server.find_shard(session.job_id, request.name)
        return session_pb2.GetShardResponse(shard=wire.shard_message(shard))

    def _open_job(self, request: session_pb2.AttachRequest, call: Call) -> JobInfo:
        owner = call.peer.owner
        name = owner.stored_name(request.job)
        access.check_job_name(name)
        job: JobInfo | None = None
        with self._opening:
            existing = access.find(self._server, name)
            # Not even root: a name used twice by accident would mix two users' trainings.
            is_foreign = existing is not None and not owner.owns(existing)
            full = self._jobs_of_full(owner) if existing is None else None
            if not is_foreign and full is None:
                job = self._server.open_job(
                    name,
                    uid=owner.uid,
                    host_bytes=request.host_bytes,
                    nvme_bytes=request.nvme_bytes,
                    fresh=request.fresh,
                    durability=request.durability,
                )
        if job is None:
            # Users' names may come from the network: nobody else waits for them.
            raise _not_opened(existing, full, owner)
        caller = {"job": job.name, **by_whom(call.peer)}
        if existing is not None and request.fresh:
            reason = {"step": existing.committed_step, "reason": "connect(fresh=True)"}
            log.info("job dropped", extra={**caller, **reason})
        if job.created:
            quotas = {"host_bytes": job.host_bytes, "nvme_bytes": job.nvme_bytes}
            log.info("job created", extra={**caller, **quotas, "durability": job.durability})
        return job

    def _jobs_of_full(self, owner: Owner) -> _Full | None:
        """A user leaves a quarter of the jobs to others; root and the daemon's user take them."""
        jobs = self._server.jobs()
        of_user = sum(owner.owns(job) for job in jobs)
        most = self._jobs_max()
        user_most = most if owner.administers_all else most - most // 4
        if len(jobs) >= most:
            return _Full(is_user=False, count=len(jobs), at_most=most)
        if of_user >= user_most:
            return _Full(is_user=True, count=of_user, at_most=user_most)
        return None

    def _hand_over(
        self, grant: SessionGrant, job: JobInfo, request: session_pb2.AttachRequest, call: Call
    ) -> None:
        """Binds the session to the caller's process and passes its descriptors. A session that
        nobody would end is ended here."""
        session = Session(session_id=grant.session_id, job_id=job.job_id, job_name=job.name)
        try:
            if not call.is_waited_for():
                raise Refused(
                    StatusCode.DEADLINE, "the caller has not waited for its session; attach again"
                )
            self._peers.add_session(call.peer, session)
        except Refused:
            self._server.detach(grant.session_id)
            raise
        if request.without_shared_memory:
            return
        try:
            send_session(self._peers, call.peer, grant)
        except OSError as error:
            self._peers.remove_session(call.peer, grant.session_id)
            self._server.detach(grant.session_id)
            raise Refused(
                StatusCode.UNAVAILABLE,
                f"the session's descriptors cannot be passed to process {call.peer.pid}: keep its "
                f"attach connection open and read from it ({error.strerror or error})",
            ) from error


def _not_opened(existing: JobInfo | None, full: _Full | None, owner: Owner) -> Refused:
    if existing is not None:
        return access.foreign_job(existing, owner=owner)
    assert full is not None
    who = owner.shown if full.is_user else "the daemon"
    return Refused(
        StatusCode.CAPACITY,
        f"{who} has {full.count} of at most {full.at_most} jobs; drop one with `memd job drop`, or "
        "raise the setting max_jobs",
        quota=Quota(holder="user" if full.is_user else "daemon", what="jobs", most=full.at_most),
    )


def _agreed_version(request: session_pb2.AttachRequest) -> int:
    """The newest that both sides speak; of a session that was kept, its own."""
    said = request.protocol_range
    spoken = versions_said(request.protocol_version, oldest=said.oldest, newest=said.newest)
    if request.kept_session_id:
        spoken = versions_said(request.protocol_version, oldest=0, newest=0)
    if (agreed := SPOKEN.agreed_with(spoken)) is None:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"the client speaks protocol version {spoken} and this daemon (memd {__version__}) "
            f"version {SPOKEN}; install the same memd for both",
        )
    return agreed


def _check_attach(request: session_pb2.AttachRequest) -> None:
    access.check_job_name(request.job)
    if request.rank >= max(request.world_size, 1) or request.world_size > RANKS_MAX:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"a rank is below its world size, which is at most {RANKS_MAX} on a node: rank "
            f"{request.rank} of {request.world_size}",
        )
    if request.world_size > 1 and request.without_shared_memory:
        raise Refused(StatusCode.NOT_YET, "ranks need shared memory in this version")
