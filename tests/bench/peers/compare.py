"""The same GPT-2 trained by plain PyTorch, DeepSpeed ZeRO-3 and memd, side by side on the CPU.

In each round every contestant trains once, in a process of its own, so that a machine that gets
slower does so for all. Of each run count the steps after the first two: the median of their times,
their mean (which has what durability="every:10" puts on disk at every tenth), and bytes moved as
the kernel counts them. Memory is the proportional set size of the process and its descendants, a
private daemon among them, sampled from outside except while steps are timed.

Losses must have the same bits for plain PyTorch and memd in fp32, and for all of memd in bf16:
otherwise, and where a contestant fails, the exit code is 1.

Run: set_up.sh, then python compare.py [--model 60m] [--dtype fp32] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine
from memd.bench.figures import Figure
from memd.bench.machine import file_system
from memd.demo import sizes
from peers.train import BATCHES, DTYPES, SHAPES, SUB_GROUP_SIZE
from peers.watching import ContestantFailed, Watched, watch
from report import byte_count, ratio, seconds, write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


PEERS = Path(__file__).parents[3] / "build" / "peers"
PEERS_PYTHON = PEERS / "venv" / "bin" / "python"

GIB = 1 << 30
# What ZeRO-Infinity took in all with its states on NVMe, where it took least: memd gets no more
# than that on a machine where its rival takes more.
EQUAL_BYTES = {("60m", "fp32"): int(3.1 * GIB), ("311m", "bf16"): int(7.3 * GIB)}
# Of it the interpreter, torch, activations, and both processes' code.
BESIDE_POOL_BYTES = int(0.7 * GIB)
# A promise about memory as such: everything in 2.5 GiB.
SMALL_POOL_BYTES = {("311m", "bf16"): int(1.5 * GIB)}
# Of everything, where memd has the small pool.
SMALL_BYTES = {("311m", "bf16"): int(2.5 * GIB)}
QUARTER = 0.25
RIVAL = "deepspeed-nvme"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    name: str
    program: str  # as train.py knows it
    pool_bytes: int = 0  # of memd, as the rest is
    durability: str = "step"
    step_in_backward: bool = False
    allowed_bytes: int = 0  # of memory in all; 0: no promise

    @property
    def is_memd(self) -> bool:
        return self.program == "memd"

    def command(self, arguments: argparse.Namespace, data: Path) -> list[str]:
        python = PEERS_PYTHON if self.program.startswith("deepspeed") else Path(sys.executable)
        command = [str(python), str(Path(__file__).with_name("train.py")), self.program]
        for name in ("model", "dtype", "batch", "sequence", "steps", "threads", "sub_group"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command += ["--data", str(data)]
        if self.is_memd:
            nvme_bytes = volume_bytes(arguments.model, arguments.dtype)
            command += ["--host", f"{self.pool_bytes}B", "--nvme", f"{nvme_bytes}B"]
            command += ["--durability", self.durability]
        if self.step_in_backward:
            command += ["--step-in-backward"]
        return command


def gradient_element_bytes(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def volume_bytes(model: str, dtype: str) -> int:
    volume = sizes.volume(
        SHAPES[model].parameter_count, gradient_element_bytes=gradient_element_bytes(dtype)
    )
    # durability="every:k" keeps the state on disk while two later ones of what is streamed come.
    return volume.total_bytes + volume.state_bytes


def pool_bytes(model: str, dtype: str, *, cache_fraction: float) -> int:
    shape = SHAPES[model]
    return sizes.host_pool(
        shape.parameter_count,
        gradient_element_bytes=gradient_element_bytes(dtype),
        cache_fraction=cache_fraction,
        module_elements_max=shape.module_elements_max,
    ).total_bytes


def contestants(model: str, dtype: str) -> list[Contestant]:
    size = (model, dtype)
    # Where the rival was not measured: everything, and the next gradients.
    equal_bytes = (
        EQUAL_BYTES[size] - BESIDE_POOL_BYTES
        if size in EQUAL_BYTES
        else pool_bytes(model, dtype, cache_fraction=2.0)
    )
    quarter_bytes = pool_bytes(model, dtype, cache_fraction=QUARTER)

    def memd(name: str, bytes_: int, durability: str, **more: Any) -> Contestant:
        return Contestant(
            name=name, program="memd", pool_bytes=bytes_, durability=durability, **more
        )

    listed = [
        Contestant(name="plain", program="plain"),
        Contestant(name="deepspeed-cpu", program="deepspeed-cpu"),
        Contestant(name=RIVAL, program=RIVAL),
        memd("memd", equal_bytes, "every:10", allowed_bytes=EQUAL_BYTES.get(size, 0)),
        memd("memd-quarter", quarter_bytes, "every:10"),
        memd("memd-quarter-in-backward", quarter_bytes, "every:10", step_in_backward=True),
        memd("memd-quarter-step", quarter_bytes, "step"),
    ]
    if size in SMALL_POOL_BYTES:
        small = memd(
            "memd-small-pool", SMALL_POOL_BYTES[size], "step", allowed_bytes=SMALL_BYTES[size]
        )
        listed.append(small)
    return listed


@dataclass(kw_only=True, slots=True)
class Outcome:
    runs: dict[str, list[Watched]]
    failed: dict[str, str]

    def complete(self, rounds: int) -> dict[str, list[Watched]]:
        return {name: runs for name, runs in self.runs.items() if len(runs) == rounds}


def run_all(arguments: argparse.Namespace, chosen: Sequence[Contestant]) -> Outcome:
    outcome = Outcome(runs={each.name: [] for each in chosen}, failed={})
    for round_number in range(arguments.rounds):
        # Another one begins each time: what comes after it finds the disk as it left it.
        first = round_number % len(chosen)
        for contestant in (*chosen[first:], *chosen[:first]):
            if contestant.name in outcome.failed:
                continue
            print(f"round {round_number + 1}/{arguments.rounds}: {contestant.name}", flush=True)
            try:
                watched = run_one(arguments, contestant)
            except ContestantFailed as failure:
                outcome.failed[contestant.name] = str(failure)
                print(failure, file=sys.stderr)
                continue
            outcome.runs[contestant.name].append(watched)
            print(f"  {statistics.median(watched.step_seconds):.3f} s a step", flush=True)
    return outcome


def run_one(arguments: argparse.Namespace, contestant: Contestant) -> Watched:
    environment = {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PATH": f"{PEERS_PYTHON.parent}{os.pathsep}{os.environ['PATH']}",  # ninja
        "TORCH_EXTENSIONS_DIR": str(PEERS / "operators"),
    }
    with tempfile.TemporaryDirectory(dir=arguments.data, prefix=f"{contestant.name}-") as data:
        return watch(
            contestant.command(arguments, Path(data)),
            environment=environment,
            timeout_s=arguments.timeout,
            observe=lambda event: None,
        )


MOVED: dict[str, Callable[[Watched], float]] = {
    "read a step": lambda run: run.read_bytes_per_step,
    "written a step": lambda run: run.written_bytes_per_step,
}


def moved_figures(runs: dict[str, list[Watched]], parameter_count: int) -> list[Figure]:
    """Bytes each way for a parameter, and against the rival."""
    listed: list[Figure] = []
    for way, bytes_of in MOVED.items():
        moved = {name: [bytes_of(run) for run in watched] for name, watched in runs.items()}
        for name, values in moved.items():
            if any(values):
                listed.append(
                    Figure(
                        name=f"{name}: {way}, for a parameter",
                        unit="B",
                        runs=[value / parameter_count for value in values],
                        less_is_better=True,
                    )
                )
            if name.startswith("memd") and all(moved.get(RIVAL, [0])):
                listed.append(
                    ratio(f"{name} / {RIVAL}: {way}", values, moved[RIVAL], less_is_better=True)
                )
    return listed


def memory_figure(name: str, watched: Sequence[Watched], allowed_bytes: int) -> Figure:
    return Figure(
        name=f"{name}: memory, steady",
        unit="bytes",
        runs=[run.memory_steady for run in watched],
        limit_name="allowed" if allowed_bytes else "",
        limit_runs=[allowed_bytes] * len(watched) if allowed_bytes else [],
        less_is_better=True,
    )


def figures(
    runs: dict[str, list[Watched]],
    parameter_count: int,
    allowed_bytes: dict[str, int] | None = None,
) -> list[Figure]:
    """`allowed_bytes` of memory, by contestant."""
    times = {
        name: [statistics.median(run.step_seconds) for run in watched]
        for name, watched in runs.items()
    }
    means = {
        name: [statistics.mean(run.step_seconds) for run in watched]
        for name, watched in runs.items()
    }
    listed: list[Figure] = []
    for name, watched in runs.items():
        listed += [
            seconds(f"{name}: step", times[name]),
            seconds(f"{name}: step, mean", means[name]),
            memory_figure(name, watched, (allowed_bytes or {}).get(name, 0)),
            byte_count(f"{name}: memory, peak", [run.memory_peak for run in watched]),
            byte_count(
                f"{name}: memory, peak with set-up", [run.memory_peak_of_all for run in watched]
            ),
            byte_count(f"{name}: read a step", [run.read_bytes_per_step for run in watched]),
            byte_count(f"{name}: written a step", [run.written_bytes_per_step for run in watched]),
        ]
    for name, runs_of in times.items():
        if name.startswith("memd"):
            if RIVAL in runs:
                steady = [
                    [run.memory_steady for run in watched] for watched in (runs[name], runs[RIVAL])
                ]
                listed.append(
                    ratio(f"{name} / {RIVAL}: memory, steady", *steady, less_is_better=True)
                )
            for other in ("plain", RIVAL):
                if other in times:
                    listed += [
                        ratio(f"{other} / {name}: step", times[other], runs_of),
                        ratio(f"{other} / {name}: step, mean", means[other], means[name]),
                    ]
    return listed + moved_figures(runs, parameter_count)


def compare_losses(runs: dict[str, list[Watched]], dtype: str) -> dict[str, Any]:
    """Which contestants had not the bits that they must have, and how far all are from the first
    one; DeepSpeed's update rounds in other places, and in bf16 plain PyTorch has no fp32 master."""
    must_equal = [name for name in runs if name.startswith("memd")]
    if dtype == "fp32" and "plain" in runs:
        must_equal.insert(0, "plain")
    reference = runs[must_equal[0]][0].losses if must_equal else []
    first = next(iter(runs))
    return {
        "must_equal": must_equal,
        "differing": [
            name for name in must_equal if any(run.losses != reference for run in runs[name])
        ],
        "losses": {name: watched[0].losses for name, watched in runs.items()},
        f"difference_max_from_{first}": {
            name: max(
                abs(loss - expected)
                for loss, expected in zip(watched[0].losses, runs[first][0].losses, strict=True)
            )
            for name, watched in runs.items()
        },
    }


