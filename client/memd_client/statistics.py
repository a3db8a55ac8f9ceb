"""What a session has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStatistics:
    """Counters since `connect`; taken at one moment, changed by nothing."""

    job: str
    committed_step: int
    host_bytes: int  # admitted for the job
    nvme_bytes: int
    lease_count: int  # leases had so far
    lease_hits: int  # of them without a request: the shard was in memory, and nobody wrote it
    lease_resident_count: int  # of them, those that waited for nothing: `lease_hits` and more
    leases_held: int  # alive at this moment
    # Of this process, for all leases together; the wait for the step before them included.
    lease_wait_seconds: float
    # What the threads of this process stood still for, by what each wait was for most: "disk",
    # "update" of its own shard, "step" (its arrival, its answer, or a commit), "gradient" (the step
    # that has its slot), "room", "writer", and "ring", the way to the daemon and back.
    lease_wait_reason_seconds: dict[str, float]
    # The same by phase, "forward", "backward", "step" or "other", and by group of modules, such as
    # "h.*.attn": at most 23 and "other".
    stall_phase_seconds: dict[str, dict[str, float]]
    stall_group_seconds: dict[str, dict[str, float]]
    # From the end of the first step to that of the last, whatever was done there: what the waits of
    # one thread are a share of.
    step_wall_seconds: float
    parameter_count: int  # of living modules and optimizers
    step_count: int
    step_seconds: (
        float  # spent in Step calls: read + update + write + commit + the way there and back
    )
    step_read_seconds: float
    step_update_seconds: float
    step_write_seconds: float
    step_commit_seconds: float
    step_read_bytes: int
    step_written_bytes: int


def summed(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """By reason alone."""
    sums: dict[str, float] = {}
    for waits in parts.values():
        for reason, seconds in waits.items():
            sums[reason] = sums.get(reason, 0.0) + seconds
    return sums
