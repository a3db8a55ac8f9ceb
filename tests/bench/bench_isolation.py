"""What a job feels of a neighbour that floods the daemon, beside the job alone with half of it.

The job trains a model of linear layers with its states on disk, and leases a small blob that stays
resident between its steps. Alone it has half of the bandwidth and half of the update threads;
beside the neighbour the daemon has all of both. The neighbour is three processes of one job of the
same weight: one gathers a model that does not fit, one puts blobs without end, one commits without
end. The bandwidth is that of a preloaded library, so that half of it is known to be half. Runs
alternate. The neighbour's own processes are niced, since their cores are not the daemon's to share.

Wanted: the resident lease's p99 at most twice, the step at most 1.1 times what it is alone.

Run: python bench_isolation.py [--rounds 3] [--steps 6] [--params 4M] [--bandwidth 200]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import memd_client
from machine import describe_machine
from memd.bench.figures import Figure
from memd.client import DaemonClient
from memd.demo.quantities import parse_count
from report import ratio, seconds, write_report
from tests.daemons import daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/native/preload/limited_device.cc"
STEPS_LEFT_OUT = 2
LEASES_A_STEP = 500
WIDTH = 512
JOB_BYTES = 48 << 20
NVME_BYTES = 1 << 30
FLOODS = ("gather", "blobs", "commits")


def compiled_limit() -> Path:
    library = ROOT / "build" / "bench" / "limited_device.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def model_of(parameter_count: int) -> nn.Sequential:
    layers = max(1, parameter_count // (WIDTH * WIDTH))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def train(address: str, parameter_count: int, step_count: int) -> dict[str, Any]:
    """The job that is measured: seconds of its steps, and of leases of what is resident."""
    torch.set_num_threads(1)
    steps, leases = [], []
    with memd_client.connect(address, job="measured", host_bytes=JOB_BYTES) as session:
        session.put("probe", torch.zeros(1024))
        model = model_of(parameter_count)
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session)
        inputs = torch.randn(8, WIDTH)
        for number in range(STEPS_LEFT_OUT + step_count):
            began = time.perf_counter()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            _ = session.committed_step  # waits for it
            ended = time.perf_counter()
            probe = session.get("probe")
            for _ in range(LEASES_A_STEP):
                lease_began = time.perf_counter()
                probe = session.get("probe")
                leases.append(time.perf_counter() - lease_began)
            del probe
            if number < STEPS_LEFT_OUT:
                leases.clear()
            else:
                steps.append(ended - began)
    leases.sort()
    return {
        "step": statistics.median(steps),
        "lease_p99": leases[int(len(leases) * 0.99)],
        "steps": steps,
    }


def flood(address: str, kind: str, parameter_count: int) -> None:
    """Until it is killed."""
    os.nice(10)
    torch.set_num_threads(1)
    session = memd_client.connect(address, job="flood", host_bytes=3 * JOB_BYTES)
    if kind == "gather":
        model = model_of(8 * parameter_count)
        memd_client.offload(model, session)
        print("ready", flush=True)
        while True:
            for layer in model:
                with memd_client.gather(layer):
                    pass
    print("ready", flush=True)
    number = 0
    while True:
        name = f"{kind}-{number % 64}"
        number += 1
        with contextlib.suppress(memd_client.MemdError):  # it is at its limits
            session.put(name, torch.zeros(1 if kind == "commits" else 1 << 18))
            if kind == "commits":
                session.commit(wait=True)


def child(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__)), *arguments]


@contextlib.contextmanager
def flooded(daemon: Daemon, parameter_count: int) -> Iterator[None]:
    processes = []
    try:
        for kind in FLOODS:
            command = child("--flood", kind, "--address", daemon.address)
            process = subprocess.Popen(
                [*command, "--params", str(parameter_count)], stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"the neighbour ({kind}) did not start")
        yield
        for kind, process in zip(FLOODS, processes, strict=True):
            if process.poll() is not None:
                raise SystemExit(f"the neighbour ({kind}) ended before the job did")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def moved_bytes(meter: DaemonClient) -> int:
    return sum(each.read_bytes + each.written_bytes for each in meter.status().devices)


def measure(library: Path, arguments: argparse.Namespace, *, beside: bool) -> dict[str, Any]:
    share = 1 if beside else 2
    threads = arguments.threads // share
    environ = {
        "LD_PRELOAD": str(library),
        "LIMITED_BYTES_PER_SECOND": str(arguments.bandwidth * 10**6 / share),
        "MEMD_IO_ENGINE": "threads",
        "MEMD_HOLDER_SECONDS": "0",
        "MEMD_UPDATE_THREADS": str(threads),
        "MEMD_SCRUB": "0",
    }
    # Made at full speed: the volume is written once.
    with daemons() as made:
        host, nvme = f"{5 * JOB_BYTES}B", f"{NVME_BYTES}B"
        assert made.start(host=host, nvme=nvme).stop() == 0
        daemon = made.start(environ=environ, host=host, nvme=nvme)
        command = child("--trainer", "--address", daemon.address, "--params", str(arguments.params))
        command += ["--steps", str(arguments.steps)]
        with (
            flooded(daemon, arguments.params) if beside else contextlib.nullcontext(),
            DaemonClient(daemon.attach_socket) as meter,
        ):
            began, before = time.perf_counter(), moved_bytes(meter)
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            moved, elapsed = moved_bytes(meter) - before, time.perf_counter() - began
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    # Beside a flood that leaves the disk idle the other figures would say nothing.
    measured["disk_busy"] = moved / elapsed / float(environ["LIMITED_BYTES_PER_SECOND"])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=parse_count, default="4M")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=200, help="of the disk, in MB/s")
    parser.add_argument("--threads", type=int, default=2, help="of the daemon's update, even")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--flood", choices=FLOODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        flood(arguments.address, arguments.flood, arguments.params)
    if arguments.trainer:
        print(json.dumps(train(arguments.address, arguments.params, arguments.steps)))
        return
    if arguments.threads % 2 or min(arguments.rounds, arguments.steps, arguments.threads) < 1:
        parser.error("at least one round of one step, and an even number of threads, are needed")

    machine, library = describe_machine(), compiled_limit()
    alone, beside = [], []
    for _ in range(arguments.rounds):
        alone.append(measure(library, arguments, beside=False))
        beside.append(measure(library, arguments, beside=True))

    def runs(measured: list[dict[str, Any]], name: str) -> list[float]:
        return [each[name] for each in measured]

    figures = []
    for name, text in (("step", "step"), ("lease_p99", "resident lease p99")):
        figures += [
            seconds(f"alone with half: {text}", runs(alone, name)),
            seconds(f"beside a flood: {text}", runs(beside, name)),
            ratio(
                f"beside / alone: {text}",
                runs(beside, name),
                runs(alone, name),
                less_is_better=True,
            ),
        ]
    busy = Figure(name="beside a flood: disk is busy", unit="x", runs=runs(beside, "disk_busy"))
    figures.append(busy)
    write_report(
        arguments.json,
        name="bench_isolation",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("params", "steps", "rounds", "bandwidth", "threads")
        },
        figures=figures,
        details={"alone": alone, "beside": beside},
    )


if __name__ == "__main__":
    main()