def run_record(run: Watched) -> dict[str, Any]:
    return {
        "step_seconds": run.step_seconds,
        "memory_steady_bytes": run.memory_steady,
        "memory_peak_bytes": run.memory_peak,
        "memory_peak_with_set_up_bytes": run.memory_peak_of_all,
        "read_bytes_per_step": run.read_bytes_per_step,
        "written_bytes_per_step": run.written_bytes_per_step,
        "own_read_bytes_per_step": run.counted_per_step("read_bytes"),
        "own_written_bytes_per_step": run.counted_per_step("written_bytes"),
        "threads": run.only("ready")["threads"],
    }


def versions_of_peers() -> dict[str, str]:
    """Without importing them: DeepSpeed's import alone takes seconds and prints."""
    program = (
        "from importlib.metadata import version; import json; "
        "print(json.dumps({name: version(name) for name in ('deepspeed', 'torch', 'numpy')}))"
    )
    command = [str(PEERS_PYTHON), "-c", program]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(SHAPES), default="60m")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sub-group", type=int, default=SUB_GROUP_SIZE, help="of DeepSpeed")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants; default: all")
    parser.add_argument("--data", type=Path, default=PEERS / "data", help="a folder on a disk")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    listed = contestants(arguments.model, arguments.dtype)
    names = arguments.only or [each.name for each in listed]
    unknown = set(names) - {each.name for each in listed}
    if unknown:
        parser.error(
            f"no contestant {', '.join(sorted(unknown))} for this model; there are "
            f"{', '.join(each.name for each in listed)}"
        )
    chosen = [each for each in listed if each.name in names]
    if any(each.program.startswith("deepspeed") for each in chosen) and not PEERS_PYTHON.exists():
        parser.error(f"{PEERS_PYTHON} is missing: run tests/bench/peers/set_up.sh first")
    arguments.data.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()

    outcome = run_all(arguments, chosen)
    complete = outcome.complete(arguments.rounds)
    if not complete:
        raise SystemExit("no contestant came through")
    losses = compare_losses(complete, arguments.dtype)
    write_report(
        arguments.json,
        name=f"peers_{arguments.model}_{arguments.dtype}",
        machine={
            **machine,
            "file_system": file_system(arguments.data),
            "peers": versions_of_peers() if PEERS_PYTHON.exists() else {},
        },
        settings={
            **{
                name: getattr(arguments, name)
                for name in (
                    "model",
                    "dtype",
                    "batch",
                    "sequence",
                    "steps",
                    "rounds",
                    "threads",
                    "sub_group",
                )
            },
            "parameter_count": SHAPES[arguments.model].parameter_count,
            "batches": BATCHES,
            "contestants": [dataclasses.asdict(each) for each in chosen],
        },
        figures=figures(
            complete,
            SHAPES[arguments.model].parameter_count,
            {each.name: each.allowed_bytes for each in chosen},
        ),
        details={
            "losses": losses,
            "failed": outcome.failed,
            "runs": {name: [run_record(run) for run in runs] for name, runs in complete.items()},
        },
    )
    for name in losses["differing"]:
        print(f"{name}: losses differ from {losses['must_equal'][0]}'s", file=sys.stderr)
    for name, reason in outcome.failed.items():
        print(f"{name} failed: {reason.splitlines()[-1]}", file=sys.stderr)
    raise SystemExit(1 if losses["differing"] or outcome.failed else 0)


if __name__ == "__main__":
    main()
