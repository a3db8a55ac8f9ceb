"""A session: one process's attachment to one job."""

from __future__ import annotations

import difflib
import logging
import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self
from weakref import WeakMethod, WeakSet, ref

import torch

from memd_client.dtypes import dtype_number
from memd_client.errors import (
    InvalidArgument,
    MemdError,
    NotDurable,
    NotYet,
    SessionFenced,
    UnknownName,
)
from memd_client.plain import decode
from memd_client.retry import AtOnce
from memd_client.shard import Shard
from memd_client.sizes import format_size
from memd_client.stalls import closing_step
from memd_client.statistics import SessionStatistics, summed
from memd_client.steps import OpenStep, SealedTarget, Steps
from memd_client.tensor_streams import TensorStreams
from memd_client.tracked import Tracked, checked, read_stored, stored_shards
from memd_native import STALL_GRADIENT
from memd_proto.v1 import job_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from memd_client.calls import ControlPlane, StepCall
    from memd_client.leases import Leases
    from memd_client.retry import Retrying

P = ParamSpec("P")

_log = logging.getLogger("memd_client")
TIERS: dict[str, types_pb2.Tier] = {"host": types_pb2.TIER_HOST, "nvme": types_pb2.TIER_NVME}


class Entry(Protocol):
    """What a session must know of a parameter that it holds: `away.StreamedParameter` or
    `targets.ResidentTarget`.
    """

    @property
    def shard(self) -> Shard: ...


