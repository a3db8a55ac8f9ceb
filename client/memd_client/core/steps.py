"""The steps of one session: those that are open, and the step in flight.

A step is *open* from the first `optimizer.step()` until it is closed, *in flight* from then until
its answer has arrived, and *settled* after that. Each backward in which `step()` is called has an
open step of its own until it ends.
"""

from __future__ import annotations

import atexit
import logging
import time
from functools import partial
from threading import RLock, get_ident
from typing import TYPE_CHECKING
from weakref import ref

from memd_client.base.process import OwnProcess
from memd_client.base.statistics import StepTotals
from memd_client.core.comparisons import compare_together
from memd_client.core.open_steps import OpenStep, OpenSteps
from memd_client.core.step_in_flight import (
    Finishing,
    Outcome,
    StepInFlight,
    bring_ahead,
    end_finishing,
    finish,
    refused,
    take_back,
)
from memd_client.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    MemdError,
    NotDurable,
    PermissionDenied,
    SessionFenced,
    UnknownName,
    retold,
)
from memd_native import STALL_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.core.open_steps import SealedTarget
    from memd_proto.v1 import session_pb2

_log = logging.getLogger("memd_client")
# They leave the step's outcome unknown. The last two mean that the next daemon does not know this
# process, or not yet.
_NO_ANSWERS = (DaemonUnavailable, DeadlineExceeded, PermissionDenied, UnknownName)


def _undo(targets: Iterable[SealedTarget]) -> None:
    for target in targets:
        target.undo()


