"""Step time with memd against plain PyTorch on the demo's model, parameters and states on disk.

Runs of both alternate, each in a process of its own, so that a machine that gets slower or faster
does so for both. Of each run the median step counts, the first steps left out; of the runs the
median of medians.

Run: python bench_step_time.py [--rounds 3] [--params 30M] [--steps 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from demo_training import add_arguments, child_command
from machine import describe_machine
from report import ratio, seconds, write_report

STEPS_LEFT_OUT = 3  # first touches, the caches' and the kernels' warming up


def median_step_seconds(command: list[str]) -> float:
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    events: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    times: list[float] = [event["seconds"] for event in events if event["event"] == "step"]
    return statistics.median(times[STEPS_LEFT_OUT:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.steps <= STEPS_LEFT_OUT or arguments.rounds < 1:
        parser.error(f"at least one round of more than {STEPS_LEFT_OUT} steps is needed")

    machine = describe_machine()
    medians: dict[str, list[float]] = {"memory": [], "memd": []}
    for _ in range(arguments.rounds):
        for mode, times in medians.items():
            times.append(median_step_seconds(child_command(mode, arguments)))

    write_report(
        arguments.json,
        name="bench_step_time",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("params", "dtype", "batch", "sequence", "cache", "host", "steps", "rounds")
        },
        figures=[
            seconds("plain PyTorch: step", medians["memory"]),
            seconds("memd: step", medians["memd"]),
            ratio("plain PyTorch / memd: step", medians["memory"], medians["memd"]),
        ],
    )


if __name__ == "__main__":
    main()
