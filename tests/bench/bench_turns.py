"""How long the server thread's turns take: while one lasts, every job waits for its decisions.

A model trains, alone and beside a hostile neighbour: three processes of another job, which take
write leases of 256 MiB, put 10,000 blobs, and commit a few bytes, each without end. Time is that of
the turns which had something to do, on the thread's processor and by the wall, from the daemon's
own histogram: p50 and p99 are the upper bounds of their buckets, which double; the longest counts
from the start of the daemon, and below the figures stands in which phase of it the time went.

A bare loop runs beside it, a few µs a round and without a system call. Its longest round on the
processor is the machine's own part: a virtual machine counts time in which its host ran others.

Wanted, on the processor: p99 at most 100 µs, the longest at most 2 ms.

Run: python tests/bench/bench_turns.py [--rounds 3] [--steps 10] [--params 60M] [--quick]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import operator
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import memd_client
from machine import describe_machine
from memd.demo.quantities import parse_count
from memd_client.core.leases import MODE_WRITE
from report import ratio, seconds, write_report
from tests.daemons import daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd.bench.figures import Figure
    from tests.daemons import Daemon

WIDTH = 1024
HOSTILE = ("leases", "blobs", "commits")
KINDS = {"cpu": "on the processor", "wall": "by the wall"}
QUANTILES = {"p50": 0.5, "p99": 0.99}
STEPS_LEFT_OUT = 2
WANTED_S = 1e-4  # for 99 of 100 turns, and the bound of a bucket


def train(address: str, parameter_count: int, step_count: int) -> None:
    torch.set_num_threads(1)
    layers = max(1, parameter_count // WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    # What does not fit is fetched and written back: half of the values, gradients and moments.
    host_bytes = parameter_count * 16 // 2
    with memd_client.connect(address, job="training", host_bytes=host_bytes) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session)
        inputs = torch.randn(8, WIDTH)
        for _ in range(STEPS_LEFT_OUT + step_count):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            _ = session.committed_step  # waits for it


def be_hostile(address: str, kind: str, lease_bytes: int, blob_count: int) -> None:
    """Until it is killed."""
    os.nice(10)
    torch.set_num_threads(1)
    session = memd_client.connect(address, job="hostile", host_bytes=4 * lease_bytes)
    large = torch.zeros(lease_bytes // 4 if kind == "leases" else 1)

    def once(number: int) -> None:
        if kind == "leases":
            # Its writer begins with the old bytes, in a slot of its own.
            _ = session.leases.value(session.find_shard("large"), MODE_WRITE)
        elif kind == "blobs":
            session.put(f"blob-{number % blob_count}", torch.zeros(256))
        else:
            session.put("tiny", large)
            session.commit(wait=True)

    if kind == "leases":
        session.put("large", large)
    # All blobs are there before the training begins; from then on they are replaced.
    for number in range(blob_count if kind == "blobs" else 1):
        once(number)
    print("ready", flush=True)
    for number in itertools.count(1):
        with contextlib.suppress(memd_client.MemdError):  # it is at its limits
            once(number)


def loop() -> None:
    """Prints its longest round in ns when it is terminated."""
    gc.disable()
    longest_ns = 0
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    while not ended:
        began_ns = time.thread_time_ns()
        sum(range(200))
        longest_ns = max(longest_ns, time.thread_time_ns() - began_ns)
    print(longest_ns)


def child(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__)), *arguments]


@contextlib.contextmanager
def hostile_beside(daemon: Daemon, lease_bytes: int, blob_count: int) -> Iterator[None]:
    processes = []
    sizes = ("--lease-bytes", str(lease_bytes), "--blobs", str(blob_count))
    try:
        for kind in HOSTILE:
            command = child("--hostile", kind, "--address", daemon.address, *sizes)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"the neighbour ({kind}) did not start")
        yield
        for kind, process in zip(HOSTILE, processes, strict=True):
            if process.poll() is not None:
                raise SystemExit(f"the neighbour ({kind}) ended before the training did")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def bare_loop() -> Iterator[list[float]]:
    """Afterwards the list has its longest round, in seconds."""
    found: list[float] = []
    process = subprocess.Popen(child("--loop"), stdout=subprocess.PIPE, text=True)
    try:
        yield found
        process.terminate()
        found.append(int(process.communicate()[0]) / 1e9)
    finally:
        process.kill()
        process.wait()


def turns_of(metrics: str) -> dict[str, dict[str, float]]:
    """By kind: quantiles, the longest, and how many turns there were."""
    found = {}
    for kind in KINDS:
        buckets = re.findall(
            rf'^memd_server_turn_seconds_bucket{{kind="{kind}",le="([^"]+)"}} (\S+)$',
            metrics,
            re.MULTILINE,
        )
        longest = re.search(
            rf'^memd_server_turn_max_seconds{{kind="{kind}"}} (\S+)$', metrics, re.M
        )
        assert longest, metrics
        longest_s, count = float(longest[1]), float(buckets[-1][1])
        found[kind] = {"max": longest_s, "count": count}
        for name, part in QUANTILES.items():
            bound = next(float(le) for le, below in buckets if float(below) >= part * count)
            found[kind][name] = min(bound, longest_s)
        found[kind]["within"] = next(float(below) for le, below in buckets if float(le) >= WANTED_S)
        for phase, phase_s in re.findall(
            rf'^memd_server_turn_max_phase_seconds{{kind="{kind}",phase="(\w+)"}} (\S+)$',
            metrics,
            re.MULTILINE,
        ):
            found[kind][f"max in {phase}"] = float(phase_s)
    return found


def print_phases(name: str, measured: list[dict[str, dict[str, float]]]) -> None:
    for kind, text in KINDS.items():
        longest = max((each[kind] for each in measured), key=operator.itemgetter("max"))
        phases = {key: value for key, value in longest.items() if key.startswith("max in ")}
        parts = ", ".join(
            f"{key.removeprefix('max in ')} {1e6 * phase_s:.0f} µs"
            for key, phase_s in sorted(phases.items(), key=lambda item: -item[1])
            if phase_s >= 1e-6
        )
        total_us = 1e6 * longest["max"]
        print(
            f"{name}: the longest turn {text}, {total_us:.0f} µs; its phases by the wall: {parts}"
        )


def measure(arguments: argparse.Namespace, *, beside: bool) -> dict[str, dict[str, float]]:
    state_bytes = arguments.params * 16
    environ = {"MEMD_HOLDER_SECONDS": "0", "MEMD_SCRUB": "0"}
    with daemons() as made:
        daemon = made.start(
            environ=environ,
            host=f"{state_bytes + 4 * arguments.lease_bytes + (1 << 29)}B",
            nvme=f"{3 * state_bytes + 8 * arguments.lease_bytes + (1 << 30)}B",
        )
        command = child("--trainer", "--address", daemon.address)
        command += ["--params", str(arguments.params), "--steps", str(arguments.steps)]
        with (
            hostile_beside(daemon, arguments.lease_bytes, arguments.blobs)
            if beside
            else contextlib.nullcontext(),
            bare_loop() as longest,
        ):
            subprocess.run(command, check=True)
            turns = turns_of(daemon.get("/metrics"))
        return turns | {"bare loop": {"max": longest[0]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=parse_count, default="60M")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lease-bytes", type=int, default=256 << 20, help="of a write lease")
    parser.add_argument("--blobs", type=int, default=10_000, help="that the neighbour puts")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hostile", choices=HOSTILE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hostile:
        be_hostile(arguments.address, arguments.hostile, arguments.lease_bytes, arguments.blobs)
    if arguments.loop:
        loop()
        return
    if arguments.trainer:
        train(arguments.address, arguments.params, arguments.steps)
        return
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("at least one round of one step is needed")
    if arguments.quick:
        arguments.params, arguments.steps, arguments.rounds = 8 << 20, 2, 1
        arguments.lease_bytes, arguments.blobs = 16 << 20, 500

    machine = describe_machine()
    runs: dict[str, list[dict[str, dict[str, float]]]] = {"alone": [], "beside a neighbour": []}
    for _ in range(arguments.rounds):
        for name, measured in runs.items():
            measured.append(measure(arguments, beside=name != "alone"))
    figures: list[Figure] = [
        seconds(f"{name}: a turn {text}, {figure}", [each[kind][figure] for each in measured])
        for name, measured in runs.items()
        for kind, text in KINDS.items()
        for figure in (*QUANTILES, "max")
    ]
    figures += [
        ratio(
            f"{name}: turns of at most {1e6 * WANTED_S:.0f} µs {text}",
            [each[kind]["within"] for each in measured],
            [each[kind]["count"] for each in measured],
        )
        for name, measured in runs.items()
        for kind, text in KINDS.items()
    ]
    figures += [
        seconds(
            f"{name}: the longest round of a bare loop on the processor",
            [each["bare loop"]["max"] for each in measured],
        )
        for name, measured in runs.items()
    ]
    write_report(
        arguments.json,
        name="bench_turns",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("params", "steps", "rounds", "lease_bytes", "blobs")
        },
        figures=figures,
        details={"runs": runs},
    )
    for name, measured in runs.items():
        print_phases(name, measured)


if __name__ == "__main__":
    main()
