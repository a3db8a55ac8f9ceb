"""How many calls may hold a thread of the control plane at once, by kind of call and by caller."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Calls that hold their threads for the same reason."""

    what: str
    all_max: int
    caller_max: int  # less than all, so that one caller does not keep the others out
    advice: str


STEPS = Kind(
    what="steps, syncs and deletions",  # until their commit is durable
    all_max=64,
    caller_max=32,
    advice="wait for one to be committed",
)
STREAMS = Kind(
    what="streams",  # of tensor bytes, as fast as their clients are; checks; reflection
    all_max=16,
    caller_max=8,
    advice="end one first, or put and get in shared memory, which needs none",
)
SHORT_CALLS = Kind(  # everything else
    what="short calls", all_max=48, caller_max=32, advice="make fewer at once"
)
KINDS = (STEPS, STREAMS, SHORT_CALLS)


class Places:
    """Any thread may call it. A call is refused at once, never queued: what waits for a thread
    would wait for those that wait for clients."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._taken: Counter[Kind] = Counter()
        self._taken_by: Counter[tuple[Kind, Hashable]] = Counter()

    def count(self, kind: Kind) -> int:
        with self._lock:
            return self._taken[kind]

    @contextmanager
    def taken(self, kind: Kind, caller: Hashable) -> Iterator[None]:
        """Refused where there are too many already."""
        with self._lock:
            of_caller, of_all = self._taken_by[kind, caller], self._taken[kind]
            if of_caller >= kind.caller_max or of_all >= kind.all_max:
                raise Refused(
                    StatusCode.CAPACITY,
                    f"too many {kind.what} at once: this process has {of_caller} of at most "
                    f"{kind.caller_max} under way and the daemon {of_all} of at most "
                    f"{kind.all_max}; {kind.advice}, or try again",
                )
            self._taken[kind] += 1
            self._taken_by[kind, caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[kind] -= 1
                self._taken_by[kind, caller] -= 1
                if not self._taken_by[kind, caller]:
                    del self._taken_by[kind, caller]
