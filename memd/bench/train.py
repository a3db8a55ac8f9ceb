"""Training steps beside the least time that they can take: see `roofline`."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memd.bench.figures import Figure
from memd.bench.machine import file_system
from memd.bench.roofline import Bound, PartsAlone, StepMeasured, roofline, step_bound
from memd.refusal import StatusCode
from memd_native import IoBench, IoRate, StatusError, measure_adam, measure_hash
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from memd.demo.measured import MeasuredTraining, PlainRound
    from memd.demo.plan import Plan

_DTYPES = {"fp32": types_pb2.D_TYPE_FLOAT32, "bf16": types_pb2.D_TYPE_BFLOAT16}

# As `memd bench io` measures it by default: the disk's best, whatever memd makes of it.
_BLOCK_BYTES = 4 << 20
_DEPTH = 16
_FILE_BYTES = 1 << 30
_IO_SECONDS = 0.5

# More than the caches hold.
_ADAM_ELEMENTS_MAX = 16_000_000
_HASH_BYTES = 128 << 20

_WARM_STEPS = 2  # first touches, and moments that have no extent yet
_PLAIN_STEPS = 2  # counted in each round

# Parameters, moments, published parameters and two sets of gradients, as multiples of the state.
_RESIDENT_FRACTION = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    parameter_count: int
    dtype: str
    batch: int
    sequence: int
    cache_fraction: float
    resident: bool  # a pool that holds everything, in place of cache_fraction
    durability: str
    step_in_backward: bool
    step_count: int  # of each round
    round_count: int
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    step: StepMeasured
    parts: PartsAlone
    plain: PlainRound
    bound: Bound
    roofline: Bound


def steps_for(durability: str) -> int:
    """Steps of a round, where nobody says how many: what `every:k` writes at every k-th must be in
    their mean."""
    match = re.fullmatch(r"every:(\d+)", durability)
    return max(4, int(match[1])) if match else 4


def train_figures(
    settings: TrainSettings, *, observe: Callable[[int], None]
) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, and the settings as they came out. `observe` hears which round begins.

    Raises:
        DemoError, TextError: for what cannot be trained here.
    """
    from memd.demo.measured import measured_training
    from memd.demo.plan import check_memory

    plan = _plan(settings)
    check_memory(plan, verify=True)  # the twin takes as much as the demo's
    rounds: list[Round] = []
    with measured_training(
        plan,
        settings.folder,
        durability=settings.durability,
        step_in_backward=settings.step_in_backward,
        more_bytes=_FILE_BYTES,
    ) as (training, folder):
        disk = IoBench(str(folder), bytes=_FILE_BYTES)
        training.train(_WARM_STEPS)
        for number in range(settings.round_count):
            observe(number)
            rounds.append(_measure(settings, plan, training, disk))
        del disk  # its file goes with it, before the folder
    return _figures(settings, plan, rounds), _told(settings, plan)


def _plan(settings: TrainSettings) -> Plan:
    from dataclasses import replace
    from typing import cast

    from memd.demo.plan import make_plan
    from memd.demo.settings import DemoSettings, DTypeName

    plan = make_plan(
        DemoSettings(
            parameter_count=settings.parameter_count,
            step_count=settings.step_count,
            dtype=cast("DTypeName", settings.dtype),
            batch=settings.batch,
            sequence=settings.sequence,
            seed=0,
            cache_fraction=_RESIDENT_FRACTION if settings.resident else settings.cache_fraction,
            host_bytes=None,
            nvme_bytes=None,
            text=None,
            data=settings.folder,
            verify=False,
        )
    )
    if settings.durability == "step":
        return plan
    # Beside the state on disk there may be two later ones of what is streamed.
    return replace(plan, nvme_bytes=plan.nvme_bytes + plan.volume.state_bytes)


def _measure(
    settings: TrainSettings, plan: Plan, training: MeasuredTraining, disk: IoBench
) -> Round:
    trained = training.train(settings.step_count)
    step = StepMeasured(
        seconds=trained.seconds,
        read_bytes=trained.read_bytes,
        written_bytes=trained.written_bytes,
    )
    plain = training.train_in_memory(_PLAIN_STEPS)
    count = plan.shape.parameter_count
    elements = min(count, _ADAM_ELEMENTS_MAX)
    adam = measure_adam(
        dtype=_DTYPES[settings.dtype],
        element_count=elements,
        tensor_count=1,
        thread_count=1,
        round_count=1,
    )
    hashed = measure_hash(bytes=_HASH_BYTES, round_count=1)
    io = _transfers(disk, write_share=step.write_share)
    io_bytes = io.read_bytes + io.written_bytes
    parts = PartsAlone(
        compute_seconds=plain.compute_cpu_seconds,
        adam_seconds=adam.update_seconds[0] * count / elements,
        hash_seconds=hashed.hash_seconds[0] * step.moved_bytes / hashed.bytes,
        io_seconds=io.cpu_seconds * step.moved_bytes / io_bytes,
        backward_seconds=plain.backward_seconds,
        bytes_per_second=io_bytes / io.seconds,
    )
    core_count = _core_count()
    return Round(
        step=step,
        parts=parts,
        plain=plain,
        bound=step_bound(
            step,
            parts,
            core_count=core_count,
            state_bytes=plan.volume.state_bytes,
            cache_bytes=plan.pool.cache_bytes,
            in_backward=settings.step_in_backward,
        ),
        roofline=roofline(step, parts, core_count=core_count),
    )


