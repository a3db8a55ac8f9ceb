"""`memd bench io`, `adam`, `hash`, `lease`, `train` and `device`."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memd import calibration
from memd.bench.adam import adam_figures
from memd.bench.figures import HEADER, Figure, row
from memd.bench.hash import hash_figures
from memd.bench.io import io_figures
from memd.bench.machine import describe_machine, file_system
from memd.demo.quantities import CountParameter, FractionParameter, IntegerParameter
from memd.printing import print_json, print_table
from memd.sizes import format_size, parse_size
from memd.volumes import progress_bar
from memd_native import StatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)")
_DURABILITY = re.compile(r"step|none|every:[1-9]\d*")
_FACTORS = {"": 1, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


class Size(IntegerParameter):
    name = "size"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


class Count(IntegerParameter):
    """ "100M": how many elements."""

    name = "count"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = _COUNT.fullmatch(value)
        count = int(float(match[1]) * _FACTORS[match[2]]) if match else 0
        if count < 1:
            self.fail(f"{value!r} is no count; write such as 100M", parameter, context)
        return count


def common(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs."),
        click.option(
            "--rounds",
            type=click.IntRange(1, 1000),
            default=5,
            show_default=True,
            help="Figure and limit in turn, so many times.",
        ),
    ):
        command = option(command)
    return command


@click.group(name="bench")
def command() -> None:
    """This machine's figures, each beside its limit, measured in the same run.

    Measure with nothing else running: a figure is the median of its rounds, and what it reached is
    the median of the ratios of neighbours.
    """


@command.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=Path(),
    help="A folder on the disk to measure; here, by default. A file is written there and removed.",
)
@click.option("--size", type=Size(), default="2GiB", show_default=True, help="Of the file.")
@click.option("--block", type=Size(), default="4MiB", show_default=True, help="Of a request.")
@click.option(
    "--depth",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600),
    default=2.0,
    show_default=True,
    help="Of each run.",
)
@click.option(
    "--calibrate",
    "calibrates",
    is_flag=True,
    help="Finds the depth and chunk size that a daemon of this --data uses from its next start on, "
    "in less than 20 seconds. Of the other options only --json counts.",
)
@common
def io(
    as_json: bool,
    block: int,
    calibrates: bool,
    data: Path,
    depth: int,
    rounds: int,
    seconds: float,
    size: int,
) -> None:
    """Reads and writes of a file of random bytes, through memd's queue and by io_uring alone."""
    if calibrates:
        calibrate(data, as_json=as_json)
        return
    show(
        io_figures(data, size=size, block=block, depth=depth, seconds=seconds, rounds=rounds),
        as_json=as_json,
        settings={
            "folder": str(data.resolve()),
            "file_system": file_system(data),
            "file_bytes": size,
            "block_bytes": block,
            "depth": depth,
            "seconds": seconds,
        },
    )


def calibrate(folder: Path, *, as_json: bool) -> None:
    machine = describe_machine()
    try:
        with progress_bar("calibrating", shows_rate=False) as progress:
            found = calibration.measure(folder, progress=progress)
    except StatusError as error:
        raise click.ClickException(str(error)) from error
    kept = calibration.keep(folder, found)
    if as_json:
        print_json(
            {
                "machine": machine,
                "file": str(kept),
                **asdict(found.limits),
                "seconds": found.seconds,
                "points": [asdict(point) for point in found.points],
            }
        )
        return
    print_table(
        ("depth", "chunk", "in flight", *(f"{mix}, GB/s" for mix in calibration.MIXES), "reached"),
        [
            (
                str(point.limits.depth),
                format_size(point.limits.chunk_bytes),
                format_size(point.limits.depth * point.limits.chunk_bytes),
                *(f"{point.rates[mix]:.2f}" for mix in calibration.MIXES),
                f"{min(point.fractions.values()):.3f}",
            )
            for point in found.points
        ],
    )
    click.echo()
    click.echo(f"{found.limits}: in {kept}, for the next start of its daemon")


@command.command()
@click.option("--elements", type=Count(), default="100M", show_default=True, help="In all.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Both, by default.")
@click.option(
    "--tensors",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 400),
    show_default=True,
    help="Of the same size; repeatable.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Repeatable; 1 and one a core, by default.",
)
@common
def adam(
    as_json: bool,
    dtype: str | None,
    elements: int,
    rounds: int,
    tensors: tuple[int, ...],
    threads: tuple[int, ...],
) -> None:
    """The update in memory, and the same reads and writes without its arithmetic."""
    if max(tensors) > elements:
        raise click.UsageError(f"{elements} elements make no {max(tensors)} tensors")
    thread_counts = threads or tuple(sorted({1, len(os.sched_getaffinity(0))}))
    show(
        adam_figures(
            dtypes=[dtype] if dtype else ["fp32", "bf16"],
            element_count=elements,
            tensor_counts=tensors,
            thread_counts=thread_counts,
            rounds=rounds,
        ),
        as_json=as_json,
        settings={"elements": elements},
    )


