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

STEPS_LEFT_OUT = 3  # first touches, the caches' and the kernels' warming up


def median_step_seconds(command: list[str]) -> float:
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    events: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    seconds: list[float] = [event["seconds"] for event in events if event["event"] == "step"]
    return statistics.median(seconds[STEPS_LEFT_OUT:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.steps <= STEPS_LEFT_OUT or arguments.rounds < 1:
        parser.error(f"at least one round of more than {STEPS_LEFT_OUT} steps is needed")

    medians: dict[str, list[float]] = {"memory": [], "memd": []}
    for _ in range(arguments.rounds):
        for mode, seconds in medians.items():
            seconds.append(median_step_seconds(child_command(mode, arguments)))

    memory_seconds, memd_seconds = map(statistics.median, medians.values())
    figures = {
        "machine": describe_machine(),
        "parameters": arguments.params,
        "dtype": arguments.dtype,
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "cache_fraction": arguments.cache,
        "host_bytes": arguments.host,
        "threads": arguments.threads,
        "memory_step_seconds": memory_seconds,
        "memd_step_seconds": memd_seconds,
        "ratio": memd_seconds / memory_seconds,
        "median_seconds_of_runs": medians,
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
