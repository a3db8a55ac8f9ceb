"""Ranks of one node that train a GPT together: seconds a step, and the memory of all processes.

Contestants: DistributedDataParallel with torch's fused AdamW; FSDP2 with CPUOffloadPolicy; memd's
`offload` (ZeRO-3, one copy a node); DistributedDataParallel with memd's optimizer (ZeRO-1), and
with its communication hook too (ZeRO-2); DeepSpeed's ZeRO-1, 2 and 3. Each rank has one thread of
torch and gloo on loopback; memd's job stays in memory, with durability none. Runs alternate, each
in processes of its own. Who cannot run here is reported with its error.

Memory is the peak of the proportional set sizes of all ranks and the daemon, in runs that are not
timed: the kernel's walk over them stops the processes. memd's is held against what one rank needs,
and what each further one needs anyway: plain PyTorch's less parameters, gradients and moments.

Run: tests/bench/peers/set_up.sh, then python bench_ranks.py [--rounds 5] [--world 2]
    [--only ddp memd] [--params 60M] [--dtype fp32] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.model import shape_for
from peers.watching import memory_of_all, process_memory
from ranks_training import DTYPES, add_arguments, pool_bytes
from report import byte_count, ratio, seconds, write_report
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTESTANTS = (
    *("ddp", "fsdp", "memd", "memd-zero1", "memd-zero2"),
    *("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"),
)
PEERS = Path(__file__).parents[2] / "build" / "peers"
PEERS_PYTHON = PEERS / "venv" / "bin" / "python"
TRAINING = Path(__file__).with_name("ranks_training.py")
SAMPLE_INTERVAL_S = 0.1
PASSED = ("params", "dtype", "batch", "sequence", "warm", "steps")
LAST_LINES = 8
# All ranks may take so much of one rank's memory, beside what PyTorch needs in each.
MEMORY_LIMIT = 1.05


class ContestantFailed(Exception):
    """The message holds what its first failed rank said last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    step_seconds: float
    loss: float
    peak_bytes: int | None  # if it was looked for


