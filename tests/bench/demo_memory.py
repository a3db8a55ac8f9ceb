"""How much memory training with memd takes beside its pool, against the same training in memory.

Two runs of the demo's training, each in a process of its own. RssAnon (anonymous memory; an arena
is shared and not in it) of the trainer and of the daemon is sampled every 20 ms during the whole
run, from outside. Promised:

    trainer with memd, while it builds the model and trains it, less what the trainer in memory has
    beside parameters, gradients and states  <=  largest module + its gradient + 64 MiB
    daemon, at any time               <=  80 MB

Run: python demo_memory.py [--params 30M] [--steps 12] [--json FILE]. Exit code 1 if one is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_training import add_arguments, child_command
from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.large_blocks import SETTINGS
from memd.demo.memory import anonymous_bytes, child_process_ids
from report import write_report

SAMPLE_INTERVAL_S = 0.02
TRAINER_MARGIN_BYTES = 64 * 2**20
DAEMON_BYTES_MAX = 80 * 10**6


@dataclass(kw_only=True, slots=True)
class Measured:
    trainer: list[tuple[float, int]] = field(default_factory=list)  # time.monotonic(), RssAnon
    daemon: list[tuple[float, int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == name)

    @property
    def peak_bytes(self) -> int:
        """The trainer's peak, from its start to its end."""
        return max(size_bytes for _, size_bytes in self.trainer)

    @property
    def training_peak_bytes(self) -> int:
        """The trainer's peak between "ready" and "done": without building the model."""
        begin, end = self.event("ready")["time"], self.event("done")["time"]
        return max(size_bytes for at, size_bytes in self.trainer if begin <= at <= end)

    @property
    def daemon_peak_bytes(self) -> int:
        return max(size_bytes for _, size_bytes in self.daemon)


def sample(process_id: int, measured: Measured, stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_INTERVAL_S):
        try:
            measured.trainer.append((time.monotonic(), anonymous_bytes(process_id)))
            for child_id in child_process_ids(process_id):
                measured.daemon.append((time.monotonic(), anonymous_bytes(child_id)))
        except (FileNotFoundError, ProcessLookupError):
            continue  # one of them has ended between listing and reading


def measure(command: list[str]) -> Measured:
    measured, stop = Measured(), threading.Event()
    environ = {**os.environ, **SETTINGS}  # as `memd demo` sets for itself
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        sampler = threading.Thread(target=sample, args=(process.pid, measured, stop))
        sampler.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                measured.events.append(json.loads(line))
        finally:
            stop.set()
            sampler.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return measured


def verdict(*, passes: bool) -> str:
    return "PASS" if passes else "FAIL"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    machine = describe_machine()
    plain = measure(child_command("memory", arguments))
    memd = measure(child_command("memd", arguments))

    sizes = plain.event("done")
    kept_bytes = sizes["parameter_bytes"] + sizes["gradient_bytes"] + sizes["state_bytes"]
    rest_bytes = plain.training_peak_bytes - kept_bytes
    excess_bytes = memd.peak_bytes - rest_bytes
    excess_bytes_max = 2 * sizes["module_bytes"] + TRAINER_MARGIN_BYTES
    trainer_passes = excess_bytes <= excess_bytes_max
    daemon_passes = memd.daemon_peak_bytes <= DAEMON_BYTES_MAX

    rows: list[tuple[str, int, str]] = [
        ("trainer in memory, training", plain.training_peak_bytes, f"{len(plain.trainer)} samples"),
        ("  - parameters", sizes["parameter_bytes"], ""),
        ("  - gradients", sizes["gradient_bytes"], ""),
        ("  - states", sizes["state_bytes"], ""),
        ("  = the rest of its training", rest_bytes, ""),
        ("trainer with memd, peak", memd.peak_bytes, f"{len(memd.trainer)} samples"),
        ("  above the rest", excess_bytes, ""),
        ("  largest module", sizes["module_bytes"], ""),
        ("  allowed: twice + 64 MiB", excess_bytes_max, verdict(passes=trainer_passes)),
        ("daemon, peak beside its pool", memd.daemon_peak_bytes, f"{len(memd.daemon)} samples"),
        ("  allowed: 80 MB", DAEMON_BYTES_MAX, verdict(passes=daemon_passes)),
    ]
    for name, size_bytes, note in rows:
        print(f"{name:30} {size_bytes / 2**20:9.1f} MiB  {note}")

    write_report(
        arguments.json,
        name="demo_memory",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("params", "dtype", "batch", "sequence", "cache", "host", "steps")
        },
        figures=[
            Figure(
                name=name,
                unit="bytes",
                runs=[size_bytes],
                limit_name="allowed",
                limit_runs=[allowed_bytes],
                less_is_better=True,
            )
            for name, size_bytes, allowed_bytes in (
                ("trainer above the rest", excess_bytes, excess_bytes_max),
                ("daemon beside its pool", memd.daemon_peak_bytes, DAEMON_BYTES_MAX),
            )
        ],
        details={
            "sizes": {
                name: value for name, value in sizes.items() if name not in ("event", "time")
            },
            "memory_trainer_bytes_peak": plain.training_peak_bytes,
            "memd_trainer_bytes_peak": memd.peak_bytes,
            "passes": trainer_passes and daemon_passes,
        },
    )
    raise SystemExit(0 if trainer_passes and daemon_passes else 1)


if __name__ == "__main__":
    main()
