"""Calls that all ranks of a job make together: each is carried out once, when the last rank has
made it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, Any

from memd.refusal import Refused, StatusCode
from memd_native import StatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memd.peers import Session
    from memd.service.call import Call
    from memd_native import RanksReport, Server

# How often a call that waits looks whether a rank has ended, and whether its caller waits still.
_LOOK_S = 0.2
_JOBS_MAX = 1024  # as many as a daemon has sessions at most
# Ranks make a call again that ended so.
_NO_OUTCOME = {StatusCode.DEADLINE, StatusCode.UNAVAILABLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """One rank's part in a call."""

    rank: int
    session_id: int
    what: str  # as in "has not closed its step"
    request: Any


@dataclass(slots=True, eq=False)
class _Gathered:
    """The parts of one call that have come."""

    calls: dict[int, RankCall] = field(default_factory=dict)
    is_begun: bool = False
    result: Any = None
    error: Exception | None = None
    is_over: bool = False

    @property
    def has_no_outcome(self) -> bool:
        """Nobody knows whether it is made, so it has to be carried out again."""
        return isinstance(self.error, Refused | StatusError) and self.error.code in _NO_OUTCOME

    def withdraw(self, call: RankCall) -> None:
        """Nobody waits for its answer. If its rank has called again, that call stays."""
        if not self.is_begun and self.calls.get(call.rank) is call:
            del self.calls[call.rank]