@contextmanager
def daemon_of(contestant: str, arguments: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """An address, and the processes that serve there."""
    if not contestant.startswith("memd"):
        yield "-", []
        return
    pool = pool_bytes(arguments.params, DTYPES[arguments.dtype])
    with running_daemon(host=f"{pool + (64 << 20)}B", nvme=f"{3 * pool}B") as daemon:
        yield daemon.address, [daemon.process.pid]


def peak_of(process_ids: list[int], first_rank: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Until rank 0 says that it is done: the largest sum, and what it has printed."""
    peak = 0
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(lines_until_done(first_rank)))
    reader.start()
    while reader.is_alive():
        found = []
        for process_id in process_ids:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found.append(process_memory(Path(f"/proc/{process_id}/smaps_rollup").read_text()))
        peak = max(peak, memory_of_all(found))
        reader.join(SAMPLE_INTERVAL_S)
    return peak, lines


def lines_until_done(first_rank: subprocess.Popen[str]) -> list[str]:
    lines = []
    assert first_rank.stdout is not None
    for line in first_rank.stdout:
        lines.append(line)
        if json.loads(line)["event"] == "done":
            break
    return lines


@contextmanager
def ranks_of(
    contestant: str, address: str, folder: Path, arguments: argparse.Namespace, *, world: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Started, and none of them is left."""
    options = [f"--{name}={getattr(arguments, name)}" for name in PASSED]
    python = Path(sys.executable)
    environment = dict(os.environ)
    if contestant.startswith("deepspeed"):
        python = PEERS_PYTHON
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"  # ninja
        environment["TORCH_EXTENSIONS_DIR"] = str(PEERS / "operators")
    ranks = []
    try:
        for rank in range(world):
            place = [str(rank), str(world), str(folder / "meeting"), address]
            with (folder / f"{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [str(python), str(TRAINING), contestant, *place, *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                )
            ranks.append(process)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run(contestant: str, arguments: argparse.Namespace, *, world: int, has_memory: bool) -> Run:
    with (
        tempfile.TemporaryDirectory() as name,
        daemon_of(contestant, arguments) as (address, daemon_ids),
        ranks_of(contestant, address, Path(name), arguments, world=world) as ranks,
    ):
        peak = None
        if has_memory:
            peak, lines = peak_of([*daemon_ids, *(each.pid for each in ranks)], ranks[0])
        else:
            lines = lines_until_done(ranks[0])
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
        for number, process in enumerate(ranks):
            if process.wait():
                log = (Path(name) / f"{number}.log").read_text().splitlines()
                raise ContestantFailed("\n".join(log[-LAST_LINES:]))
    (event,) = (each for each in map(json.loads, lines) if each["event"] == "steps")
    return Run(step_seconds=event["seconds"], loss=event["loss"], peak_bytes=peak)


def figures_of(times: dict[str, list[float]], peaks: dict[str, int]) -> list[Figure]:
    times = {name: runs for name, runs in times.items() if runs}
    figures = [seconds(f"{name}: step", runs) for name, runs in times.items()]
    for name in times:
        if not name.startswith("memd"):
            continue
        figures += [
            ratio(f"{other} / {name}: step", times[other], times[name])
            for other in times
            if not other.startswith("memd")
        ]
    return figures + [byte_count(f"{name}: memory", [peak]) for name, peak in peaks.items()]


def memory_of_ranks(arguments: argparse.Namespace, peak: int) -> list[Figure]:
    """That of all ranks of memd, beside what one needs, and each other one anyway."""
    one, plain = (
        run(name, arguments, world=1, has_memory=True).peak_bytes for name in ("memd", "plain")
    )
    assert one is not None
    assert plain is not None
    shape = shape_for(arguments.params, sequence=arguments.sequence)
    # A parameter, its gradient and two moments.
    state = 4 * DTYPES[arguments.dtype].itemsize * shape.parameter_count
    wanted = MEMORY_LIMIT * one + (arguments.world - 1) * (plain - state)
    return [
        byte_count("memd: memory of one rank", [one]),
        byte_count("plain: memory beside state", [plain - state]),
        Figure(
            name="memd: memory of all ranks",
            unit="bytes",
            runs=[peak],
            less_is_better=True,
            limit_name="wanted",
            limit_runs=[wanted],
        ),
    ]


def formulas(arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes of state on all ranks together, by ZeRO's own formulas: parameters and gradients of the
    dtype, and DeepSpeed's fp32 masters and moments."""
    count = shape_for(arguments.params, sequence=arguments.sequence).parameter_count
    size = DTYPES[arguments.dtype].itemsize
    states = 8 if arguments.dtype == "fp32" else 12
    world = arguments.world
    return {
        "zero1": count * (2 * size * world + states),
        "zero2": count * (size * world + size + states),
        "zero3": count * (2 * size + states),
        "ddp": count * world * (2 * size + states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, help="0: memory alone")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("plain", *CONTESTANTS), default=CONTESTANTS)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    if min(arguments.world, arguments.warm, arguments.steps) < 1:
        parser.error("--world, --warm and --steps are at least 1")

    machine = describe_machine()
    times: dict[str, list[float]] = {name: [] for name in arguments.only}
    losses: dict[str, float] = {}
    errors: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for number in range(arguments.rounds + 1):
        for name in tuple(times):
            began = time.monotonic()
            try:
                made = run(name, arguments, world=arguments.world, has_memory=not number)
            except ContestantFailed as error:
                errors[name] = str(error)
                del times[name]
                print(f"{name} fails here:\n{error}", file=sys.stderr)
                continue
            if made.peak_bytes is not None:
                peaks[name] = made.peak_bytes
            else:
                times[name].append(made.step_seconds)
            losses[name] = made.loss
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    figures = figures_of(times, peaks)
    if "memd" in peaks and arguments.world > 1:
        figures += memory_of_ranks(arguments, peaks["memd"])
    write_report(
        arguments.json,
        name="bench_ranks",
        machine=machine,
        settings={name: getattr(arguments, name) for name in (*PASSED, "rounds", "world", "only")},
        figures=figures,
        details={
            "losses": losses,
            "formulas_bytes": formulas(arguments),
            "errors": errors,
            "medians": {name: statistics.median(runs) for name, runs in times.items() if runs},
        },
    )


if __name__ == "__main__":
    main()
