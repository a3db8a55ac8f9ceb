"""Closing steps: what optimizers have sealed, buffers and tracked objects become one commit."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from memd_client.base.stalls import closing_step
from memd_client.core.backward import is_in_backward, running_backward
from memd_client.core.comparisons import compare_together
from memd_client.core.load import LOAD_PREFIX, Unfinished, older_daemon
from memd_client.core.temporary_snapshots import PREFIX
from memd_client.errors import InvalidArgument, MemdError, NotDurable, NotYet, SessionFenced
from memd_client.transaction.moments import Moments
from memd_proto.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.backward import Backward
    from memd_client.core.job import Job
    from memd_client.core.open_steps import OpenStep, SealedTarget
    from memd_client.core.temporary_snapshots import TemporarySnapshot
    from memd_client.transaction.loaded_moments import LoadedMoments

    # Writes values under staging names.
    Staging = Callable[[], list["StagedBuffer"]]

_log = logging.getLogger("memd_client")


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StagedBuffer:
    """A value that a commit moves from one shard to another."""

    staged: Shard
    buffer: Shard
    # Asked when the commit is sent, once values that come from devices are there. Otherwise the
    # buffer has this value already.
    is_new: Callable[[], bool] = _always


class Contributor(Protocol):
    """Values of this process that every commit stores beside parameters: `buffers.ModuleBuffers`,
    `delayed_values.DelayedValues` and `tracked.Tracked`. It gets the transaction with each call and
    keeps no reference to it, so that a session without users ends at once.
    """

    def capture(self, number: int, transaction: Transaction) -> Staging:
        """Reads the values for commit `number`, and returns the function that writes them. It may
        refuse them, and writes nothing yet."""
        ...

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        """Reads the values that commit `number` stored, and returns the function that restores
        them. It may refuse them, and changes nothing yet."""
        ...

    def holds(self, number: int, transaction: Transaction) -> bool:
        """Commit `number` stored values that a loop which starts from scratch would lose."""
        ...


class Watched(Protocol):
    """Parts of the model that a step looks at before it closes: `placement.Placement`."""

    def refuse_replaced(self) -> None: ...


class Participants:
    """Tracked objects, and functions that are called after commits: a user has added them to the
    commits of a session. The session owns them, as nobody else can call `commit()`; its transaction
    does not, since a tracked scheduler, or a function that updates an average, refers to an
    optimizer or a model, and these to their transaction."""

    def __init__(self, tracked: Contributor) -> None:
        self._tracked = tracked
        self._after_commit: list[Callable[[int], None]] = []

    @property
    def tracked(self) -> Contributor:
        return self._tracked

    @property
    def after_commit(self) -> list[Callable[[int], None]]:
        """Called after each commit."""
        return list(self._after_commit)

    def call_after_commit(self, function: Callable[[int], None]) -> None:
        self._after_commit.append(function)


class UpdatedOptimizer(Protocol):
    """`optimizer.Adam`."""

    param_groups: list[dict[str, Any]]

    @property
    def has_pending_update(self) -> bool: ...

    def note_states(self, moments: Sequence[LoadedMoments]) -> None:
        """A load has replaced moments of the job."""
        ...


class Transaction:
    """Closes and resumes the steps of one session. Any thread may call.

    A thread that closes a step holds the turn from settling the step before until the next one is
    in flight. Otherwise two threads could close two steps of the same number, or one could send
    half of what the other has sealed.
    """

    def __init__(self, job: Job, participants: Participants) -> None:
        self._job = job
        self._turn = RLock()
        self._participants = ref(participants)
        self._added: list[Contributor] = []
        self._watched: list[Watched] = []
        self._has_unfinished_load = False
        self._optimizers: list[ref[UpdatedOptimizer]] = []
        # Otherwise every `optimizer.step()` closes its step.
        self._is_closed_by_commit = False
        # The last commit that functions were called for.
        self._followed_step = job.steps.committed_step
        self._attached_step = job.steps.committed_step
        self._resumed = False
        # This session has replaced what the job stored, or there was nothing to replace.
        self._may_commit = False
        self._step_ended: float | None = None  # when the last one was closed
        self._moments = Moments(job)
        _transactions[self._moments] = ref(self)

    @property
    def job(self) -> Job:
        return self._job

    @property
    def moments(self) -> Moments:
        return self._moments

    def add(self, contributor: Contributor) -> None:
        """Its values are part of every commit from now on."""
        self._added.append(contributor)

    @property
    def contributors(self) -> list[Contributor]:
        participants = self._participants()
        return [*([participants.tracked] if participants is not None else ()), *self._added]

    def watch(self, watched: Watched) -> None:
        """Each step calls it first, from now on."""
        self._watched.append(watched)
        self._has_unfinished_load |= isinstance(watched, Unfinished)

    def register_optimizer(self, optimizer: UpdatedOptimizer) -> None:
        """Its settings are part of commits, in the order of registration."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(ref(optimizer))

    @property
    def optimizers(self) -> list[UpdatedOptimizer]:
        """Those that still exist."""
        living = [known() for known in self._optimizers]
        return [optimizer for optimizer in living if optimizer is not None]

    @property
    def committed_step(self) -> int:
        """Waits for the step in flight."""
        self._job.steps.refuse_late(self._job.settle())
        return self._job.steps.committed_step

    @property
    def durable_step(self) -> int:
        """Waits for the step in flight."""
        self._job.steps.refuse_late(self._job.settle())
        return self._job.steps.durable_step

    def refuse_late(self, what: str) -> None:
        """Raises if `what`, which tells `resume()` what to restore, comes too late."""
        self._job.settle_for(what)
        if self._resumed:
            raise InvalidArgument(
                f"job {self._job.name!r}: resume() was called already, which restores what is "
                f"tracked; call {what} before it"
            )

    @property
    def has_after_commit(self) -> bool:
        return bool(self._after_commit)

    @property
    def _after_commit(self) -> list[Callable[[int], None]]:
        participants = self._participants()
        return participants.after_commit if participants is not None else []

    def close_by_commit(self) -> None:
        """From now on `commit()` closes a step, and `optimizer.step()` only prepares it."""
        self._is_closed_by_commit = True

    def step(
        self,
        groups: Sequence[session_pb2.StepGroup],
        targets: Sequence[SealedTarget],
        *,
        prepare: Callable[[], None],
        refuse_orphans: Callable[[], None],
    ) -> None:
        """Takes the gradients of `targets` for an update with the settings in `groups`, and closes
        the step unless `commit()` or the end of a backward does. `prepare` is called before, if
        this is a new step, when no other is in flight; it may refuse it. `refuse_orphans` raises if
        there is a gradient that no optimizer takes. If this raises, gradients are as they were, or
        the outcome of the step is unknown: then the same call again asks for it and does nothing
        else.
        """
        job = self._job
        job.refuse_if_unusable()
        backward = running_backward(job.name)
        if backward is not None:
            self._step_in(backward, groups, targets, prepare, refuse_orphans)
            return
        refuse_orphans()
        self._look_at_model()
        job.end_gradients()
        with closing_step(), self._turn:
            # First: a lease would settle too, and nobody would learn that the step is late.
            late = job.settle()
            if job.steps.is_asked_again(targets):
                return
            if late is not None:
                self._refuse_stale(late, targets)
            self._take_writes()
            self._begin(prepare)
            with ExitStack() as held:
                # In the order of Residency.lock_order.
                for target in sorted(targets, key=lambda each: each.shard.shard_id):
                    target.hold_still(held)
                step = job.steps.seal(groups, targets)
                if self._is_closed_by_commit:
                    for target in targets:
                        target.hide()
                    return
                # Still held: other threads see no moment between step() and its commit.
                try:
                    self._send(step)
                except BaseException:
                    job.steps.drop(step)
                    raise
            self._settle_values(targets)

    def _look_at_model(self) -> None:
        """Before a step: raises if it could not be complete."""
        self._job.held_names.refuse_unclaimed()
        self.refuse_replaced()

    def refuse_replaced(self) -> None:
        """Raises if a parameter that is offloaded has another one in its place."""
        for watched in self._watched:
            watched.refuse_replaced()

    def _begin(self, prepare: Callable[[], None]) -> None:
        """Before a step takes gradients: the step before has settled."""
        if self._is_closed_by_commit:
            self._follow_late_commit()
            self._refuse_unresumed()
        prepare()
        self._moments.read_all()

    def _step_in(
        self,
        backward: Backward,
        groups: Sequence[session_pb2.StepGroup],
        targets: Sequence[SealedTarget],
        prepare: Callable[[], None],
        refuse_orphans: Callable[[], None],
    ) -> None:
        """As `step`, for the open step of a backward that runs. It may be called for each parameter
        by itself, so what concerns all of them is left to the first call and the end."""
        job = self._job
        if job.ranks.are_several:
            raise NotYet(
                f"job {job.name!r}: step() in backward with several ranks comes in a later "
                "version; call it after backward"
            )
        with closing_step(), self._turn:
            late = job.settle()
            if job.steps.open.step_of(backward) is None:
                self._look_at_model()
            self._begin(prepare)
            step = self._open_in(backward, late)
            step.refuse_orphans = refuse_orphans
            for each in step.late:
                self._refuse_stale(each, targets)
            for target in targets:
                target.take_writes()
            with ExitStack() as held:
                for target in sorted(targets, key=lambda each: each.shard.shard_id):
                    target.hold_still(held)
                job.steps.seal(groups, targets, step)
                for target in targets:
                    target.hide()

    def _open_in(self, backward: Backward, late: OpenStep | None) -> OpenStep:
        """The open step of a backward that runs. The caller has the turn, and the step before has
        settled."""
        opened = self._job.steps.open
        step = opened.step_of(backward)
        if step is None:
            step = opened.open_in(backward)
            backward.tell_end(_at_end(ref(self), step))
        if late is not None:
            opened.note_late(step, late)
        return step

    def _end_backward(self, step: OpenStep, *, is_complete: bool) -> None:
        """The backward of an open step has ended. A step that backward has not completed, or that
        could not be closed, is broken."""
        opened = self._job.steps.open
        if step not in opened.in_backward:  # the session was closed meanwhile
            return
        if not is_complete:
            opened.note_broken(step)
            return
        try:
            with torch.no_grad(), closing_step(), self._turn:
                self._close_in_backward(step)
        except BaseException:
            opened.note_broken(step)
            raise

    def _close_in_backward(self, step: OpenStep) -> None:
        job = self._job
        job.refuse_if_unusable()
        if not step.is_counted:  # the only call of step() has raised, and its caller went on
            job.steps.drop(step)
            return
        if step.refuse_orphans is not None:
            step.refuse_orphans()
        self._take_writes()
        job.end_gradients()
        job.settle()
        if self._is_closed_by_commit:
            job.steps.open.merge(step)  # its parameters stay hidden until commit()
            return
        self._send(step)
        for target in step.targets.values():
            target.show()
        self._settle_values(step.targets.values())

    def drop_broken(self, targets: Iterable[SealedTarget]) -> None:
        """`zero_grad()` of the optimizer of `targets`, outside of backward: drops each broken step
        that has one of them, with all its gradients."""
        steps = self._job.steps
        if not steps.open.in_backward or is_in_backward():
            return
        shard_ids = {target.shard.shard_id for target in targets}
        with self._turn:
            for step in steps.open.in_backward:
                if step.is_broken and not shard_ids.isdisjoint(step.targets):
                    steps.drop(step)
                    self._job.drop_gradients(
                        [target.shard for target in step.targets.values() if target.drop_gradient()]
                    )

    def skip(self, prepare: Callable[[], None]) -> None:
        """A step that updates nothing. Closes it, unless `commit()` does. `prepare`: see `step`."""
        job = self._job
        job.refuse_if_unusable()
        self._look_at_model()
        backward = running_backward(job.name)
        with closing_step(), self._turn:
            late = job.settle()
            if self._is_closed_by_commit:
                self._follow_late_commit()
                prepare()
            # A step of nothing for which an error was raised is this one, asked for again.
            if not self._is_closed_by_commit and (late is None or late.targets):
                prepare()
                if backward is not None:
                    job.steps.open.count(self._open_in(backward, late))
                else:
                    self._send(None)

    def commit(self, *, wait: bool = False) -> None:
        """See `Session.commit`."""
        self._job.refuse_if_unusable()
        try:
            with closing_step(), self._turn:
                self._commit(wait=wait)
        except NotDurable:
            self._follow_commit()  # it is made, and the caller may go on with the next one
            raise
        self._follow_commit()

    def _follow_commit(self) -> None:
        """Once for each commit that is made, whichever call of `commit()` has learned that."""
        number = self._job.steps.committed_step
        if number > self._followed_step:
            self._followed_step = number
            for function in self._after_commit:
                function(number)

    def _follow_late_commit(self) -> None:
        """Before the next step, if its `commit()` did not learn that it was made."""
        if self._job.steps.open.step is None:
            self._follow_commit()

    def _take_writes(self) -> None:
        """Writes through views of parameters go into this step, unless an earlier `step()` has
        taken their gradients: then nobody may use them before `commit()`."""
        opened = self._job.steps.open
        parameters = list(self._job.shards.parameters)
        sealed = [each for each in parameters if opened.is_sealed(each.shard)]
        compare_together(each for parameter in sealed for each in parameter.compare_value())
        for parameter in parameters:
            if opened.is_sealed(parameter.shard):
                parameter.refuse_writes()
            else:
                parameter.take_writes()

    def _commit(self, *, wait: bool) -> None:
        job, steps = self._job, self._job.steps
        self._refuse_in_backward()
        late = job.settle()  # before any lease: see step()
        if not self._is_closed_by_commit:
            if self._has_unfinished_load:
                self.refuse_replaced()
            self._take_writes()
            if wait and steps.disk_error:
                job.sync()
            job.sync_if_needed()
            return
        was_made = late is not None and steps.open.step is None
        was_made |= steps.take_asked_again()
        try:
            if not was_made:
                step = steps.open.step
                if step is None:  # otherwise step() has looked
                    self.refuse_replaced()
                self._take_writes()
                self._refuse_unresumed()
                self._send(step)
                self._settle_values(step.targets.values() if step is not None else ())
                if wait:
                    self._settle_durably()
                elif self._after_commit:
                    job.settle()
            elif wait and steps.disk_error:
                job.sync()
        except MemdError as error:
            if was_made or isinstance(error, NotDurable):
                steps.expect_again()
            raise

    def _refuse_in_backward(self) -> None:
        """Before `commit()`: a step that backward has not completed must be in no commit."""
        opened = self._job.steps.open
        if self._is_closed_by_commit or any(
            step.backward is not None and step.backward.is_of_this_thread
            for step in opened.in_backward
        ):
            opened.refuse_if_in_backward("commit()")

    def resume(self) -> int:
        """See `Session.resume`."""
        self._job.settle_for("resume()")
        number = self._job.steps.committed_step
        if self._resumed or number != self._attached_step:
            raise InvalidArgument(
                f"job {self._job.name!r}: resume() is called once, before the first step of a "
                "session"
            )
        if number:
            restores = [each.load(number, self) for each in self.contributors]
            for restore in restores:
                restore()
        self._resumed = True
        if number:
            # The last process may have died before it had called them for this commit. What they
            # changed is in no commit yet.
            for function in self._after_commit:
                function(number)
        return number

    def snapshot(self, name: str, *, is_own: bool = False, session_id: int = 0) -> int:
        """See `Session.snapshot`.

        Args:
            is_own: memd has named it.
            session_id: of a load: if that session ends before the snapshot is dropped, the daemon
                takes the job back to it.

        Raises:
            NotYet: the daemon has made the snapshot, and would not take the job back to it.
        """
        if not is_own:
            _refuse_own_name(name)
        with self._turn:
            self._job.settle_for("snapshot()")
            self._take_writes()
            request = job_pb2.CreateSnapshotRequest(
                job=self._job.name,
                name=name,
                number=secrets.randbits(63) + 1,
                session_id=session_id,
            )
            made = self._job.control.create_snapshot(request)
        # The daemon may have been replaced by an older one since the session began.
        if session_id and not made.is_load:
            raise older_daemon(self._job.name)
        step: int = made.snapshot.step
        return step

    def temporary_snapshot(self) -> TemporarySnapshot:
        """As `snapshot`, under a name of its own, and for this session alone."""
        return self._job.store.temporary_snapshots.make(partial(self.snapshot, is_own=True))

    def close(self) -> None:
        """Makes durable what was put, and ends the session."""
        job, steps = self._job, self._job.steps
        dropped = steps.drop_open()
        if dropped:
            _log.warning(
                "job %r: the session was closed between step() and commit() or the end of "
                "backward, so the gradients of %d parameters are dropped; the job stays at its "
                "last commit",
                job.name,
                dropped,
            )
        try:
            try:
                job.store.temporary_snapshots.close()
                with suppress(NotDurable):  # the sync below puts it on disk, or raises
                    job.settle()
                if self._has_unfinished_load:
                    _log.warning(
                        "job %r: a load broke off, so nothing that this session has put since "
                        "is made durable; the next session finds all old values or all new ones",
                        job.name,
                    )
                else:
                    self._take_writes()
                    if steps.durable_step < steps.committed_step:
                        job.mark_written()
                    job.sync_if_needed()
                    self._moments.read_all()
            finally:
                job.detach()
        finally:
            job.end()

    def drop_job(self) -> None:
        """Ends the session and drops the job."""
        job = self._job
        job.refuse_if_unusable()
        job.steps.drop_open()
        with suppress(MemdError):  # the step's outcome does not matter any more
            job.settle()
        try:
            with suppress(MemdError):
                job.store.temporary_snapshots.close()
            with suppress(MemdError):  # who uses them later learns that they are gone
                self._moments.read_all()
            with suppress(SessionFenced):  # the daemon has ended it already
                job.detach()
            job.drop()
        finally:
            job.end()

    def _send(self, step: OpenStep | None) -> None:
        """Sends an open step, or one of nothing. If this raises, it is open as before."""
        job = self._job
        number = job.steps.committed_step + 1
        # Contributors refuse values here, before anything is written or sent.
        stagings = [each.capture(number, self) for each in self.contributors]
        job.sync_if_needed()
        staged = [each for staging in stagings for each in staging()]
        request = session_pb2.StepRequest(
            session_id=job.session_id,
            step=number,
            rank_call=job.ranks.next_call(),
            groups=step.groups if step is not None else (),
        )

        def begin(call: int) -> StepCall:
            request.call = call
            request.buffers.extend(
                session_pb2.StagedBuffer(
                    staged_shard_id=each.staged.shard_id, buffer_shard_id=each.buffer.shard_id
                )
                for each in staged
                if each.is_new()
            )
            return job.control.begin_step(request)

        job.steps.send(number, begin, step)
        job.ranks.count_call()
        if step is not None:
            job.rank_gradients.begin()
        else:
            job.rank_gradients.note_empty_step()
        self._may_commit = True
        ended, self._step_ended = self._step_ended, time.perf_counter()
        if ended is not None:
            job.steps.note_period(self._step_ended - ended)

    def _settle_values(self, targets: Iterable[SealedTarget]) -> None:
        """After a step over `targets` was sent: new values that are seen in this process are in
        place, unless their updates are delayed, or the old ones are again if this raises."""
        is_viewed = False
        for target in targets:
            is_viewed |= target.is_viewed
            if target.is_delayed:
                target.show()
        if is_viewed:
            self._job.refuse_if_unusable()
            self._job.steps.settle_ahead()
            self._job.unordered_leases.devices.follow_values()

    def _settle_durably(self) -> None:
        self._job.settle()
        steps = self._job.steps
        if steps.disk_error:
            raise NotDurable(
                f"job {self._job.name!r}: step {steps.committed_step} is committed in memory; step "
                f"{steps.durable_step} is on disk: {steps.disk_error}"
            )

    def _refuse_stale(self, late: OpenStep, targets: Sequence[SealedTarget]) -> None:
        """`late` is known to be committed only now. Values that stay in this process were still the
        old ones when the gradients of `targets` were computed, or others since that step."""
        wanted = {target.shard.shard_id for target in targets}
        for target in late.targets.values():
            is_new = target.has_gradient and not target.has_sealed_gradient
            if target.stays and (target.shard.shard_id in wanted or is_new):
                raise InvalidArgument(
                    f"job {self._job.name!r}: the gradient of {target.shard.label!r} was computed "
                    "with the values from before the last step, for which an error was raised "
                    "before they were all in place; they are now: call zero_grad(), and go on with "
                    "the next batch"
                )

    def _refuse_unresumed(self) -> None:
        """A loop that starts from scratch must not replace what the job stored."""
        if self._resumed or self._may_commit:
            return
        number = self._attached_step
        if number and any(each.holds(number, self) for each in self.contributors):
            raise InvalidArgument(
                f"job {self._job.name!r}: it stands at commit {number} with tracked objects that "
                "were not restored; call session.resume() before the first step, or connect with "
                "fresh=True"
            )
        self._may_commit = True


