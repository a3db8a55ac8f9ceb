"""Updates that begin while backward runs: what the daemon is told ahead of `step()`."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.job import Job
    from memd_client.leases import Leases
    from memd_client.shard import Shard
    from memd_proto.v1 import session_pb2

    Groups = list[session_pb2.StepGroup]


class EarlyUpdates:
    """Of one optimizer. Nothing of it decides what a step does: the daemon uses what it made early
    where `step()` comes with the same settings and gradients, and makes the rest again. Any thread
    may tell it of gradients.
    """

    def __init__(self, groups: Callable[[], Groups]) -> None:
        """`groups`: the settings as they are now, of every parameter that may get a gradient."""
        self._groups = groups
        self._lock = Lock()
        self._is_due = True
        self._said: Groups = []
        self._said_to = -1  # which daemon of the session, as return_count

    def refuse_second(self, job: Job, shard: Shard) -> None:
        """Before a gradient is added to one that is there."""
        raise InvalidArgument(
            f"job {job.name!r}: a second gradient of {shard.name!r} came before step(); with "
            "step_in_backward=True a parameter is updated with the first one, so gradients cannot "
            "be accumulated: call zero_grad() before a backward that is done again, checkpoint a "
            "module that is used several times with use_reentrant=False, or make the optimizer "
            "with step_in_backward=False"
        )

    def gradient_is_final(self, job: Job, shard: Shard, leases: Leases) -> None:
        """The gradient is in memd, its lease has ended, and no other comes before the step."""
        with self._lock:
            if self._is_due or self._said_to != job.return_count:
                return_count = job.return_count
                groups = self._groups()
                if groups != self._said or self._said_to != return_count:
                    job.expect_step(groups)
                self._said, self._said_to, self._is_due = groups, return_count, False
        leases.gradient_is_final(shard)

    def look_again(self) -> None:
        """The next gradient is of another step, whose settings may be others."""
        self._is_due = True
