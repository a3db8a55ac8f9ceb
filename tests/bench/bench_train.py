"""Step times of `memd bench train`'s cases, each beside its bound, one round of each in turn.

Everything resident with durability="none" against plain PyTorch; and a cache for 1/4 and 1/8 of
parameters and states, durability="step" and "every:10", the ordinary step and updates in backward,
each against the roofline, or against max(roofline, backward alone + 2 (state - cache) / bandwidth)
for the ordinary step (memd/bench/roofline.py). The parts of a bound are measured in the process and
the minute of its step, bandwidth with the step's own mix of reads and writes.

Each round is a process with a private daemon of its own. Rounds begin with another case each time.
A case that this version does not have is named as not run; where it was asked for with --only, the
exit code is 1.

Run: python tests/bench/bench_train.py [--params 10M] [--rounds 5] [--only NAME …] [--list]
     [--data DIR] [--seconds-max 720] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.quantities import parse_count
from report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA = Path(__file__).parents[2] / "build" / "bench"
LAST_LINES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    arguments: tuple[str, ...]


def cases() -> list[Case]:
    listed = [Case(name="resident, none", arguments=("--resident", "--durability", "none"))]
    for cache in ("1/4", "1/8"):
        for durability in ("step", "every:10"):
            for in_backward in (False, True):
                step = "in backward" if in_backward else "ordinary"
                flags = ("--step-in-backward",) if in_backward else ()
                listed.append(
                    Case(
                        name=f"cache {cache}, {durability}, {step}",
                        arguments=("--cache", cache, "--durability", durability, *flags),
                    )
                )
    return listed


@dataclass(kw_only=True, slots=True)
class Outcome:
    # Reports of `memd bench train --json`, one for each round.
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rounds: int = 0  # that are whole


def run_case(case: Case, arguments: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memd", "bench", "train", *case.arguments, "--rounds", "1"]
    command += ["--params", str(arguments.params), "--data", str(arguments.data), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measure(arguments: argparse.Namespace, chosen: Sequence[Case]) -> Outcome:
    """Rounds until there are enough; or until another one like the longest so far would take longer
    than is left, but never less than one."""
    outcome = Outcome(reports={case.name: [] for case in chosen})
    began = time.monotonic()
    longest_s = 0.0
    for number in range(arguments.rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest_s > arguments.seconds_max:
            print(f"no time for round {number + 1}", file=sys.stderr)
            break
        first = number % len(chosen)
        for case in (*chosen[first:], *chosen[:first]):
            if case.name in outcome.failed:
                continue
            print(f"round {number + 1}: {case.name}", file=sys.stderr, flush=True)
            done = run_case(case, arguments)
            if done.returncode == 0:
                outcome.reports[case.name].append(json.loads(done.stdout))
                continue
            outcome.failed[case.name] = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        outcome.rounds = number + 1
        longest_s = max(longest_s, time.monotonic() - round_began)
    return outcome


def figures_of_case(name: str, reports: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """All of them, each with the runs of every round; of limits with other names in other rounds
    (which of two bounds is the larger) the name says all."""
    for position, first in enumerate(reports[0]["figures"]):
        records = [report["figures"][position] for report in reports]
        limit_names = dict.fromkeys(record["limit_name"] for record in records)
        has_limit = all(record["limit_runs"] for record in records)
        yield Figure(
            name=f"{name}: {first['name']}",
            unit=first["unit"],
            less_is_better=first["less_is_better"],
            runs=[run for record in records for run in record["runs"]],
            limit_name=" or ".join(filter(None, limit_names)) if has_limit else "",
            limit_runs=[run for record in records for run in record["limit_runs"]]
            if has_limit
            else [],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = cases()
    parser.add_argument("--params", type=parse_count, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in listed])
    parser.add_argument("--list", action="store_true", help="names, and nothing is run")
    parser.add_argument("--data", type=Path, default=DATA, help="a folder on a disk")
    parser.add_argument(
        "--seconds-max", type=float, default=720.0, help="no round begins that would pass this"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(case.name for case in listed))
        return
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    arguments.data.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    chosen = [case for case in listed if case.name in (arguments.only or [case.name])]
    outcome = measure(arguments, chosen)
    write_report(
        arguments.json,
        name="bench_train",
        machine=machine,
        settings={"params": arguments.params, "rounds": outcome.rounds},
        figures=[
            figure
            for name, reports in outcome.reports.items()
            if reports
            for figure in figures_of_case(name, reports)
        ],
        details={
            "failed": outcome.failed,
            "settings": {
                name: reports[0]["settings"] for name, reports in outcome.reports.items() if reports
            },
        },
    )
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if outcome.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
