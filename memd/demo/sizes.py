"""A model's needs in memory and on disk. Each size is a sum with a name for every term."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields

from memd.demo.model import PARAMETER_COUNT_MAX, PARAMETER_COUNT_MIN
from memd.demo.quantities import format_count
from memd.sizes import format_size

# Per parameter, in fp32: value 4, moments 4 + 4. In bf16: half 2, remainder 2, moments 4 + 4.
STATE_BYTES = 12

# native/store/cache/job_memory.h: kPrivateFloorBytes is two tiles, each with state and gradient.
TILE_ELEMENTS = 256 * 1024
GRADIENT_BYTES_MAX = 4

# In a trainer: client and gRPC, small parameters, operators' own memory.
TRAINER_MARGIN_BYTES = 64 * 2**20

SEGMENT_BYTES = 64 * 2**20  # native/arena/pool.h: segment_bytes_for of a large pool
SEGMENT_COUNT_MIN = 16  # and of a small one: a sixteenth


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Fields are the terms, in bytes."""

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, term.name) for term in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPool(Sum):
    gradient_bytes: int  # every gradient, in its own dtype, from backward until its commit
    cache_bytes: int  # the part of parameters and states that may stay
    module_bytes: int  # the largest module in use, and the next one on its way in
    tile_bytes: int  # one tile is updated while another is read or written
    segment_bytes: int  # the job's two sides each end in a segment that is only partly filled


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume(Sum):
    state_bytes: int  # the last commit
    next_state_bytes: int  # the commit being written: extents are never overwritten in place
    gradient_bytes: int  # where the pool can't hold them they spill
    margin_bytes: int  # catalogue, superblocks, extents rounded up to whole blocks, gaps


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer(Sum):
    """Anonymous memory beyond that of an interpreter with torch imported. Nothing of it but the
    activations is more for a deeper model."""

    module_bytes: int  # the largest module, if it is built or changed
    gradient_bytes: int  # its gradient, until memd has it
    activation_bytes: int
    gap_bytes: int  # between activations that live, which glibc keeps
    margin_bytes: int


def trainer(*, module_elements_max: int, element_bytes: int, activation_bytes: int) -> Trainer:
    return Trainer(
        module_bytes=module_elements_max * element_bytes,
        gradient_bytes=module_elements_max * element_bytes,
        activation_bytes=activation_bytes,
        gap_bytes=activation_bytes // 4,
        margin_bytes=TRAINER_MARGIN_BYTES,
    )


def host_pool(
    parameter_count: int,
    *,
    gradient_element_bytes: int,
    cache_fraction: float,
    module_elements_max: int,
) -> HostPool:
    gradient_bytes = parameter_count * gradient_element_bytes
    cache_bytes = int(parameter_count * STATE_BYTES * cache_fraction)
    module_bytes = 2 * module_elements_max * gradient_element_bytes
    tile_bytes = 2 * TILE_ELEMENTS * (STATE_BYTES + GRADIENT_BYTES_MAX)
    needed_bytes = gradient_bytes + cache_bytes + module_bytes + tile_bytes
    return HostPool(
        gradient_bytes=gradient_bytes,
        cache_bytes=cache_bytes,
        module_bytes=module_bytes,
        tile_bytes=tile_bytes,
        segment_bytes=2 * min(SEGMENT_BYTES, needed_bytes // SEGMENT_COUNT_MIN),
    )


def volume(parameter_count: int, *, gradient_element_bytes: int) -> Volume:
    state_bytes = parameter_count * STATE_BYTES
    return Volume(
        state_bytes=state_bytes,
        next_state_bytes=state_bytes,
        gradient_bytes=parameter_count * gradient_element_bytes,
        margin_bytes=64 * 2**20 + state_bytes // 16,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestModel:
    """The largest model that one machine could train this way, and which of the two limits it."""

    parameters_by_disk: int
    parameters_by_memory: int
    formula: str

    @property
    def parameter_count(self) -> int:
        return min(self.parameters_by_disk, self.parameters_by_memory)


def largest_model(
    *,
    disk_bytes_free: int,
    memory_bytes_available: int,
    gradient_element_bytes: int,
    trainer_bytes: Callable[[int], int],
) -> LargestModel:
    """Gradients stay in memory and everything else streams from disk. `trainer_bytes` is what the
    trainer of a model with so many parameters takes. What does not grow with the model
    (interpreter, window of modules) is small beside 1 GiB."""
    disk_bytes_each = 2 * STATE_BYTES + STATE_BYTES / 16 + gradient_element_bytes
    memory_bytes_left = max(memory_bytes_available - 2**30, 0)
    counts = range(PARAMETER_COUNT_MIN, PARAMETER_COUNT_MAX + 1)
    fitting_count = bisect_right(
        counts,
        memory_bytes_left,
        key=lambda count: count * gradient_element_bytes + trainer_bytes(count),
    )
    by_memory = counts[fitting_count - 1] if fitting_count else 0
    return LargestModel(
        parameters_by_disk=int(disk_bytes_free / disk_bytes_each),
        parameters_by_memory=by_memory,
        formula=(
            f"the smaller of {format_size(disk_bytes_free)} free on disk / {disk_bytes_each:g} B "
            f"(states twice, margin, gradients) and {format_count(by_memory)}, whose gradients "
            f"({gradient_element_bytes} B each), activations and largest module take "
            f"{format_size(memory_bytes_available)} available memory - 1 GiB"
        ),
    )
