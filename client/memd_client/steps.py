"""The steps of a session: what optimizers have sealed, and the one whose commit is on its way."""

from __future__ import annotations

import atexit
import logging
import os
import time
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from memd_client.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    MemdError,
    NotDurable,
    PermissionDenied,
    SessionFenced,
    UnknownName,
    retold,
)
from memd_native import STALL_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from memd_client.calls import StepCall
    from memd_client.shard import Shard
    from memd_proto.v1 import session_pb2

_log = logging.getLogger("memd_client")
# They say nothing of the step. The last two: who asks is not known to the next daemon, or not yet.
_NO_ANSWERS = (DaemonUnavailable, DeadlineExceeded, PermissionDenied, UnknownName)


class SealedTarget(Protocol):
    """A parameter in a step, as the steps see it: `targets.Target`."""

    @property
    def shard(self) -> Shard: ...
    @property
    def stays(self) -> bool:
        """The value is in this process, and must be the new one when the step was closed."""
        ...

    @property
    def has_sealed_gradient(self) -> bool:
        """The gradient is still in this process, and is the one that was sealed last."""
        ...

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed no other thread brings the value or touches the gradient."""
        ...

    def refuse_if_in_use(self) -> None:
        """Raises where somebody has the value in place, who would not see the update."""
        ...

    def seal(self) -> None:
        """The gradient belongs to the step: here it is gone."""
        ...

    def undo(self) -> None:
        """The step came to nothing: the gradient is there as before."""
        ...

    def finish(self) -> None:
        """The step is committed. Where it raises it is called again."""
        ...


@dataclass
class OpenStep:
    """What optimizers have sealed since the last commit."""

    groups: list[session_pb2.StepGroup] = field(default_factory=list)
    targets: dict[int, SealedTarget] = field(default_factory=dict)  # by shard id

    def undo(self) -> None:
        for target in self.targets.values():
            target.undo()


@dataclass
class _PendingStep:
    number: int
    call: StepCall
    step: OpenStep
    unfinished: list[SealedTarget] = field(default_factory=list)
    is_committed: bool = False
    is_finishing: bool = False
    disk_error: str = ""
    durable_step: int = 0
    was_raised: bool = False  # somebody was told that it is not known, or not in place


class Steps:
    """Seals, sends and settles the steps of one session: at most one is on its way.

    The daemon is asked over gRPC and leases travel through shared memory, so that a lease could
    overtake the step it comes after and show the values before it. What is asked for through the
    ring therefore says which call of a step it follows, and the daemon lets it wait for that, and
    then for the update of its own shard alone. Any thread may call.

    Who closes a step holds `turn` from settling the one before until the next is on its way: else
    two threads would close two steps of one number, or one would take along, unsent, what the other
    has sealed. Locks are taken in this order alone: `turn`; then those of parameters and gradients
    (`hold_still`), several of them only with the turn or in the order that away.py gives; then the
    lock of this class, under which nobody asks for one of those before. A lease that is asked for
    under the lock of its parameter may have to settle.
    """

    def __init__(
        self, *, job: str, count: Callable[[int, session_pb2.StepResponse, float], None]
    ) -> None:
        """`count` is told of every step that was committed: its number, and the seconds it took."""
        self.open: OpenStep | None = None
        self.lease_wait_seconds = 0.0  # of leases, for the step before them
        self.disk_error = ""  # why the last step that was to be on disk is not
        self._job = job
        self._count = count
        # Told which call the leases of this session follow from now on; 0: none.
        self.follow: Callable[[int], None] = lambda call: None
        # Told of waits for a step's answer: the shard that somebody wants to use, the reason, and
        # the seconds.
        self.note_stall: Callable[[Shard | None, int, float], None] = lambda *_: None
        self._call_count = 0
        self._pending: _PendingStep | None = None
        # Shards of the last step, where an error was raised for it though it may be committed.
        self._raised: set[int] = set()
        self._was_asked_again = False
        self.turn = RLock()
        self._lock = RLock()
        self._process_id = os.getpid()

    def seal(
        self, groups: Sequence[session_pb2.StepGroup], targets: Sequence[SealedTarget]
    ) -> OpenStep:
        """Adds to the open step, which it becomes part of or which stays as it was. With the turn,
        while the targets are held still."""
        with self._lock:
            for target in targets:
                self.refuse_if_sealed(target.shard, "a second step()")
                target.refuse_if_in_use()
            sealed: list[SealedTarget] = []
            try:
                for target in targets:
                    target.seal()
                    sealed.append(target)
            except BaseException:
                for target in sealed:
                    target.undo()
                raise
            self._raised, self._was_asked_again = set(), False
            self.open = self.open or OpenStep()
            self.open.groups += groups
            self.open.targets.update((target.shard.shard_id, target) for target in targets)
            return self.open

    def send(self, number: int, call: Callable[[int], StepCall]) -> None:
        """The open step, or one without gradients, is on its way when this returns; where it raises
        it is open as before. `call` is given a number that no other call of the session has."""
        with self._lock:
            self._call_count += 1
            sent = call(self._call_count)
            step = self.open or OpenStep()
            self._raised, self._was_asked_again = set(), False
            self._pending = _PendingStep(number, sent, step, list(step.targets.values()))
            # Not before it is sent: another thread's lease would wait for a call that never comes.
            # Until then the step is open, so that nobody leases what is sealed.
            self.follow(self._call_count)
            self.open = None
            # What is registered last is called first: before a private daemon is stopped.
            atexit.register(self._settle_at_exit)

    def drop_open(self) -> int:
        """Gradients come back to their parameters; returns how many."""
        with self._lock:
            step, self.open = self.open, None
            if step is None:
                return 0
            step.undo()
            return len(step.targets)

    def settle(self, shard: Shard | None = None, reason: int = STALL_STEP) -> OpenStep | None:
        """Waits for the step that is on its way, and for the new values that stay in this process.
        Returns it where an earlier call has raised for it, and it is committed after all. `shard`
        and `reason` say under what the wait is counted.

        Raises:
            DaemonUnavailable, DeadlineExceeded: there is no answer, and the daemon may have made
                the step. It stays on its way: the next call asks again.
            MemdError: it was not committed. The job is at the step before, and gradients are as
                they were. Or it is, and a new value could not be put in place; the next call goes
                on with that.
            NotDurable: it is committed in memory and should be on disk. Raised once, until the disk
                has a step again.
        """
        is_pending = self._pending is not None
        if not is_pending:
            return None
        began = time.perf_counter()
        with self._lock:
            pending = self._pending
            if pending is None:  # settled by the thread that this one has waited for
                self.note_stall(shard, reason, time.perf_counter() - began)
                return None
            # A target that is being finished takes a lease, for which nobody else has to wait.
            if pending.is_finishing:
                return None
            try:
                if not pending.is_committed:
                    try:
                        response = pending.call.result()
                    finally:
                        self.note_stall(shard, reason, time.perf_counter() - began)
                    self._count(pending.number, response, pending.call.seconds())
                    pending.disk_error = response.disk_error
                    pending.durable_step = response.durable_step
                    pending.is_committed = True
                self._finish(pending)
            except MemdError as error:
                raise self._failed(pending, error) from error
            except BaseException:
                self._note_raised(pending)
                raise
            self._forget_pending()
            was_on_disk, self.disk_error = not self.disk_error, pending.disk_error
            if self.disk_error and was_on_disk:
                self._note_raised(pending)
                raise NotDurable(
                    f"job {self._job!r}: step {pending.number} is committed in memory, go on with "
                    f"the next; on disk is step {pending.durable_step}: {self.disk_error}"
                )
            return pending.step if pending.was_raised else None

    def _finish(self, pending: _PendingStep) -> None:
        pending.is_finishing = True
        try:
            while pending.unfinished:
                pending.unfinished[0].finish()
                del pending.unfinished[0]
        finally:
            pending.is_finishing = False

    def is_asked_again(self, targets: Sequence[SealedTarget]) -> bool:
        """Whether a step over `targets`, which are settled, is the last one over again: an error
        was raised for that, and they have nothing but the gradients that it took. True once.
        """
        with self._lock:
            shard_ids = {target.shard.shard_id for target in targets}
            again = shard_ids <= self._raised and all(
                target.has_sealed_gradient for target in targets
            )
            if again:
                self._raised -= shard_ids
            self._was_asked_again = again
            return again

    def take_asked_again(self) -> bool:
        """Whether nothing came after a step that `is_asked_again`, or after `expect_again`; true
        once."""
        with self._lock:
            again, self._was_asked_again = self._was_asked_again, False
            return again and self.open is None

    def expect_again(self) -> None:
        """An error was raised for a commit that is made."""
        self._was_asked_again = True

    def give_up(self) -> None:
        """The session ends: nobody asks any more what became of the step that is on its way."""
        with self._lock:
            self._forget_pending()

    def _failed(self, pending: _PendingStep, error: MemdError) -> MemdError:
        """What `settle` raises where there is no answer, where it is this error, or where the step
        could not be finished."""
        what = f"job {self._job!r}: step {pending.number}"
        if pending.is_committed:
            self._note_raised(pending)
            return retold(
                error,
                f"{what} is committed; its new values are not in place yet in "
                f"{len(pending.unfinished)} parameters that stay in this process; the next use of "
                f"the session goes on with them: {error}",
            )
        if isinstance(error, _NO_ANSWERS):
            self._note_raised(pending)
            return retold(
                error,
                f"{what}: it is not known whether it is committed; the next use of the session "
                "asks again, and after connecting anew session.committed_step says it: "
                f"{error}",
            )
        self._forget_pending()
        self._raised = set()
        pending.step.undo()
        if isinstance(error, SessionFenced):
            # Its gradients are gone with the session, and where the job stands the error says.
            return retold(error, f"{what} was not acknowledged: {error}")
        return retold(error, f"{what} was not committed, its gradients are as they were: {error}")

    def _note_raised(self, pending: _PendingStep) -> None:
        pending.was_raised = True
        self._raised = set(pending.step.targets)

    def _forget_pending(self) -> None:
        self._pending = None
        self.follow(0)
        atexit.unregister(self._settle_at_exit)

    def _settle_at_exit(self) -> None:
        """A process that ends in order sees its steps through: the request may not even have left
        it."""
        if self._process_id != os.getpid():
            return
        try:
            self.settle()
        except MemdError as error:
            _log.error("%s", error)

    def settle_for(self, shard: Shard) -> None:
        """Before a lease of a parameter: settles where the step on its way has its answer; raises
        where the open step updates it.
        """
        if self.open is not None:
            self.refuse_if_sealed(shard, "its use")
        self.settle_answered()

    @property
    def is_open(self) -> bool:
        """It has gradients sealed, and is not closed."""
        return self.open is not None

    def settle_answered(self) -> bool:
        """Settles where the step that is on its way has its answer, or needs somebody to ask for it
        again. Whether one is on its way still."""
        pending = self._pending
        if pending is not None and pending.call.done():
            self.settle_for_lease()
        return self._pending is not None

    def settle_for_lease(self, shard: Shard | None = None, reason: int = STALL_STEP) -> None:
        """As `settle`; the wait is one of leases."""
        if self._pending is not None:
            began = time.perf_counter()
            try:
                self.settle(shard, reason)
            finally:
                self.lease_wait_seconds += time.perf_counter() - began

    def note_unreachable(self, error: DaemonUnavailable) -> None:
        """A lease found no daemon, for as long as it may wait for one. Raises where a step is on
        its way, of which nobody knows now whether it is committed; waits for nothing."""
        if not self._lock.acquire(blocking=False):
            return  # somebody waits for its answer, and will tell
        try:
            pending = self._pending
            if pending is not None and not pending.is_committed:
                raise self._failed(pending, error) from error
        finally:
            self._lock.release()

    def refuse_if_sealed(self, shard: Shard, what: str) -> None:
        if self.open is not None and shard.shard_id in self.open.targets:
            raise InvalidArgument(
                f"job {self._job!r}: step() has taken the gradient of {shard.name!r}, and "
                f"{what} has to wait for its update: call session.commit() first"
            )

    def refuse_if_open(self, what: str) -> None:
        if self.open is not None:
            raise InvalidArgument(
                f"job {self._job!r}: between step() and commit() there is no {what}; call "
                "session.commit() first"
            )
