"""The command line of `memd demo`. Torch is imported only once the arguments were understood."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console

from memd.demo.large_blocks import unmap_large_blocks
from memd.demo.quantities import CountParameter, FractionParameter, SizeParameter
from memd.demo.settings import DemoSettings, DTypeName

if TYPE_CHECKING:
    from memd.demo.run import Outcome

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.command("demo")
@click.option(
    "--params",
    "parameter_count",
    type=CountParameter(),
    default="30M",
    show_default=True,
    help="Parameters of the model, about: 5M, 1.5B.",
)
@click.option("--steps", "step_count", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of parameters and gradients; states are fp32.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences a step."
)
@click.option(
    "--sequence",
    type=click.IntRange(min=1, max=65536),
    default=256,
    show_default=True,
    help="Bytes of text a sequence.",
)
@click.option(
    "--cache",
    "cache_fraction",
    type=FractionParameter(),
    default="1/4",
    show_default=True,
    help="Part of parameters and states that the host pool holds beside the gradients.",
)
@click.option(
    "--host",
    "host_bytes",
    type=SizeParameter(),
    help="Host pool as a whole, in place of --cache. Where it can't hold the gradients they spill.",
)
@click.option(
    "--nvme",
    "nvme_bytes",
    type=SizeParameter(),
    help="Volume on disk.  [default: twice the states, gradients, and a margin]",
)
@click.option(
    "--text",
    type=FILE,
    help="What to train on.  [default: the sources of Python's standard library]",
)
@click.option(
    "--data",
    type=FOLDER,
    help="Folder for the volume, which is removed at the end.  [default: $XDG_CACHE_HOME/memd]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--verify",
    is_flag=True,
    help="Train the same model in memory with torch.optim.AdamW first, and compare bits.",
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def command(
    *,
    parameter_count: int,
    step_count: int,
    dtype: str,
    batch: int,
    sequence: int,
    cache_fraction: float,
    host_bytes: int | None,
    nvme_bytes: int | None,
    text: Path | None,
    data: Path | None,
    seed: int,
    verify: bool,
    as_json: bool,
) -> None:
    """Trains a byte-level GPT whose parameters and optimizer states lie on disk.

    A private daemon is started for it, with a host pool a fraction of the model's size, and ended
    with it. Exit code 1 if --verify finds a bit that differs from plain PyTorch.
    """
    refuse_without_torch("memd demo")
    settings = DemoSettings(
        parameter_count=parameter_count,
        step_count=step_count,
        dtype=cast("DTypeName", dtype),
        batch=batch,
        sequence=sequence,
        seed=seed,
        cache_fraction=cache_fraction,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        text=text,
        data=data,
        verify=verify,
    )
    console = Console(stderr=as_json)
    outcome = _run(settings, console)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(outcome), indent=2))
    if outcome.comparison is not None and not outcome.comparison.identical:
        raise click.exceptions.Exit(1)


def refuse_without_torch(command_name: str) -> None:
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(
                f"{command_name} trains with PyTorch, and {package} is not installed: "
                f"pip install {package}"
            )


def _run(settings: DemoSettings, console: Console) -> "Outcome":
    unmap_large_blocks()
    from memd.demo.plan import DemoError
    from memd.demo.run import run_demo
    from memd.demo.text import TextError

    try:
        return run_demo(settings, console)
    except TextError as error:
        raise click.BadParameter(str(error), param_hint="--text") from error
    except DemoError as error:
        raise click.ClickException(str(error)) from error