def _transfers(disk: IoBench, *, write_share: float) -> IoRate:
    """io_uring alone, or memd's queue over threads where io_uring is forbidden."""
    try:
        return disk.raw(
            "mixed",
            block_bytes=_BLOCK_BYTES,
            depth=_DEPTH,
            seconds=_IO_SECONDS,
            write_share=write_share,
        )
    except StatusError as error:
        if error.code != StatusCode.UNAVAILABLE:
            raise
    return disk.through_queue(
        "mixed",
        block_bytes=_BLOCK_BYTES,
        depth=_DEPTH,
        seconds=_IO_SECONDS,
        write_share=write_share,
    )


def _core_count() -> int:
    return len(os.sched_getaffinity(0))


def _figures(settings: TrainSettings, plan: Plan, rounds: Sequence[Round]) -> list[Figure]:
    def seconds(name: str, runs: list[float], **limit: Any) -> Figure:
        return Figure(name=name, unit="s", runs=runs, less_is_better=True, **limit)

    def against(name: str, bounds: list[Bound]) -> Figure:
        return seconds(
            name,
            [each.step.seconds for each in rounds],
            limit_name=_most_common(bounds),
            limit_runs=[bound.seconds for bound in bounds],
        )

    figures = [against("step", [each.bound for each in rounds])]
    if not settings.step_in_backward:
        figures.append(against("step, against the roofline", [each.roofline for each in rounds]))
    figures += [
        seconds(
            "step, against plain PyTorch",
            [each.step.seconds for each in rounds],
            limit_name="fused AdamW in memory",
            limit_runs=[each.plain.seconds for each in rounds],
        ),
        *_moved(settings, plan, rounds),
        seconds("compute alone, CPU", [each.parts.compute_seconds for each in rounds]),
        seconds("Adam alone, CPU", [each.parts.adam_seconds for each in rounds]),
        seconds("checksums alone, CPU", [each.parts.hash_seconds for each in rounds]),
        seconds("I/O alone, CPU", [each.parts.io_seconds for each in rounds]),
        seconds("backward alone", [each.parts.backward_seconds for each in rounds]),
        Figure(
            name="disk, in the step's mix",
            unit="GB/s",
            runs=[each.parts.bytes_per_second / 1e9 for each in rounds],
        ),
    ]
    return figures


def _moved(settings: TrainSettings, plan: Plan, rounds: Sequence[Round]) -> list[Figure]:
    """Bytes a step, beside the state alone that has to move for this cache and durability."""
    state_bytes = plan.volume.state_bytes
    streamed_bytes = max(state_bytes - plan.pool.cache_bytes, 0)
    written_bytes = state_bytes if settings.durability == "step" else streamed_bytes
    return [
        Figure(
            name=name,
            unit="bytes",
            runs=runs,
            limit_name="state not cached" if needed_bytes else "",
            limit_runs=[float(needed_bytes)] * len(runs) if needed_bytes and min(runs) else [],
            less_is_better=True,
        )
        for name, runs, needed_bytes in (
            ("read a step", [each.step.read_bytes for each in rounds], streamed_bytes),
            (
                "written a step",
                [each.step.written_bytes for each in rounds],
                written_bytes,
            ),
        )
    ]


def _most_common(bounds: Sequence[Bound]) -> str:
    ((name, _),) = Counter(bound.name for bound in bounds).most_common(1)
    return name


def _told(settings: TrainSettings, plan: Plan) -> dict[str, Any]:
    return {
        "parameters": plan.shape.parameter_count,
        "dtype": settings.dtype,
        "batch": settings.batch,
        "sequence": settings.sequence,
        "cache": plan.pool.cache_bytes / plan.volume.state_bytes,
        "state_bytes": plan.volume.state_bytes,
        "cache_bytes": plan.pool.cache_bytes,
        "host_bytes": plan.host_bytes,
        "nvme_bytes": plan.nvme_bytes,
        "durability": settings.durability,
        "step_in_backward": settings.step_in_backward,
        "steps": settings.step_count,
        "rounds": settings.round_count,
        "cores": _core_count(),
        "file_system": file_system(settings.folder),
        "block_bytes": _BLOCK_BYTES,
        "depth": _DEPTH,
    }
