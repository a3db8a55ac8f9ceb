"""500 steps of GPT training, resident, streamed, overlapped and updated in backward: the losses of
plain PyTorch with its fused AdamW, bit for bit (see training_bits.py).

The exit code is 1 where a bit differs.

Run: python tests/bench/bench_bits.py [--steps 500] [--only NAME …] [--data DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.folder import volume_folder
from report import byte_count, seconds, write_report
from training_bits import SHAPE, WAYS, first_difference, train_plain, train_with_memd

BUILD = Path(__file__).parents[2] / "build"
VOLUME_BYTES = 512 << 20  # of all that is there at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(WAYS))
    parser.add_argument("--data", type=Path, default=BUILD, help="a folder on a disk")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps is at least 1")
    machine = describe_machine()
    began = time.perf_counter()
    expected = train_plain(arguments.steps).losses
    figures = [seconds("plain: a step", [(time.perf_counter() - began) / arguments.steps])]
    differing: dict[str, int] = {}
    for name in arguments.only or WAYS:
        print(f"{name} …", file=sys.stderr, flush=True)
        began = time.perf_counter()
        with volume_folder(arguments.data, bytes_needed=VOLUME_BYTES) as folder:
            trained = train_with_memd(WAYS[name], arguments.steps, folder)
        step = first_difference(trained.losses, expected)
        if step is not None:
            differing[name] = step
        figures += [
            Figure(
                name=f"{name}: steps with the same losses",
                unit="steps",
                runs=[arguments.steps if step is None else step],
                limit_name="all",
                limit_runs=[arguments.steps],
            ),
            seconds(f"{name}: a step", [(time.perf_counter() - began) / arguments.steps]),
            byte_count(f"{name}: read a step", [trained.read_bytes / arguments.steps]),
        ]
    details: dict[str, Any] = {"differing": differing, "losses": expected}
    write_report(
        arguments.json,
        name="bench_bits",
        machine=machine,
        settings={"steps": arguments.steps, "parameters": SHAPE.parameter_count},
        figures=figures,
        details=details,
    )
    if differing:
        raise SystemExit(
            ", ".join(f"{name} differs from step {step} on" for name, step in differing.items())
        )


if __name__ == "__main__":
    main()
