"""Savings and cost of `offload(activations=...)`: the trainer's memory and the time of a step, for
three widths, with and without checkpoints, beside the same training without it.

Residual blocks train in fp32 with durability "none". "host" has a pool that holds everything;
"nvme" has one for the state and half of what is offloaded. Runs of the three take turns. Memory is
the trainer's own at its peak, beyond that of an interpreter with torch imported, of a trainer that
returns freed tensors. The exit code is 1 where a loss differs, or where memory falls by less than
0.8 of what is offloaded.

Run: python bench_activations.py [--widths 256 512 1024] [--rows 2048] [--steps 4] [--runs 3]
                                 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from activations_training import state_bytes
from machine import describe_machine
from memd.demo.memory import PeakMemory
from report import byte_count, ratio, seconds, write_report
from tests.daemons import BUILD, running_daemon
from tests.integration.safetensors_memory import SETTINGS

if TYPE_CHECKING:
    from memd.bench.figures import Figure

KINDS = ("plain", "checkpoints")
PLACES = ("none", "host", "nvme")
SHARE_WANTED = 0.8
MARGIN_BYTES = 256 << 20  # what a step needs beside the state
TRAINER = Path(__file__).with_name("activations_training.py")
_TORCH_ALONE = """
import re, torch
print(1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    place: str
    peak_bytes: int  # beyond torch
    offloaded_bytes: int
    step_seconds: float  # the median
    losses: list[float]


def measure(
    place: str, kind: str, *, width: int, rows: int, steps: int, pool_bytes: int, alone_bytes: int
) -> Run:
    command = [sys.executable, str(TRAINER)]
    disk_bytes = 4 * pool_bytes + 4 * state_bytes(width) + MARGIN_BYTES
    with (
        running_daemon(host=f"{pool_bytes}B", nvme=f"{disk_bytes}B") as daemon,
        subprocess.Popen(
            [*command, daemon.address, *map(str, (pool_bytes, width, rows, steps)), place, kind],
            stdout=subprocess.PIPE,
            env={**os.environ, **SETTINGS},
            text=True,
        ) as trainer,
        PeakMemory([trainer.pid], interval_s=0.002) as memory,
    ):
        assert trainer.stdout is not None
        said = trainer.stdout.read()
    if trainer.returncode:
        raise SystemExit(f"{place}, {kind}, width {width}: the trainer failed")
    found = json.loads(said)
    return Run(
        place=place,
        peak_bytes=memory.peak_bytes[trainer.pid] - alone_bytes,
        offloaded_bytes=found["offloaded_bytes"],
        step_seconds=statistics.median(found["step_seconds"]),
        losses=found["losses"],
    )


def compare(
    kind: str, *, width: int, rows: int, steps: int, runs: int, alone_bytes: int
) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {place: [] for place in PLACES}
    pool_bytes = state_bytes(width) + MARGIN_BYTES
    offloaded_bytes = 0
    for _ in range(runs):
        for place in PLACES:
            # The first of "host" says how much there is. Until then all that a block may save.
            room = offloaded_bytes or 4 * rows * width * 4 * 16
            more_bytes = {"none": 0, "host": room + room // 4, "nvme": room // 2}[place]
            run = measure(
                place,
                kind,
                width=width,
                rows=rows,
                steps=steps,
                pool_bytes=pool_bytes + more_bytes,
                alone_bytes=alone_bytes,
            )
            offloaded_bytes = max(offloaded_bytes, run.offloaded_bytes)
            found[place].append(run)
            print(json.dumps({"width": width, "kind": kind, **asdict(run)}), file=sys.stderr)
    return found


def figures_of(name: str, found: dict[str, list[Run]]) -> list[Figure]:
    plain = [run.step_seconds for run in found["none"]]
    figures = [
        byte_count(f"{name}: trainer, none", [run.peak_bytes for run in found["none"]]),
        seconds(f"{name}: a step, none", plain),
    ]
    for place in PLACES[1:]:
        runs = found[place]
        offloaded = [run.offloaded_bytes for run in runs]
        less = fallen(found, place)
        figures += [
            byte_count(f"{name}: trainer, {place}", [run.peak_bytes for run in runs]),
            byte_count(f"{name}: offloaded, {place}", offloaded),
            ratio(f"{name}: memory that falls / offloaded, {place}", less, offloaded),
            ratio(
                f"{name}: a step / without, {place}",
                [run.step_seconds for run in runs],
                plain,
                less_is_better=True,
            ),
        ]
    return figures


def fallen(found: dict[str, list[Run]], place: str) -> list[int]:
    pairs = zip(found["none"], found[place], strict=True)
    return [without.peak_bytes - run.peak_bytes for without, run in pairs]


def failures(name: str, found: dict[str, list[Run]]) -> list[str]:
    told = []
    for place in PLACES[1:]:
        if any(run.losses != found["none"][0].losses for run in found[place]):
            told.append(f"{name}, {place}: other losses")
        offloaded_bytes = statistics.median(run.offloaded_bytes for run in found[place])
        if statistics.median(fallen(found, place)) < SHARE_WANTED * offloaded_bytes:
            told.append(f"{name}, {place}: memory falls by less than {SHARE_WANTED} of the bytes")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    machine = describe_machine()
    alone = subprocess.run([sys.executable, "-c", _TORCH_ALONE], capture_output=True, check=True)
    figures: list[Figure] = []
    told: list[str] = []
    rows: list[dict[str, object]] = []
    for width in arguments.widths:
        for kind in KINDS:
            found = compare(
                kind,
                width=width,
                rows=arguments.rows,
                steps=arguments.steps,
                runs=arguments.runs,
                alone_bytes=int(alone.stdout),
            )
            name = f"width {width}, {kind}"
            figures += figures_of(name, found)
            told += failures(name, found)
            for place in PLACES:
                rows += [{"width": width, "kind": kind, **asdict(run)} for run in found[place]]
    write_report(
        arguments.json,
        name="bench_activations",
        machine=machine,
        settings={name: getattr(arguments, name) for name in ("widths", "rows", "steps", "runs")},
        figures=figures,
        details={"runs": rows},
    )
    if told:
        raise SystemExit("\n".join(told))


if __name__ == "__main__":
    main()