class Steps:
    """Seals, sends and settles the steps of one session, at most one of them in flight. Counts what
    was committed. Any thread may call.

    Steps travel over gRPC and leases through shared memory, so a lease could overtake the step
    before it and show old values. Each request in the ring therefore names the call of the step
    that it follows. The daemon delays it until it has that step, and then only until the shard's
    own update is done.

    Locks are taken in this order: the turn of `transaction.Transaction`; then the locks of
    parameters and gradients (`hold_still`), several of them only with the turn or in the order of
    `Residency.lock_order`; then the lock of this class, under which none of the others is taken. A
    lease that is requested under its parameter's lock may have to settle. New values are put in
    place without a lock, since their leases may wait for those of a thread that settles too.
    """

    def __init__(
        self, *, job: str, committed_step: int, durable_step: int, leases: Leases | None
    ) -> None:
        self._job = job
        self._committed_step = committed_step
        self._durable_step = durable_step
        self._disk_error = ""
        self._totals = StepTotals()
        self._lease_wait_seconds = 0.0
        # Weak: leases hold the steps.
        self._leases = ref(leases) if leases is not None else None
        self._open = OpenSteps(job)
        self._is_sealing = False
        self._in_flight: StepInFlight | None = None
        self._call_count = 0
        # Shards of the last step, if an error was raised for it though it may be committed.
        self._raised: set[int] = set()
        self._was_asked_again = False
        self._lock = RLock()
        self._process = OwnProcess()

    @property
    def committed_step(self) -> int:
        """How many steps the job has committed, the step in flight not counted."""
        return self._committed_step

    @property
    def durable_step(self) -> int:
        return self._durable_step

    @property
    def disk_error(self) -> str:
        """Why the last step that had to be on disk is not there; empty if it is."""
        return self._disk_error

    @property
    def totals(self) -> StepTotals:
        return self._totals

    @property
    def lease_wait_seconds(self) -> float:
        """How long leases have waited for the step before them."""
        return self._lease_wait_seconds

    @property
    def open(self) -> OpenSteps:
        return self._open

    @property
    def is_open(self) -> bool:
        """Gradients are sealed, or are being sealed, and the step is not closed."""
        return self._is_sealing or self._open.exist

    @property
    def is_in_flight(self) -> bool:
        """A step was sent and is not settled."""
        return self._in_flight is not None

    def seal(
        self,
        groups: Sequence[session_pb2.StepGroup],
        targets: Sequence[SealedTarget],
        into: OpenStep | None = None,
    ) -> OpenStep:
        """Adds all of `targets` to `into`, the open step of a backward, or to the open step; or
        none of them. The caller has the turn, and holds the targets still."""
        with self._lock:
            for target in targets:
                self._open.refuse_if_sealed(target.shard, "a second step()")
                target.refuse_if_in_use()
            compare_together(each for target in targets for each in target.compare())
            sealed: list[SealedTarget] = []
            # First: who copies values ahead must not take one for new that a target has sealed.
            self._is_sealing = True
            try:
                for target in targets:
                    target.seal()
                    sealed.append(target)
                self._raised, self._was_asked_again = set(), False
                return self._open.add(groups, targets, into)
            except BaseException:
                _undo(sealed)
                raise
            finally:
                self._is_sealing = False

    def send(
        self, number: int, call: Callable[[int], StepCall], step: OpenStep | None = None
    ) -> None:
        """Sends an open step, or an empty one. If this raises, the step is open as before. `call`
        gets a number that no other call of the session has."""
        with self._lock:
            self._call_count += 1
            leases = self._leases() if self._leases is not None else None
            begin = partial(call, self._call_count)
            sent = begin() if leases is None else leases.devices.begin_step(begin)
            step = step or OpenStep()
            self._raised, self._was_asked_again = set(), False
            self._in_flight = StepInFlight(number, sent, step, list(step.targets.values()))
            # Only once it is sent: otherwise another thread's lease could wait for a call that
            # never arrives. Until then the step is open, and nobody leases what is sealed.
            self._follow(self._call_count)
            self._open.forget(step)
            # Handlers run in reverse order: this one before a private daemon is stopped.
            atexit.register(self._settle_at_exit)

    def drop(self, step: OpenStep) -> None:
        """Gives the gradients of an open step back to their parameters."""
        with self._lock:
            self._open.forget(step)
            _undo(step.targets.values())

    def drop_open(self) -> int:
        """`drop` of all that are open; returns how many gradients."""
        with self._lock:
            dropped = self._open.all
            for step in dropped:
                self.drop(step)
            return sum(len(step.targets) for step in dropped)

    def settle(
        self, shard: Shard | None = None, reason: int = STALL_STEP, *, for_lease: bool = False
    ) -> OpenStep | None:
        """Waits for the step in flight, and puts new values that stay in this process in place,
        which a lease leaves to another thread that has begun. Returns the step if an earlier call
        has raised for it and it is committed after all. The wait is counted under `shard` and
        `reason`.

        Raises:
            DaemonUnavailable, DeadlineExceeded: no answer, so the daemon may have made the step. It
                stays in flight, and the next call asks again.
            MemdError: it was not committed. The job is at the step before, and gradients are as
                they were. Or it was, and a new value could not be put in place; the next call goes
                on with that.
            NotDurable: it is committed in memory and should be on disk. Raised once, until a step
                reaches the disk again.
        """
        if not self.is_in_flight:
            return None
        began = time.perf_counter()
        while True:
            with self._lock:
                step = self._in_flight
                if step is None:  # another thread has settled it while this one waited
                    self._note_stall(shard, reason, began)
                    return None
                finishing = step.finishing
                is_own = finishing is not None and finishing.thread == get_ident()
                # A lease does not wait for values that another thread brings ahead of the answer.
                asks = step.outcome is Outcome.UNKNOWN and (
                    finishing is None or for_lease or is_own
                )
                cause = self._wait_for_answer(step, shard, reason, began) if asks else None
                if finishing is None and self._in_flight is step:
                    step.finishing = Finishing()
                    break
                if cause is not None:
                    raise refused(step) from cause
            # A target that is being finished takes a lease, which must not wait for itself.
            if for_lease or is_own:
                return None
            assert finishing is not None
            finishing.is_over.wait()
        if step.outcome is Outcome.COMMITTED:
            return self._finish(step)
        self._take_back(step)
        if cause is not None:
            raise refused(step) from cause
        return None

    def settle_ahead(self) -> None:
        """As `settle`, for the thread that has sent a step, and at once. New values that stay on a
        device come each when it is updated, while the daemon updates the rest. If the step is not
        made they are taken back; if that is not known, a use of them asks again.
        """
        with self._lock:
            step = self._in_flight
            targets = step.unfinished if step is not None and step.finishing is None else ()
            if step is not None and any(target.comes_ahead for target in targets):
                step.finishing = Finishing()
            else:
                step = None
        if step is not None:
            self._bring_ahead(step)
        self.settle()
        if step is not None and step.outcome is Outcome.REFUSED:
            raise refused(step)  # another thread has heard of it first

    def _bring_ahead(self, step: StepInFlight) -> None:
        try:
            bring_ahead(step)
        except _NO_ANSWERS:
            if step.was_raised:  # the lease has asked for the answer
                raise
        except MemdError as error:
            # The answer tells why, or the value comes behind it.
            _log.debug("job %r: a value waits for the answer: %s", self._job, error)
        except BaseException:
            with self._lock:
                self._note_raised(step)
            raise
        finally:
            end_finishing(step)

    def _wait_for_answer(
        self, step: StepInFlight, shard: Shard | None, reason: int, began: float
    ) -> MemdError | None:
        """Returns when the outcome is known: if it was not made, why. Then there is no step in
        flight, unless something of it is in place.
        """
        try:
            try:
                response = step.call.result()
            finally:
                self._note_stall(shard, reason, began)
            self._count(step, response)
        except MemdError as error:
            if isinstance(error, _NO_ANSWERS):
                raise self._failed(step, error) from error
            self._failed(step, error)
            return error
        except BaseException:
            self._note_raised(step)
            raise
        return None

    def _count(self, step: StepInFlight, response: session_pb2.StepResponse) -> None:
        self._committed_step = step.number
        self._durable_step = response.durable_step
        self._totals = self._totals.plus(response, step.call.seconds())
        step.disk_error = response.disk_error
        step.durable_step = response.durable_step
        step.outcome = Outcome.COMMITTED
        # Another daemon, that leases of its values may come to, has the step and knows no call.
        self._follow(0)

    def _take_back(self, step: StepInFlight) -> None:
        """Without the lock, as `_finish`."""
        try:
            take_back(step)
            with self._lock:
                self._forget_in_flight()
        except MemdError as error:
            raise retold(
                error,
                f"{step.refusal}; the values from before it are not back in place yet for "
                f"{len(step.ahead)} of the parameters that stay on a device; the next use of the "
                f"session goes on with them: {error}",
            ) from error
        finally:
            end_finishing(step)

    def _finish(self, step: StepInFlight) -> OpenStep | None:
        """Without the lock: a lease here may wait for one of a thread that settles too."""
        try:
            finish(step)
            with self._lock:
                self._forget_in_flight()
                # Together: the next step of another thread must not be taken for this one.
                was_on_disk, self._disk_error = not self._disk_error, step.disk_error
                if self._disk_error and was_on_disk:
                    self._note_raised(step)
        except MemdError as error:
            with self._lock:
                raise self._failed(step, error) from error
        except BaseException:
            with self._lock:
                self._note_raised(step)
            raise
        finally:
            end_finishing(step)
        if step.disk_error and was_on_disk:
            raise NotDurable(
                f"job {self._job!r}: step {step.number} is committed in memory, so go on with the "
                f"next; step {step.durable_step} is on disk: {step.disk_error}"
            )
        return step.step if step.was_raised else None

    def note_sync(self, durable_step: int) -> None:
        """The disk has everything. `committed_step` does not move: if another session has gone on,
        the daemon must refuse this one's next step, which would build on state it has not seen."""
        self._disk_error = ""
        self._durable_step = durable_step

    def is_asked_again(self, targets: Sequence[SealedTarget]) -> bool:
        """Whether a step over `targets`, which are settled, `would_repeat`. True once."""
        with self._lock:
            again = self.would_repeat(targets)
            if again:
                self._raised -= {target.shard.shard_id for target in targets}
            self._was_asked_again = again
            return again

    def would_repeat(self, targets: Sequence[SealedTarget]) -> bool:
        """Whether a step over `targets`, which have gradients, repeats the last one: an error was
        raised for that, and they hold only the gradients that it took."""
        with self._lock:
            shard_ids = {target.shard.shard_id for target in targets}
            return (
                self.may_be_repeated
                and shard_ids <= self._raised
                and all(target.has_sealed_gradient for target in targets)
            )

    @property
    def may_be_repeated(self) -> bool:
        """An error was raised for the last step, so the caller may call `step()` again for it."""
        return bool(self._raised)

    def take_asked_again(self) -> bool:
        """Whether nothing came after a step that `is_asked_again`, or after `expect_again`. True
        once."""
        with self._lock:
            again, self._was_asked_again = self._was_asked_again, False
            return again and self._open.step is None

    def expect_again(self) -> None:
        """An error was raised for a commit that is made: the caller may repeat it."""
        self._was_asked_again = True

    def give_up(self) -> None:
        """The session ends: nobody will ask for the outcome of the step in flight."""
        with self._lock:
            self._forget_in_flight()

    def _failed(self, step: StepInFlight, error: MemdError) -> MemdError:
        """The error for the caller of `settle`: there was no answer, the answer was `error`, or the
        step could not be finished."""
        what = f"job {self._job!r}: step {step.number}"
        if step.outcome is Outcome.COMMITTED:
            self._note_raised(step)
            return retold(
                error,
                f"{what} is committed; new values are not in place yet for {len(step.unfinished)} "
                "of the parameters that stay in this process; the next use of the session goes on "
                f"with them: {error}",
            )
        if isinstance(error, _NO_ANSWERS):
            self._note_raised(step)
            return retold(
                error,
                f"{what}: it is not known whether it is committed; the next use of the session "
                "asks again, and after connecting again session.committed_step tells: "
                f"{error}",
            )
        targets = step.step.targets.values()
        outcome = "committed, its gradients are as they were"
        if any(each.is_delayed and not each.has_sealed_gradient for each in targets):
            outcome = (
                "committed, and its gradients are gone, as its update was delayed; go on with the "
                "next batch, without that update, or connect again and resume before that step"
            )
        if isinstance(error, SessionFenced):
            # The gradients are lost with the session; the error tells where the job stands.
            outcome = "acknowledged"
        step.outcome = Outcome.REFUSED
        step.refusal = retold(error, f"{what} was not {outcome}: {error}")
        self._follow(0)
        self._raised = set()
        _undo(targets)
        if not step.ahead:
            self._forget_in_flight()
        return step.refusal

    def _learned_late(self) -> MemdError:
        return MemdError(
            f"job {self._job!r}: step {self._committed_step}, for which an error was raised "
            "before, is committed, and the new values of parameters that stay in this process are "
            "all in place only now; what was computed since that error is out of date: call "
            "zero_grad(), and go on with the next batch"
        )

    def _note_raised(self, step: StepInFlight) -> None:
        step.was_raised = True
        self._raised = set(step.step.targets)

    def _forget_in_flight(self) -> None:
        self._in_flight = None
        self._follow(0)
        atexit.unregister(self._settle_at_exit)

    def _settle_at_exit(self) -> None:
        """A process that exits normally completes its step: the request may not even have left
        it."""
        if self._process.is_another:
            return
        try:
            self.settle()
        except MemdError as error:
            _log.error("%s", error)

    def settle_for(self, shard: Shard) -> None:
        """Before a lease of a parameter: settles the step in flight if its answer has arrived, and
        raises if the open step updates the parameter.
        """
        if self._open.exist:
            self._open.refuse_if_sealed(shard, "its use")
        if self._in_flight is not None:
            self.settle_answered()

    def settle_answered(self) -> bool:
        """Settles the step in flight if its answer has arrived, or if it has to be sent again.
        Returns whether a step is still on its way: not one that is committed, since a lease could
        wait for it for ever."""
        step = self._in_flight
        if step is not None and step.call.done():
            self.settle_for_lease()
        step = self._in_flight
        return step is not None and step.outcome is Outcome.UNKNOWN

    def settle_for_lease(self, shard: Shard | None = None, reason: int = STALL_STEP) -> None:
        """As `settle`; counts as a wait for leases.

        Raises:
            MemdError: also once if values that stay in this process are new since then, and an
                earlier call has raised for that step. Its caller went on with the old ones.
        """
        if self._in_flight is not None:
            began = time.perf_counter()
            try:
                late = self.settle(shard, reason, for_lease=True)
            finally:
                self._lease_wait_seconds += time.perf_counter() - began
            self.refuse_late(late)

    def refuse_late(self, late: OpenStep | None) -> None:
        """`late`: what `settle` has returned to a caller that takes no gradients.

        Raises:
            MemdError: values that stay in this process are new since then. Whoever learns of the
                step says so, once: nobody else will know that gradients may be out of date.
        """
        if late is not None and any(target.stays for target in late.targets.values()):
            raise self._learned_late()

    def note_unreachable(self, error: DaemonUnavailable) -> None:
        """A lease has waited for a daemon as long as it may. Raises if a step is in flight, whose
        outcome is unknown now; waits for nothing."""
        if not self._lock.acquire(blocking=False):
            return  # another thread waits for the answer, and reports it
        try:
            step = self._in_flight
            if step is not None and step.outcome is Outcome.UNKNOWN:
                raise self._failed(step, error) from error
        finally:
            self._lock.release()

    def _follow(self, call: int) -> None:
        """Leases from now on come after this call; 0: after none."""
        leases = self._leases() if self._leases is not None else None
        if leases is not None:
            leases.follow(call)

    def note_period(self, wall_seconds: float) -> None:
        """Counts the time from the end of one step to that of the next."""
        leases = self._leases() if self._leases is not None else None
        if leases is not None:
            leases.note_step(wall_seconds)

    def _note_stall(self, shard: Shard | None, reason: int, began: float) -> None:
        leases = self._leases() if self._leases is not None else None
        if leases is not None:
            leases.note_stall(shard, reason, time.perf_counter() - began)
