"""Updates that begin while backward runs, ahead of `step()`."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from memd_client.errors import InvalidArgument
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import GradientLeases

    Groups = list[session_pb2.StepGroup]


class EarlyUpdates:
    """Tells the daemon of one optimizer's settings and final gradients. These are hints: the daemon
    uses a speculative update if `step()` comes with the same settings and gradient, and makes it
    again otherwise. Any thread may report gradients.
    """

    def __init__(self, groups: Callable[[], Groups]) -> None:
        """`groups` returns the present settings of every parameter that may get a gradient."""
        self._groups = groups
        self._lock = Lock()
        self._is_due = True
        self._told: Groups = []
        self._told_epoch = -1  # the `return_count` of the daemon that was told

    def refuse_second(self, job: Job, shard: Shard) -> None:
        """Raises: a gradient would be added to one that is there."""
        raise InvalidArgument(
            f"job {job.name!r}: a second gradient of {shard.label!r} came before step(); with "
            "step_in_backward=True a parameter is updated with its first gradient, so gradients "
            "cannot be accumulated: call zero_grad() before you repeat a backward, checkpoint a "
            "module that is used several times with use_reentrant=False, or make the optimizer "
            "with step_in_backward=False"
        )

    def gradient_is_final(self, job: Job, shard: Shard, leases: GradientLeases) -> None:
        """The gradient is in memd, its lease has ended, and no other follows before the step."""
        with self._lock:
            if self._is_due or self._told_epoch != job.return_count:
                return_count = job.return_count
                groups = self._groups()
                if groups != self._told or self._told_epoch != return_count:
                    job.refuse_if_unusable()
                    job.control.expect_step(
                        session_pb2.ExpectStepRequest(session_id=job.session_id, groups=groups)
                    )
                self._told, self._told_epoch, self._is_due = groups, return_count, False
        leases.gradient_is_final(shard)

    def look_again(self) -> None:
        """The next gradient belongs to another step, whose settings may differ."""
        self._is_due = True
