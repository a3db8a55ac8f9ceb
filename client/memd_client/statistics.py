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
    leases_held: int  # alive at this moment
    # Of this process, for all leases together; the wait for the step before them included.
    lease_wait_seconds: float
    # What of it the daemon made leases wait, by what each waited for most: "disk", "update" of its
    # own shard, "step" (its arrival, or a commit), "gradient" (the step that has its slot), "room",
    # "writer". The rest is the way there and back.
    lease_wait_reason_seconds: dict[str, float]
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
