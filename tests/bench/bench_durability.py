"""What durability costs: time and bytes written per step, "step" against "none", alternating.

Each run is a process with a private daemon of its own, once with everything resident and once with
a cache for a quarter of parameters and states. Bytes are those that the devices took, catalogues
and superblocks among them. The bound on time is 1.15 × (time of "none" + additional bytes / write
bandwidth); the bandwidth is measured on the same disk beside the runs, with random data.

Run: python tests/bench/bench_durability.py [--rounds 5] [--params 30M] [--steps 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memd.bench.figures import Figure
from report import byte_count, seconds, write_report

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

STEPS_LEFT_OUT = 3  # first touches, and moments that have no extent yet
MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
FILE_BYTES = 512 * MIB
DEPTH = 8
MODES = ("step", "none")
# A step writes 12 bytes a parameter (fp32), and the commit before stays beside it.
STATE_BYTES = 12
TIME_ALLOWANCE = 1.15


def train(parameter_count: int, step_count: int, durability: str, memory: str) -> None:
    """One run; prints seconds and bytes of every step but the first ones."""
    import torch

    import memd_client
    from memd.client import DaemonClient
    from memd.demo.model import build_model, shape_for
    from memd_client.base.address import EmbeddedAddress, parse_address
    from memd_client.connection.embedded import embedded_daemon

    shape = shape_for(parameter_count, sequence=256)
    model = build_model(shape, dtype=torch.float32, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    # Parameters, gradients, moments, and tiles on their way; or gradients and a quarter.
    cached = 1.0 if memory == "resident" else 0.25
    host_bytes = int(4 * count + (4 + STATE_BYTES) * count * cached) + 128 * MIB
    address = f"embedded:?host={host_bytes}B&nvme={60 * count + 1024 * MIB}B"
    session = memd_client.connect(address, job="bench", durability=durability)
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session)
    tokens = torch.randint(0, 256, (4, 256), generator=torch.Generator().manual_seed(0))
    parsed = parse_address(address)
    assert isinstance(parsed, EmbeddedAddress)
    socket = embedded_daemon(parsed)
    with DaemonClient(socket.address.attach_socket) as daemon:
        times, written = [], []
        for step in range(step_count):
            before = daemon.status().devices[0].written_bytes
            began = time.perf_counter()
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert session.committed_step == step + 1  # waits for the commit
            times.append(time.perf_counter() - began)
            written.append(daemon.status().devices[0].written_bytes - before)
    print(
        json.dumps(
            {
                "parameters": count,
                "seconds": statistics.median(times[STEPS_LEFT_OUT:]),
                "written_bytes": statistics.median(written[STEPS_LEFT_OUT:]),
            }
        )
    )


def write_bytes_per_second() -> float:
    """O_DIRECT, 4 MiB, eight at a time, over a file that was written in full before."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    buffer.write(os.urandom(CHUNK_BYTES))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        offsets = range(0, FILE_BYTES, CHUNK_BYTES)
        with ThreadPoolExecutor(DEPTH) as threads:
            for _ in range(2):  # the first time allocates
                began = time.perf_counter()
                list(threads.map(lambda offset: os.pwrite(fd, buffer, offset), offsets))
                os.fdatasync(fd)
                took_s = time.perf_counter() - began
        os.close(fd)
    return FILE_BYTES / took_s


def run_child(arguments: argparse.Namespace, durability: str, memory: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", durability, memory]
    command += ["--params", str(arguments.params), "--steps", str(arguments.steps)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    outcome: dict[str, Any] = json.loads(output)
    return outcome


def compare(
    memory: str, runs: dict[str, list[dict[str, Any]]], bandwidths: list[float]
) -> list[Figure]:
    """The bound of each round is made of what was measured in that round."""
    bounds = [
        TIME_ALLOWANCE
        * (none["seconds"] + (step["written_bytes"] - none["written_bytes"]) / bandwidth)
        for step, none, bandwidth in zip(runs["step"], runs["none"], bandwidths, strict=True)
    ]
    return [
        Figure(
            name=f"{memory}: step, durable",
            unit="s",
            runs=[run["seconds"] for run in runs["step"]],
            limit_name="bound",
            limit_runs=bounds,
            less_is_better=True,
        ),
        seconds(f"{memory}: step, in memory", [run["seconds"] for run in runs["none"]]),
        Figure(
            name=f"{memory}: written a step, durable",
            unit="bytes",
            runs=[run["written_bytes"] for run in runs["step"]],
            limit_name="state",
            limit_runs=[STATE_BYTES * run["parameters"] for run in runs["step"]],
            less_is_better=True,
        ),
        byte_count(
            f"{memory}: written a step, in memory", [run["written_bytes"] for run in runs["none"]]
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=30_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps <= STEPS_LEFT_OUT or arguments.rounds < 1:
        parser.error(f"at least one round of more than {STEPS_LEFT_OUT} steps is needed")
    if arguments.child:
        train(arguments.params, arguments.steps, *arguments.child)
        return
    from machine import describe_machine

    machine = describe_machine()
    figures: list[Figure] = []
    for memory in ("resident", "quarter"):
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        bandwidths = []
        for _ in range(arguments.rounds):
            bandwidths.append(write_bytes_per_second())
            for mode in MODES:
                runs[mode].append(run_child(arguments, mode, memory))
        figures += compare(memory, runs, bandwidths)
        figures.append(
            Figure(name=f"{memory}: write", unit="GB/s", runs=[rate / 1e9 for rate in bandwidths])
        )
    write_report(
        arguments.json,
        name="bench_durability",
        machine=machine,
        settings={name: getattr(arguments, name) for name in ("params", "steps", "rounds")},
        figures=figures,
    )


if __name__ == "__main__":
    main()