@command.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=Path(),
    help="A folder on a disk, for the volume of a private daemon; here, by default. Removed.",
)
@click.option("--leases", type=Count(), default="20K", show_default=True, help="In each run.")
@common
def lease(as_json: bool, data: Path, leases: int, rounds: int) -> None:
    """Leases of a tensor that is in memory: native, from Python, and by request."""
    from memd.demo.main import refuse_without_torch

    refuse_without_torch("memd bench lease")
    from memd.bench.lease import lease_figures
    from memd_client import MemdError

    try:
        show(
            lease_figures(data, count=leases, rounds=rounds),
            as_json=as_json,
            settings={"leases": leases},
        )
    except MemdError as error:
        raise click.ClickException(str(error)) from error


@command.command(name="hash")
@click.option(
    "--size", type=Size(), default="512MiB", show_default=True, help="More than the caches hold."
)
@common
def hash_(as_json: bool, rounds: int, size: int) -> None:
    """Checksums of extents on one core, and reading the same memory alone."""
    show(hash_figures(size=size, rounds=rounds), as_json=as_json, settings={"bytes": size})


@command.command()
@click.option(
    "--params",
    "parameter_count",
    type=CountParameter(),
    default="10M",
    show_default=True,
    help="Parameters of the model, about: 5M, 1.5B.",
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--sequence", type=click.IntRange(1, 65536), default=256, show_default=True)
@click.option(
    "--cache",
    "cache_fraction",
    type=FractionParameter(),
    default="1/4",
    show_default=True,
    help="Part of parameters and states that the host pool holds beside the gradients.",
)
@click.option("--resident", is_flag=True, help="A pool that holds everything, in place of --cache.")
@click.option(
    "--durability", default="step", show_default=True, help="step, every:k or none, as connect()."
)
@click.option("--step-in-backward", is_flag=True, help="Updates start during backward.")
@click.option(
    "--steps",
    "step_count",
    type=click.IntRange(min=1),
    help="Of each round.  [default: 4, and k with every:k]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=Path(),
    help="A folder on the disk to measure; here, by default. What is written there is removed.",
)
@common
def train(
    *,
    as_json: bool,
    batch: int,
    cache_fraction: float,
    data: Path,
    dtype: str,
    durability: str,
    parameter_count: int,
    resident: bool,
    rounds: int,
    sequence: int,
    step_count: int | None,
    step_in_backward: bool,
) -> None:
    """Steps of training through a private daemon, and the least time they can take.

    The roofline is the larger of CPU work / cores and bytes / bandwidth, with compute, Adam,
    checksums and I/O each measured alone in the same round. Without --step-in-backward no update
    starts before backward ends: then a step also takes at least backward alone + 2 (state - cache)
    / bandwidth, and the figure names the larger of the two.
    """
    if _DURABILITY.fullmatch(durability) is None:
        raise click.BadParameter(
            f"{durability!r} is none of step, every:k and none", param_hint="--durability"
        )
    from memd.demo.main import refuse_without_torch

    refuse_without_torch("memd bench train")
    from memd.bench.train import TrainSettings, steps_for, train_figures
    from memd.demo.plan import DemoError
    from memd.demo.text import TextError

    machine = describe_machine()
    settings = TrainSettings(
        parameter_count=parameter_count,
        dtype=dtype,
        batch=batch,
        sequence=sequence,
        cache_fraction=cache_fraction,
        resident=resident,
        durability=durability,
        step_in_backward=step_in_backward,
        step_count=step_count or steps_for(durability),
        round_count=rounds,
        folder=data,
    )

    def observe(number: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"round {number + 1} of {rounds}", err=True)

    try:
        figures, told = train_figures(settings, observe=observe)
    except (DemoError, TextError, StatusError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    show(figures, as_json=as_json, settings=told, machine=machine)


@command.command()
@click.option(
    "--size", type=Size(), default="1GiB", show_default=True, help="Copied each way in a run."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=Path(),
    help="A folder on a disk, for the volume of a private daemon; here, by default. Removed.",
)
@common
def device(as_json: bool, data: Path, rounds: int, size: int) -> None:
    """Copies between memd's memory and an accelerator, and of memory that torch has pinned.

    Five times --size and 128 MiB of host memory are used, and what torch pins beside it.
    """
    from memd.demo.main import refuse_without_torch

    refuse_without_torch("memd bench device")
    import torch

    from memd.bench.device import NoDevice, device_figures, find_device
    from memd_client import MemdError

    machine = describe_machine()
    try:
        found = find_device()
        figures = device_figures(data, found, size=size, rounds=rounds)
    except (NoDevice, MemdError, torch.OutOfMemoryError) as error:
        raise click.ClickException(str(error)) from error
    module = torch.get_device_module(found)
    name = module.get_device_name(found) if hasattr(module, "get_device_name") else str(found)
    show(
        figures,
        as_json=as_json,
        settings={"device": name, "torch": torch.__version__, "bytes": size},
        machine=machine,
    )


def show(
    figures: Iterable[Figure],
    *,
    as_json: bool,
    settings: dict[str, Any],
    machine: dict[str, Any] | None = None,
) -> None:
    machine = machine or describe_machine()
    try:
        measured = list(figures)
    except StatusError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print_json(
            {
                "machine": machine,
                "settings": settings,
                "figures": [figure.record() for figure in measured],
            }
        )
        return
    print_table(HEADER, [row(figure) for figure in measured])
