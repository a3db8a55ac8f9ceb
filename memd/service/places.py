"""How many calls may hold a thread of the control plane at once, by kind of call and by whose it
is."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from memd.refusal import Quota, Refused, StatusCode
from memd_native import RANKS_MAX

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Calls that hold their threads for the same reason."""

    what: str
    all_max: int
    # Each less than the one before it, so that no user keeps other users out, and no job or process
    # other jobs of its user: most nodes have one user.
    user_max: int
    job_max: int
    caller_max: int
    advice: str


STEPS = Kind(
    what="steps, syncs, snapshots and deletions",  # until their commit is durable
    all_max=64,
    user_max=48,
    job_max=24,
    caller_max=16,
    advice="wait for one to be committed",
)
# The call that carries such a call out waits for the commit as one step, and has a place of STEPS
# then.
RANKS = Kind(
    what="calls of ranks",  # until the last rank has made its own
    all_max=256,
    user_max=192,
    # Those of all ranks, and of each one that it repeats before the daemon knows that it is lost.
    job_max=2 * RANKS_MAX,
    caller_max=8,
    advice="wait for one to be answered",
)
STREAMS = Kind(
    what="streams",  # of tensor bytes, as fast as their clients are; checks; reflection
    all_max=32,
    user_max=24,
    job_max=12,
    caller_max=8,
    advice="end one first, or put and get in shared memory, which needs none",
)
SHORT_CALLS = Kind(  # everything else
    what="short calls",
    all_max=64,
    user_max=48,
    job_max=32,
    caller_max=24,
    advice="make fewer at once",
)
# A place is free when any of the calls that hold them ends.
_RETRY_AFTER_S = 1.0
_SHOWN = {
    "process": "this process",
    "job": "this job",
    "user": "this user",
    "daemon": "the daemon",
}
KINDS = (STEPS, RANKS, STREAMS, SHORT_CALLS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The caller, user and job that a call counts against. A field is None if it is not known; the
    call then counts against the limit of all calls only."""

    caller: Hashable
    user: int | str | None = None
    job: int | None = None


class Places:
    """Any thread may call it. A call is refused at once, never queued: what waits for a thread
    would wait for those that wait for clients."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._taken: Counter[tuple[Kind, str, Hashable]] = Counter()

    def count(self, kind: Kind) -> int:
        with self._lock:
            return self._taken[kind, "daemon", None]

    @contextmanager
    def taken(self, kind: Kind, holder: Holder) -> Iterator[None]:
        """Refused where there are too many already."""
        limits = [("process", holder.caller, kind.caller_max)]
        if holder.job is not None:
            limits.append(("job", holder.job, kind.job_max))
        if holder.user is not None:
            limits.append(("user", holder.user, kind.user_max))
        limits.append(("daemon", None, kind.all_max))
        with self._lock:
            for who, whose, most in limits:
                if (count := self._taken[kind, who, whose]) >= most:
                    raise Refused(
                        StatusCode.CAPACITY,
                        f"too many {kind.what} at once: {_SHOWN[who]} has {count} of at most "
                        f"{most} under way; {kind.advice}, or try again",
                        quota=Quota(holder=who, what=f"{kind.what} at once", most=most),
                        retry_after_s=_RETRY_AFTER_S,
                    )
            for who, whose, _ in limits:
                self._taken[kind, who, whose] += 1
        try:
            yield
        finally:
            with self._lock:
                for who, whose, _ in limits:
                    self._taken[kind, who, whose] -= 1
                    if not self._taken[kind, who, whose]:
                        del self._taken[kind, who, whose]