class Session:
    """One process's attachment to one job; made by `connect`. Any thread may use it; a forked child
    may not.

    Ending the session, or the process, is not dropping the job.
    """

    def __init__(
        self,
        *,
        job: str,
        attached: session_pb2.AttachResponse,
        control: ControlPlane,
        leases: Leases | None,
        daemon_process_id: int,
        close_connection: Callable[[], None],
        retrying: Retrying | None = None,
    ) -> None:
        self.job = job
        self.host_bytes = attached.host_bytes
        self.nvme_bytes = attached.nvme_bytes
        self.daemon_process_id = daemon_process_id
        self.return_count = 0  # how often another daemon has taken the session over
        # Parameters of living modules and optimizers.
        self.entries: WeakSet[Entry] = WeakSet()
        # Each puts what changed under staging names and returns (staged shard, buffer shard): see
        # buffers.py.
        self.buffer_captures: list[Callable[[], list[tuple[Shard, Shard]]]] = []
        # Each puts the stored values back.
        self.buffer_restores: list[Callable[[], None]] = []
        self._session_id = attached.session_id
        self._committed_step = attached.committed_step
        self._attached_step = attached.committed_step
        self._durable_step = attached.durable_step
        self._control = control
        self._leases = leases
        self._close_connection = close_connection
        retrying = retrying or AtOnce()
        retrying.tell_returns(_weakly(self._note_return))
        self._streams = TensorStreams(
            control, job=job, session_id=attached.session_id, retrying=retrying
        )
        self._process_id = os.getpid()
        self._closed = False
        # Something was written that only Sync or a step makes durable.
        self._unsynced = False
        self._shards: dict[str, Shard] = {}
        self._gradients_fit = True
        self._step_count = 0
        self._step_seconds = 0.0
        self._step_ended: float | None = None  # when the last one was closed
        self._open_steps = Steps(job=job, count=_weakly(self._count_step))
        if leases is not None:
            leases.step = self._open_steps
            self._open_steps.follow = _weakly(leases.follow)
            self._open_steps.note_stall = _weakly(leases.note_stall)
        self._optimizers: list[ref[torch.optim.Optimizer]] = []
        self._tracked: Tracked | None = None
        self._resumed = False
        self._may_commit = False
        self._steps = session_pb2.StepResponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MemdError as failure:
            if error is None:
                raise
            # What happened first is what the user must see.
            error.add_note(f"closing the session failed too: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at step {self._committed_step}"
        return f"<memd session of job {self.job!r}, {state}>"

    # Bytes under a name

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stores a copy of `tensor` under `name`: any shape, fp16 to fp64, bf16, int8 to int64,
        uint8 or bool. A name keeps its shape and dtype until it is deleted. Durable with the next
        step, or when the session is closed.

        Raises:
            InvalidArgument: another shape or dtype is stored under this name, or the name is that
                of a parameter.
            CapacityError: the tensor is larger than what the job may hold.
        """
        self.refuse_if_unusable()
        _refuse_blob(name, tensor)
        tensor = tensor.detach()
        if self._leases is None:
            self._shards[name] = self._streams.put(self.blob_spec(name, tensor), tensor)
            return
        (declared,) = self.declare([self.blob_spec(name, tensor)])
        shard = Shard.of(declared)
        if shard.kind != types_pb2.SHARD_KIND_BLOB:
            raise InvalidArgument(
                f"job {self.job!r}: {name!r} is a parameter or buffer of a module; put under "
                "another name"
            )
        self._leases.write(shard, tensor)
        self._unsynced = True

    def get(self, name: str) -> torch.Tensor:
        """The tensor stored under `name`, on the CPU.

        Over shared memory it is memd's own memory, not a copy: cheap, and kept in host memory for
        as long as a tensor shares it. Read it; clone it before you change it. Without shared memory
        it is a private copy.

        Raises:
            UnknownName: nothing is stored under `name`; the message shows what is close.
        """
        self.refuse_if_unusable()
        if self._leases is None:
            self.find_shard(name)  # for an error that names what is close
            return self._streams.get(name)
        try:
            return self._read(self.find_shard(name))
        except UnknownName:
            # Another process may have deleted it and put another under its name: ask again.
            self._shards.pop(name, None)
            return self._read(self.find_shard(name))

    def prefetch(self, names: Iterable[str]) -> None:
        """Asks for tensors to be brought into host memory; returns at once. A hint: without shared
        memory, or where memory is short, it may come to nothing.

        Raises:
            UnknownName: one of them is not stored; none is prefetched.
        """
        self.refuse_if_unusable()
        if isinstance(names, str):
            raise InvalidArgument(
                f"prefetch takes several names; put this one in a list: {names!r}"
            )
        shards = [self.find_shard(name) for name in names]
        if self._leases is not None:
            for shard in shards:
                self._leases.prefetch(shard)

    def delete(self, name: str) -> None:
        """Removes what `put` stored under `name`. Tensors that `get` returned stay valid.

        Raises:
            UnknownName: nothing is stored under `name`.
            InvalidArgument: the name is that of a parameter or buffer.
        """
        self.refuse_if_unusable()
        # A call that is made again, after the daemon was away, takes what is not there for what it
        # deleted itself: so it must have been there before.
        if self.find_shard(name).kind != types_pb2.SHARD_KIND_BLOB:
            raise InvalidArgument(
                f"job {self.job!r}: {name!r} is a parameter or buffer of a module; it goes with "
                "the job"
            )
        request = session_pb2.DeleteRequest(session_id=self._session_id, names=[name])
        unknown = self._control.delete(request).names_unknown
        self._shards.pop(name, None)
        if unknown:
            raise self._unknown(name)

    # The session itself

    @property
    def committed_step(self) -> int:
        """How many steps the job has committed, as far as this session knows; waits for the one on
        its way.

        Raises:
            DaemonUnavailable, DeadlineExceeded: it is not known whether that one is committed; the
                next call asks again.
            MemdError: that one was not committed. Gradients are as they were before it.
        """
        self._settle()
        return self._committed_step

    @property
    def durable_step(self) -> int:
        """The last step that is on disk, behind `committed_step` where durability is not "step"; 0
        where "none" has given up what was there. Waits for the step on its way."""
        self._settle()
        return self._durable_step

    def statistics(self) -> SessionStatistics:
        """What this session has done since `connect`. Waits for nothing: a step whose commit is on
        its way is counted when something has waited for it.
        """
        leases = self._leases.statistics() if self._leases is not None else None
        return SessionStatistics(
            job=self.job,
            committed_step=self._committed_step,
            host_bytes=self.host_bytes,
            nvme_bytes=self.nvme_bytes,
            lease_count=leases.lease_count if leases else 0,
            lease_hits=leases.hits if leases else 0,
            lease_resident_count=leases.resident_count if leases else 0,
            leases_held=leases.leases_held if leases else 0,
            lease_wait_seconds=self._open_steps.lease_wait_seconds
            + (leases.lease_wait_seconds if leases else 0.0),
            lease_wait_reason_seconds=summed(leases.stall_phase_seconds) if leases else {},
            stall_phase_seconds=leases.stall_phase_seconds if leases else {},
            stall_group_seconds=leases.stall_group_seconds if leases else {},
            step_wall_seconds=leases.step_wall_seconds if leases else 0.0,
            parameter_count=len(self.entries),
            step_count=self._step_count,
            step_seconds=self._step_seconds,
            step_read_seconds=self._steps.read_seconds,
            step_update_seconds=self._steps.update_seconds,
            step_write_seconds=self._steps.write_seconds,
            step_commit_seconds=self._steps.commit_seconds,
            step_read_bytes=self._steps.read_bytes,
            step_written_bytes=self._steps.written_bytes,
        )

    def drop_job(self) -> None:
        """Ends the session and drops everything the job holds, in memory and on disk.

        Raises:
            MemdError: other sessions are attached to the job; nothing is dropped then, but this
                session is closed.
        """
        self.refuse_if_unusable()
        self._open_steps.drop_open()
        with suppress(MemdError):  # what becomes of a step does not matter any more
            self._settle()
        try:
            with suppress(SessionFenced):  # ended already, on the daemon's side
                self._detach()
            self._control.drop_job(job_pb2.DropJobRequest(name=self.job))
        finally:
            self._end()

    def close(self) -> None:
        """Makes durable what was put, and detaches. Offloaded parameters cannot be used afterwards,
        tensors that `get` returned can. The second call does nothing; so does one in a forked
        child.
        """
        if self._closed or os.getpid() != self._process_id:
            return
        dropped = self._open_steps.drop_open()
        if dropped:
            _log.warning(
                "job %r: the session was closed between step() and commit(), so that the gradients "
                "of %d parameters are dropped; the job stays at its last commit",
                self.job,
                dropped,
            )
        try:
            try:
                with suppress(NotDurable):  # or what follows puts it on disk
                    self._settle()
                if self._durable_step < self._committed_step:
                    self.mark_written()
                self.sync_if_needed()
            finally:
                self._detach()
        finally:
            self._end()

    def track(self, *, rng: bool = False, **objects: Any) -> None:
        """Saves objects inside every commit: what has `state_dict()` and `load_state_dict()`, such
        as LR schedulers, a GradScaler, torchdata's `StatefulDataLoader`, or a sampler of your own.
        Their state must be plain data and tensors on the CPU; no pickle is ever loaded.

        From now on `commit()` closes a step and `optimizer.step()` only prepares it. The settings
        of memd's optimizers, learning rates above all, are saved too; buffers of offloaded modules
        always are.

        Args:
            rng: the states of Python's, numpy's and torch's random number generators too.
            objects: each under the name that `resume()` will look for.

        Raises:
            InvalidArgument: an object without state, such as torch's own samplers; a name that is
                taken; a call after `resume()` or with a step open. Nothing is tracked then.
        """
        self.refuse_if_unusable()
        self._settle()
        self._open_steps.refuse_if_open("track()")
        if self._resumed:
            raise InvalidArgument(
                f"job {self.job!r}: resume() was called already, which restores what is tracked; "
                "call track() before it"
            )
        if not objects and not rng:
            raise InvalidArgument("track() takes objects by name, or rng=True")
        _ = self.leases  # needs shared memory
        tracked = self._tracked or Tracked(self)
        tracked.add(objects, rng=rng)
        self._tracked = tracked

    def commit(self, *, wait: bool = False) -> None:
        """Closes the step: what optimizers have prepared since the last commit, the buffers that
        changed and what is tracked become one transaction. Returns at once, except where parameters
        stay in this process and get their new values; what comes next and needs the result waits
        for it. A commit without a step is allowed and counts.

        Without `track()` every `optimizer.step()` has closed its step already: then only what was
        put is made durable, and nothing counts.

        Args:
            wait: returns when the step is committed, as the job's durability says.

        Raises:
            InvalidArgument: what is tracked holds something that is not plain data; the path to it
                is named. The step is open as before.
            DaemonUnavailable, DeadlineExceeded: with `wait`, it is not known whether this step is
                committed; in any case, whether the one before is. Every use of the session asks
                again, and `commit()` as the next call does nothing else.
            NotDurable: this step, with `wait`, or the one before is committed in memory and could
                not be put on disk, as the job's durability wants it. Without `wait` it is raised
                once, until the disk has a step again. `commit(wait=True)` as the next call tries
                the disk again and does nothing else.
            MemdError: with `wait`, this step was not committed; in any case, the one before was
                not. Gradients are as they were before that step. Or the message says that it is
                committed, and new values could not be put in place in this process: call again.
        """
        self.refuse_if_unusable()
        with closing_step(), self._open_steps.turn:
            self._commit(wait=wait)

    def _commit(self, *, wait: bool) -> None:
        late = self._settle()
        if self._tracked is None:
            if wait and self._open_steps.disk_error:
                self._sync()
            self.sync_if_needed()
            return
        was_made = late is not None and self._open_steps.open is None
        was_made |= self._open_steps.take_asked_again()
        try:
            if not was_made:
                self._refuse_unresumed()
                step = self._open_steps.open
                self._send_step()
                self._settle_values(step.targets.values() if step is not None else ())
                if wait:
                    self._settle_durably()
            elif wait and self._open_steps.disk_error:
                self._sync()
        except MemdError as error:
            if was_made or isinstance(error, NotDurable):
                self._open_steps.expect_again()
            raise

    def resume(self) -> int:
        """Restores what is tracked, and buffers, as the last commit left them, and returns how many
        commits the job has made: calls of `commit()`, or of `optimizer.step()` without `track()`.
        0 for a new job, of which nothing is restored. Call it once, before the first step and after
        everything that is tracked, offloaded or optimized was made; random numbers go on where they
        were, so draw none before the loop begins.

        Raises:
            InvalidArgument: other objects, optimizers or groups than then, all named; a second
                call; a call after a step. Nothing has changed.
            IntegrityError: what was stored cannot be read.
        """
        self.refuse_if_unusable()
        self._settle()
        self._open_steps.refuse_if_open("resume()")
        if self._resumed or self._committed_step != self._attached_step:
            raise InvalidArgument(
                f"job {self.job!r}: resume() is called once, before the first step of a session"
            )
        number = self._committed_step
        tracked = self._tracked or Tracked(self)
        newest, data = self._stored_commit()
        if newest == number and number:
            tracked.restore(number, checked(decode(data)), self._living_optimizers())
        elif tracked and number:
            raise InvalidArgument(
                f"job {self.job!r}: commit {number} stored no tracked objects"
                + (f" (commit {newest} was the last that did)" if newest else "")
                + "; start at session.committed_step instead, with these objects as they are, or "
                "connect with fresh=True"
            )
        for restore in self.buffer_restores if number else ():
            restore()
        self._resumed = True
        return number

    def snapshot(self, name: str) -> None:
        """Not yet: keeps the present step under a name."""
        raise NotYet(
            f"snapshots come in a later version: {name!r}; save model.state_dict() until then"
        )

    # For the other parts of the client

    def refuse_if_unusable(self) -> None:
        """Raises where the session was closed, or belongs to the process this one was forked
        from.
        """
        self._refuse_if_forked()
        if self._closed:
            raise MemdError(f"job {self.job!r}: the session is closed; connect anew")

    def _refuse_if_forked(self) -> None:
        if os.getpid() != self._process_id:
            raise MemdError(
                f"job {self.job!r}: this session belongs to process {self._process_id}, from which "
                "this one was forked; connect anew in the child"
            )

    @property
    def leases(self) -> Leases:
        """Once the step that is on its way is committed. Raises where it is not, and where the
        session has no shared memory or cannot be used.
        """
        self.refuse_if_unusable()
        self._open_steps.settle_for_lease()
        return self._shared_leases()

    def leases_of(self, shard: Shard) -> Leases:
        """For the value of a parameter: a lease waits in the daemon for the step that updates it.

        Raises:
            InvalidArgument: `step()` has taken its gradient, and `commit()` has not come yet.
            MemdError: the step that was on its way was not committed, or nobody knows it.
        """
        self.refuse_if_unusable()
        self._open_steps.settle_for(shard)
        return self._shared_leases()

    def gradient_leases_of(self, shard: Shard) -> Leases:
        """For the gradient of a parameter: waits for the step that is on its way. Raises as
        `leases_of`.
        """
        leases = self.leases_of(shard)
        # Its slot is free no earlier, and where the daemon dies before the answer came the next one
        # takes a gradient that is there for one that came after the step.
        self._open_steps.settle_for_lease(shard, STALL_GRADIENT)
        return leases

    def _shared_leases(self) -> Leases:
        if self._leases is None:
            raise InvalidArgument(
                f"job {self.job!r}: offloading needs shared memory; connect without "
                "shared_memory=False, on the daemon's machine"
            )
        return self._leases

    def blob_spec(self, name: str, tensor: torch.Tensor) -> types_pb2.ShardSpec:
        return types_pb2.ShardSpec(
            name=name,
            kind=types_pb2.SHARD_KIND_BLOB,
            dtype=dtype_number(tensor.dtype, name=name),
            shape=tensor.shape,
            tier=types_pb2.TIER_NVME,
        )

    def declare(self, specs: Sequence[types_pb2.ShardSpec]) -> list[types_pb2.Shard]:
        """Makes shards known, or finds those the job has; another shape or dtype is an
        InvalidArgument.
        """
        self.refuse_if_unusable()
        request = session_pb2.DeclareRequest(session_id=self._session_id, shards=specs)
        response = self._control.declare(request)
        shards = list(response.shards)
        if self._gradients_fit and not response.gradients_fit:
            _log.warning(
                "job %r: its host memory (%s) does not hold all gradients, so that some go to disk "
                "in every step; more host_bytes makes it faster",
                self.job,
                format_size(self.host_bytes),
            )
            self._gradients_fit = False
            if self._leases is not None:
                # Room that is taken ahead is somebody's who needs it now.
                self._leases.gradient_order.stop_asking()
        self._shards.update((shard.spec.name, Shard.of(shard)) for shard in shards)
        return shards

    def find_shard(self, name: str) -> Shard:
        """The shard of this name. Asks the daemon where this session has not met it; whether it was
        ever written shows when it is leased."""
        if name not in self._shards:
            self._shards = {shard.spec.name: Shard.of(shard) for shard in self._list_shards()}
        if name not in self._shards:
            raise self._unknown(name)
        return self._shards[name]

    def mark_written(self) -> None:
        """Something was written that is not durable yet."""
        self._unsynced = True

    def sync_if_needed(self) -> None:
        """Makes durable what was written outside of steps."""
        if self._unsynced:
            self.refuse_if_unusable()
            self._settle()
            self._sync()

    def _sync(self) -> None:
        # Before it is asked for: what another thread writes meanwhile is perhaps not part of it.
        was_unsynced, self._unsynced = self._unsynced, False
        try:
            response = self._control.sync(session_pb2.SyncRequest(session_id=self._session_id))
        except BaseException:
            self._unsynced |= was_unsynced
            raise
        self._open_steps.disk_error = ""
        # Not the committed step: where another session has gone on, the daemon must refuse the next
        # step of this one, which would follow on what it has not seen.
        self._durable_step = response.committed_step

    def step(
        self, groups: Sequence[session_pb2.StepGroup], targets: Sequence[SealedTarget]
    ) -> None:
        """Takes the gradients of `targets` for an update as `groups` say, and closes the step
        unless something is tracked. Where it raises, gradients are as they were, unless it is not
        known what became of the step: then the same call again asks for it and does nothing else.
        """
        self.refuse_if_unusable()
        self._end_gradients()
        with closing_step(), self._open_steps.turn:
            late = self._settle()
            if self._open_steps.is_asked_again(targets):
                return
            if late is not None:
                self._refuse_stale(late, targets)
            if self._tracked is not None:
                self._refuse_unresumed()
            with ExitStack() as held:
                # In the order that StreamedParameter.lock_order gives.
                for target in sorted(targets, key=lambda each: each.shard.shard_id):
                    target.hold_still(held)
                self._open_steps.seal(groups, targets)
                if self._tracked is not None:
                    return
                # Still held: to other threads there is no time between step() and its commit.
                try:
                    self._send_step()
                except BaseException:
                    self._open_steps.drop_open()
                    raise
            self._settle_values(targets)

    def _end_gradients(self) -> None:
        if self._leases is not None:
            self._leases.gradient_order.end_round()

    def expect_step(self, groups: Sequence[session_pb2.StepGroup]) -> None:
        """Tells the daemon how the next steps will update these shards."""
        self.refuse_if_unusable()
        self._control.expect_step(
            session_pb2.ExpectStepRequest(session_id=self._session_id, groups=groups)
        )

    def _refuse_stale(self, late: OpenStep, targets: Sequence[SealedTarget]) -> None:
        """Values that stay in this process were those from before `late`, which is committed only
        now, when the gradients of `targets` were computed."""
        for target in targets:
            if target.stays and target.shard.shard_id in late.targets:
                raise InvalidArgument(
                    f"job {self.job!r}: the gradient of {target.shard.name!r} was computed before "
                    "it was known that the step before it is committed, and with the values from "
                    "before that step; the new ones are in place now: call zero_grad(), and go on "
                    "with the next batch"
                )

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its settings are part of commits, in the order of registration."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(ref(optimizer))

    def settle_for(self, what: str) -> None:
        """`what` needs the state after the last step: waits for it; raises between step() and
        commit().
        """
        self.refuse_if_unusable()
        self._settle()
        self._open_steps.refuse_if_open(what)

    def drop_gradients(self, shards: Sequence[Shard]) -> None:
        """Forgets the unsealed gradients of `shards`."""
        self.refuse_if_unusable()
        self._end_gradients()
        self._settle()
        request = session_pb2.DropGradientsRequest(
            session_id=self._session_id, shard_ids=[shard.shard_id for shard in shards]
        )
        self._control.drop_gradients(request)

    def moments(self, shard: Shard) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Number of updates, exp_avg and exp_avg_sq: fp32, in the shard's shape, copies."""
        self.settle_for("state of the optimizer")
        return self._streams.moments(shard)

    def replace_moments(
        self, shard: Shard, generation: int, *, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        """Sets number of updates and both moments (fp32 or convertible, in the shard's shape).
        Durable when it returns.
        """
        self.settle_for("new state of the optimizer")
        self._streams.put_moments(shard, generation, exp_avg, exp_avg_sq)

    def _settle_durably(self) -> None:
        self._settle()
        if self._open_steps.disk_error:
            raise NotDurable(
                f"job {self.job!r}: step {self._committed_step} is committed in memory; on disk is "
                f"step {self._durable_step}: {self._open_steps.disk_error}"
            )

    def _settle(self) -> OpenStep | None:
        # The answer comes to a thread that a forked child does not have, and the lock may be held
        # by one.
        self._refuse_if_forked()
        return self._open_steps.settle()

    def _send_step(self) -> None:
        """The open step is on its way when this returns; where it raises, it is open as before."""
        number = self._committed_step + 1
        # First what can be refused for what the user tracks: nothing is sent then.
        data = (
            self._tracked.capture(number, self._living_optimizers())
            if self._tracked is not None
            else None
        )
        self.sync_if_needed()
        staged = [pair for capture in self.buffer_captures for pair in capture()]
        if self._tracked is not None and data is not None:
            staged.append(self._tracked.stage(data))
        step = self._open_steps.open
        request = session_pb2.StepRequest(
            session_id=self._session_id,
            step=number,
            groups=step.groups if step is not None else (),
            buffers=[
                session_pb2.StagedBuffer(
                    staged_shard_id=stage.shard_id, buffer_shard_id=buffer.shard_id
                )
                for stage, buffer in staged
            ],
        )

        def begin(call: int) -> StepCall:
            request.call = call
            return self._control.begin_step(request)

        self._open_steps.send(number, begin)
        self._may_commit = True
        ended, self._step_ended = self._step_ended, time.perf_counter()
        if ended is not None and self._leases is not None:
            self._leases.note_step(self._step_ended - ended)

    def _settle_values(self, targets: Iterable[SealedTarget]) -> None:
        """After a step over them was sent: new values that stay in this process are in place."""
        if any(target.stays for target in targets):
            self._settle()

    def _refuse_unresumed(self) -> None:
        """What a job stored is not replaced by what a loop that began anew has."""
        if self._resumed or self._may_commit:
            return
        if self._attached_step and self._stored_commit()[0] == self._attached_step:
            raise InvalidArgument(
                f"job {self.job!r}: it stands at commit {self._attached_step} with tracked objects "
                "that were not restored; call session.resume() before the first step, or connect "
                "with fresh=True"
            )
        self._may_commit = True

    def _stored_commit(self) -> tuple[int, memoryview]:
        """Number and data of the last commit that stored tracked objects; 0 where there is none."""
        found = (0, memoryview(b""))
        if self._leases is None:
            return found
        for shard in stored_shards(self._list_shards()):
            number, data = read_stored(self.leases.read(shard))
            if number > found[0]:
                found = number, data
        return found

    def _living_optimizers(self) -> list[torch.optim.Optimizer]:
        living = [known() for known in self._optimizers]
        return [optimizer for optimizer in living if optimizer is not None]

    def _read(self, shard: Shard) -> torch.Tensor:
        if shard.kind == types_pb2.SHARD_KIND_BLOB:
            return self._shared_leases().read(shard)  # no step changes it
        if shard.kind == types_pb2.SHARD_KIND_PARAMETER:
            return self.leases_of(shard).read(shard)
        return self.leases.read(shard)

    def _count_step(self, number: int, response: session_pb2.StepResponse, seconds: float) -> None:
        self._committed_step = number
        self._durable_step = response.durable_step
        self._step_count += 1
        self._step_seconds += seconds
        for field in (
            "read_seconds",
            "update_seconds",
            "write_seconds",
            "commit_seconds",
            "read_bytes",
            "written_bytes",
        ):
            setattr(self._steps, field, getattr(self._steps, field) + getattr(response, field))

    def _list_shards(self) -> Iterable[types_pb2.Shard]:
        return self._control.list_shards(
            session_pb2.ListShardsRequest(session_id=self._session_id)
        ).shards

    def _unknown(self, name: str) -> UnknownName:
        names = [shard.spec.name for shard in self._list_shards()]
        close = difflib.get_close_matches(name, names, n=3)
        hint = (
            f"; close to it: {', '.join(map(repr, close))}"
            if close
            else f"; it holds {len(names)} other names"
        )
        return UnknownName(f"job {self.job!r} holds nothing under {name!r}{hint}")

    def _note_return(self, answer: session_pb2.AttachResponse, daemon_process_id: int) -> None:
        """The next daemon has the session. What calls under way changed they tell themselves."""
        del answer
        self.daemon_process_id = daemon_process_id
        self.return_count += 1

    def _detach(self) -> None:
        if self._leases is not None:
            self._leases.close()
        self._control.detach(session_pb2.DetachRequest(session_id=self._session_id))

    def _end(self) -> None:
        self._closed = True
        self._open_steps.give_up()
        self._control.close()
        self._close_connection()


def _weakly(method: Callable[P, None]) -> Callable[P, None]:
    """`method` of a session for what the session owns: a session that nobody refers to ends at
    once, and with it its connection."""
    weak = WeakMethod(method)

    def call(*arguments: P.args, **names: P.kwargs) -> None:
        held = weak()
        if held is not None:
            held(*arguments, **names)

    return call


def _refuse_blob(name: str, tensor: torch.Tensor) -> None:
    if not name:
        raise InvalidArgument("a tensor is put under a name that is not empty")
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"put stores tensors, not {type(tensor).__name__}: {name!r}")
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"put stores dense tensors; call to_dense() first: {name!r} is {tensor.layout}"
        )
