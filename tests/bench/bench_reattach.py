"""How long after a trainer was killed its successor has made a step: process, torch, attach, step.

The attach does not depend on how much the job holds: it is measured for the demo's model and for
one with --factor times its parameters. Most of it is the import of memd_client, from bytecode as an
installed package has it: without, it takes twice as long.

Run: python tests/bench/bench_reattach.py [--json FILE] [--runs N] [--factor N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memd.bench.figures import Figure

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

DEMO_PARAMETERS = 29_200_000
SEQUENCE = 64
JOB = "reattach"
PARTS = ("process_start", "torch_import", "attach", "offload", "first_step")


def train(address: str, parameter_count: int) -> None:
    """The trainer. Says when it had done what, on the clock that all processes share."""
    moments = [time.monotonic()]
    import torch

    moments.append(time.monotonic())
    import memd_client

    session = memd_client.connect(address, job=JOB)
    moments.append(time.monotonic())
    from memd.demo.model import build_model, shape_for

    shape = shape_for(parameter_count, sequence=SEQUENCE)
    model = memd_client.offload(build_model(shape, dtype=torch.float32, seed=0), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session)
    first = session.resume()
    moments.append(time.monotonic())
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
    while True:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert session.committed_step > first  # waits for the commit
        if len(moments) < len(PARTS):
            moments.append(time.monotonic())
            sys.stdout.write(json.dumps({"first": first, "moments": moments}) + "\n")
            sys.stdout.flush()


class Trainer:
    def __init__(self, address: str, parameter_count: int) -> None:
        command = [sys.executable, __file__, "--train", address, str(parameter_count)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # The first trainer leaves bytecode behind, whatever this shell is told.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the trainer ended before its first step")
        self.said = json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def measure(parameter_count: int, runs: int) -> list[Figure]:
    from report import seconds
    from tests.daemons import running_daemon

    host_bytes = 16 * parameter_count + (256 << 20)
    nvme_bytes = 60 * parameter_count + (1 << 30)
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "all")}
    with running_daemon(host=f"{host_bytes}B", nvme=f"{nvme_bytes}B") as daemon:
        trainer = Trainer(daemon.address, parameter_count)
        try:
            assert trainer.said["first"] == 0
            for _ in range(runs):
                killed = time.monotonic()
                trainer.kill()
                trainer = Trainer(daemon.address, parameter_count)
                assert trainer.said["first"] > 0
                moments = [killed, *trainer.said["moments"]]
                for name, (begin, end) in zip(PARTS, pairwise(moments), strict=True):
                    times[name].append(end - begin)
                times["all"].append(moments[-1] - killed)
        finally:
            trainer.kill()
    return [seconds(f"{parameter_count}: {name}", values) for name, values in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train[0], int(arguments.train[1]))
        return
    from machine import describe_machine
    from report import write_report

    counts = dict.fromkeys((DEMO_PARAMETERS, arguments.factor * DEMO_PARAMETERS))
    machine = describe_machine()
    write_report(
        arguments.json,
        name="bench_reattach",
        machine=machine,
        settings={"runs": arguments.runs, "factor": arguments.factor},
        figures=[figure for count in counts for figure in measure(count, arguments.runs)],
    )


if __name__ == "__main__":
    main()