def call_settled(transaction: Transaction, what: str, function: Callable[[], None]) -> None:
    """Calls `function` when no step is open or in flight, and none begins meanwhile. `what` is the
    call that needs it, for messages."""
    with transaction._turn:
        transaction.job.settle_for(what)
        function()


def _refuse_own_name(name: str) -> None:
    """A snapshot of such a name would be taken for memd's own."""
    owners = {PREFIX: "dcp.async_save makes and drops", LOAD_PREFIX: "loads make and drop"}
    for prefix, owner in owners.items():
        if name.startswith(prefix):
            raise InvalidArgument(
                f"names that begin with {prefix} are those of snapshots that {owner}; choose "
                f"another one than {name!r}"
            )


# The transaction of the moments that a state_dict refers to.
_transactions: WeakKeyDictionary[Moments, ref[Transaction]] = WeakKeyDictionary()


def transaction_of(moments: Moments) -> Transaction | None:
    """The one that has them; None if nobody uses the session any more."""
    return _transactions[moments]()


def _at_end(transaction: ref[Transaction], step: OpenStep) -> Callable[[bool], None]:
    """Weak: a backward must not keep a session that nobody refers to."""

    def end(is_complete: bool) -> None:
        held = transaction()
        if held is not None:
            held._end_backward(step, is_complete=is_complete)

    return end