class RankCalls:
    """Gathers calls by their number. Any thread may call; each waits for the last one, whose thread
    carries the call out for all. The outcomes of the last two are kept: a rank that has not had its
    answer asks again. A call without an outcome is gathered anew when it is repeated.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._changed = Condition()
        self._jobs: dict[int, tuple[int, dict[int, _Gathered]]] = {}  # start, calls by number

    def together(
        self,
        session: Session,
        call: RankCall,
        number: int,
        *,
        waited: Call,
        carry_out: Callable[[Mapping[int, RankCall]], Any],
    ) -> Any:
        """The result of `carry_out`, of the calls of all ranks.

        Raises:
            Refused: a rank has not called in time, or calls for something else.
            StatusError: a rank has ended.
            Exception: what `carry_out` raises, to all of them.
        """
        deadline = time.monotonic() + waited.timeout_s()
        report = self._server.ranks(session.session_id)
        with self._changed:
            gathered = self._gathered(session.job_id, report, number)
            if not gathered.is_begun:
                gathered.calls[call.rank] = call
            is_last = not gathered.is_begun and len(gathered.calls) == len(report.names)
            gathered.is_begun |= is_last
        if is_last:
            self._carry_out(gathered, report, carry_out)
        else:
            self._wait(session, call, gathered, deadline, waited)
        if gathered.error is not None:
            raise gathered.error
        return gathered.result

    def _gathered(self, job_id: int, report: RanksReport, number: int) -> _Gathered:
        start, calls = self._jobs.get(job_id, (0, {}))
        if start != report.start:
            calls = {}
            self._jobs.pop(job_id, None)
            self._jobs[job_id] = report.start, calls
            # Jobs that are trained no longer: nobody asks for their last outcomes.
            for other in list(self._jobs)[:-_JOBS_MAX]:
                del self._jobs[other]
        if any(each > number + 1 for each in calls):
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"ranks count their calls: {number} comes after {max(calls)}",
            )
        for old in [each for each in calls if each + 2 <= number]:
            del calls[old]
        if number not in calls or calls[number].has_no_outcome:
            calls[number] = _Gathered()
        return calls[number]

    def _carry_out(
        self,
        gathered: _Gathered,
        report: RanksReport,
        carry_out: Callable[[Mapping[int, RankCall]], Any],
    ) -> None:
        try:
            _refuse_others(gathered.calls, report)
            gathered.result = carry_out(gathered.calls)
        except Exception as error:  # noqa: BLE001 # it is raised in each rank's call
            gathered.error = error
        finally:
            with self._changed:
                gathered.is_over = True
                gathered.calls = {}
                self._changed.notify_all()

    def _wait(
        self,
        session: Session,
        call: RankCall,
        gathered: _Gathered,
        deadline: float,
        waited: Call,
    ) -> None:
        while True:
            with self._changed:
                left_s = deadline - time.monotonic()
                self._changed.wait_for(lambda: gathered.is_over, min(_LOOK_S, max(left_s, 0)))
                if gathered.is_over:
                    return
                if time.monotonic() < deadline and not waited.is_waited_for():
                    gathered.withdraw(call)
                    raise Refused(StatusCode.UNAVAILABLE, "the caller has given up")
                is_begun, came = gathered.is_begun, set(gathered.calls)
            if is_begun:
                # It is carried out, whoever ends now.
                if time.monotonic() < deadline:
                    continue
                raise Refused(
                    StatusCode.DEADLINE,
                    f"job {session.job_name}: all ranks have {call.what}, and it is not done in "
                    "time",
                )
            try:
                report = self._server.ranks(session.session_id)
            except StatusError:
                with self._changed:
                    gathered.withdraw(call)
                raise
            if time.monotonic() >= deadline:
                with self._changed:
                    gathered.withdraw(call)
                raise Refused(StatusCode.DEADLINE, _overdue(session, call, came, report))


def _overdue(session: Session, call: RankCall, came: set[int], report: RanksReport) -> str:
    late = [name for rank, name in enumerate(report.names) if rank not in came]
    return (
        f"job {session.job_name}: {' and '.join(late)} {'has' if len(late) == 1 else 'have'} not "
        f"{call.what} in time"
    )


def _refuse_others(calls: Mapping[int, RankCall], report: RanksReport) -> None:
    """Ranks that run different loops would wait for each other for ever."""
    first = calls[0]
    for rank, other in sorted(calls.items()):
        if other.what != first.what:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"all ranks make the same calls in the same order: {report.names[0]} has "
                f"{first.what}, and {report.names[rank]} has {other.what}",
            )


def refuse_other_counts(calls: Mapping[int, RankCall], names: list[str]) -> None:
    """Before the sums of all ranks count.

    Raises:
        Refused: a rank has accumulated more backwards than another, or no rank has made the one
            that averages them.
    """
    first = calls[0].request.accumulated_count
    for rank, other in sorted(calls.items()):
        count = other.request.accumulated_count
        if count != first:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                "ranks accumulate the same number of backwards before each step: "
                f"{names[0]} has made {first} in no_sync(), and {names[rank]} {count}; no step is "
                "made of their gradients: call optimizer.zero_grad() on all ranks",
            )
    if first and all(each.request.is_without_backward for each in calls.values()):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"every backward since the last step ran in no_sync(), {first} on each rank, and none "
            "has averaged their gradients; make the last backward of each step, and its forward, "
            "outside: call optimizer.zero_grad() on all ranks, and begin the step again",
        )


def merged_step(calls: Mapping[int, RankCall], names: list[str]) -> Any:
    """The step of all ranks: the first one's, with the buffers of all.

    Raises:
        Refused: ranks update other shards, or with other settings.
    """
    merged = type(calls[0].request)()
    merged.CopyFrom(calls[0].request)
    for rank in range(1, len(calls)):
        other = calls[rank].request
        _refuse_other_step(merged, other, names[rank])
        merged.buffers.extend(other.buffers)
    return merged


def _refuse_other_step(first: Any, other: Any, name: str) -> None:
    def refuse(what: str, one: object, another: object) -> None:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"ranks make one step together, and {what} differ: {one} on rank 0, {another} on "
            f"{name}",
        )

    if first.step != other.step:
        refuse("step numbers", first.step, other.step)
    if len(first.groups) != len(other.groups):
        refuse("numbers of parameter groups", len(first.groups), len(other.groups))
    for one, another in zip(first.groups, other.groups, strict=True):
        for key in one.settings.DESCRIPTOR.fields_by_name:
            values = getattr(one.settings, key), getattr(another.settings, key)
            if values[0] != values[1]:
                refuse(f"values of {key}", *values)
        only = set(one.shard_ids) ^ set(another.shard_ids)
        if only:
            refuse(f"parameters (shard {min(only)})", len(one.shard_ids), len(another.shard_ids))
        # Ranks clip gradients, and load states, by place.
        for at, pair in enumerate(zip(one.shard_ids, another.shard_ids, strict=False)):
            if pair[0] != pair[1]:
                refuse(f"orders of parameters (place {at})", *(f"shard {each}" for each in pair))
        if len(one.shard_ids) != len(another.shard_ids):
            refuse("numbers of parameters", len(one.shard_ids), len(another.shard_ids))
