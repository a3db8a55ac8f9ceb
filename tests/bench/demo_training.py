"""The demo's training in a process of its own, for the programs that measure it.

Run: python demo_training.py memory|memd --params 30M --steps 20 --data FOLDER …
Prints JSON lines: {"event": "ready"} when setting up is over, {"event": "step", "seconds": …} after
each step, and {"event": "done", …} at the end; `time` in each is time.monotonic(), the same clock
in every process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memd.demo.folder import volume_folder
from memd.demo.plan import make_plan
from memd.demo.quantities import parse_count
from memd.demo.settings import DemoSettings
from memd.demo.sizes import STATE_BYTES
from memd.demo.twin import train_in_memory
from memd.sizes import parse_size

if TYPE_CHECKING:
    from memd.demo.train import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the measuring programs pass through."""
    parser.add_argument("--params", type=parse_count, default=30_000_000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--cache", type=float, default=0.25)
    parser.add_argument("--host", type=parse_size, help="the pool as a whole, in place of --cache")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--data", type=Path, help="folder for volumes, on a disk")


def child_command(mode: str, arguments: argparse.Namespace) -> list[str]:
    """This program with the arguments that `add_arguments` read."""
    command = [sys.executable, __file__, mode]
    for name in ("params", "steps", "dtype", "batch", "sequence", "cache", "threads", "data"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    if arguments.host is not None:
        command += ["--host", f"{arguments.host}B"]
    return command


def tell(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "time": time.monotonic(), **values}), flush=True)


def tell_step(record: StepRecord, _usage: object = None) -> None:
    tell("step", step=record.step, seconds=record.seconds, loss=record.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=("memory", "memd"))
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = DemoSettings(
        parameter_count=arguments.params,
        step_count=arguments.steps,
        dtype=arguments.dtype,
        batch=arguments.batch,
        sequence=arguments.sequence,
        seed=0,
        cache_fraction=arguments.cache,
        host_bytes=arguments.host,
        nvme_bytes=None,
        text=None,
        data=arguments.data,
        verify=False,
    )
    plan = make_plan(settings)
    with volume_folder(arguments.data, bytes_needed=plan.nvme_bytes) as folder:
        if arguments.mode == "memory":
            train_in_memory(plan, folder, observe=tell_step, ready=lambda: tell("ready"))
        else:
            # Here, so that the process that trains in memory holds nothing of memd's client.
            from memd.demo.run import train_with_memd

            train_with_memd(plan, folder, observe=tell_step, ready=lambda: tell("ready"))
    count = plan.shape.parameter_count
    tell(
        "done",
        parameter_count=count,
        parameter_bytes=count * settings.element_bytes,
        gradient_bytes=count * settings.element_bytes,
        # What plain training holds beside them: two fp32 moments, and in bf16 the fp32 masters.
        state_bytes=count * (STATE_BYTES - 4 if settings.dtype == "fp32" else STATE_BYTES),
        module_bytes=plan.shape.module_elements_max * settings.element_bytes,
        host_bytes=plan.host_bytes,
    )


if __name__ == "__main__":
    main()
