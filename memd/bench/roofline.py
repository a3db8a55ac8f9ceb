"""The least time that a training step can take on this machine, from parts measured alone.

The roofline is the larger of CPU work / cores and bytes / bandwidth: no step is faster than its
work on all cores, or than its bytes at the disk's full rate, however well the two overlap. It
counts CPU time, so that a part that waits for memory on all cores at once is taken at what one core
needs for it: a bound, not a forecast.

An ordinary step has a second bound. No update starts before backward has ended, and a parameter
that the next forward uses first may be updated first, but the state that is not cached must come
and go between two backwards' ends: backward alone, and twice what is not cached at the disk's rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasured:
    """Times of one step, means of a round."""

    seconds: float
    read_bytes: float
    written_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    @property
    def write_share(self) -> float:
        return self.written_bytes / self.moved_bytes if self.moved_bytes else 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsAlone:
    """The needs of one step, each part measured by itself in the same round; CPU seconds."""

    compute_seconds: float  # forward and backward in memory, all threads together
    adam_seconds: float
    hash_seconds: float  # of every byte that is read or written
    io_seconds: float
    backward_seconds: float  # from begin to end, with all threads
    bytes_per_second: float  # of reads and writes together, in the step's mix

    @property
    def cpu_seconds(self) -> float:
        return self.compute_seconds + self.adam_seconds + self.hash_seconds + self.io_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    name: str
    seconds: float


def roofline(step: StepMeasured, parts: PartsAlone, *, core_count: int) -> Bound:
    return max(
        Bound(name="roofline: CPU work / cores", seconds=parts.cpu_seconds / core_count),
        Bound(name="roofline: bytes / bandwidth", seconds=step.moved_bytes / parts.bytes_per_second)
        if step.moved_bytes
        else Bound(name="roofline: bytes / bandwidth", seconds=0.0),
        key=lambda bound: bound.seconds,
    )


def step_bound(
    step: StepMeasured,
    parts: PartsAlone,
    *,
    core_count: int,
    state_bytes: int,
    cache_bytes: int,
    in_backward: bool,
) -> Bound:
    """The bound of the step's time: the roofline, and without `step_in_backward` the larger of it
    and the bound of an ordinary step."""
    lowest = roofline(step, parts, core_count=core_count)
    streamed_bytes = max(state_bytes - cache_bytes, 0)
    if in_backward or not streamed_bytes:
        return lowest
    ordinary = Bound(
        name="backward + 2 (state - cache) / bandwidth",
        seconds=parts.backward_seconds + 2 * streamed_bytes / parts.bytes_per_second,
    )
    return max(lowest, ordinary, key=lambda bound: bound.seconds)
