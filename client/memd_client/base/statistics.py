"""Counters of a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memd_proto.v1 import session_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStatistics:
    """Counters since `connect`, read at one moment."""

    job: str
    committed_step: int
    host_bytes: int  # the job's quota
    nvme_bytes: int
    lease_count: int  # leases granted
    lease_hits: int  # of these, without a request: in memory, and nobody was writing
    lease_resident_count: int  # of these, without a wait: the hits, and requests for what was there
    leases_held: int  # alive now
    activation_bytes: int  # in memd now, of what autograd has saved, and the most at a time
    activation_bytes_max: int
    registered_bytes: int  # host memory that a device's driver has registered for copies
    registration_refusals: int  # how often it has refused: such copies are slower
    # How often threads of the trainer have waited for a device, in this process: for a "resize" of
    # the memory of parameters, the "write" of a value, the "comparison" of a view that was kept,
    # or of a parameter that stays there and its gradient, a "gradient" that was leaving, or "room"
    # in host memory.
    waited_for: dict[str, int]
    # All leases of this process together, waits for the step before them included.
    lease_wait_seconds: float
    # How long threads of this process stood still, by the main cause of each wait: "disk", "update"
    # (of the shard itself), "step" (its arrival, its answer, or a commit), "gradient" (the step
    # that still has the slot), "room", "writer", and "ring" (the way to the daemon and back).
    lease_wait_reason_seconds: dict[str, float]
    # The same by phase ("forward", "backward", "step", "other") and by group of modules, such as
    # "h.*.attn": at most 23 groups and "other".
    stall_phase_seconds: dict[str, dict[str, float]]
    stall_group_seconds: dict[str, dict[str, float]]
    # From the end of the first step to the end of the last: the total that one thread's waits are
    # compared with.
    step_wall_seconds: float
    parameter_count: int  # in modules and optimizers that still exist
    step_count: int
    # Duration of Step calls: read + update + write + commit + the way to the daemon and back.
    step_seconds: float
    step_read_seconds: float
    step_update_seconds: float
    step_write_seconds: float
    step_commit_seconds: float
    step_read_bytes: int
    step_written_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """Sums over the steps that a session has committed."""

    count: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0
    update_seconds: float = 0.0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0

    def plus(self, answer: session_pb2.StepResponse, seconds: float) -> StepTotals:
        """With one more step, whose call took `seconds`."""
        return StepTotals(
            count=self.count + 1,
            seconds=self.seconds + seconds,
            read_seconds=self.read_seconds + answer.read_seconds,
            update_seconds=self.update_seconds + answer.update_seconds,
            write_seconds=self.write_seconds + answer.write_seconds,
            commit_seconds=self.commit_seconds + answer.commit_seconds,
            read_bytes=self.read_bytes + answer.read_bytes,
            written_bytes=self.written_bytes + answer.written_bytes,
        )


def summed(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Seconds by reason, over all parts."""
    sums: dict[str, float] = {}
    for waits in parts.values():
        for reason, seconds in waits.items():
            sums[reason] = sums.get(reason, 0.0) + seconds
    return sums
