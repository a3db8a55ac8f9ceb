"""The long runs. Each part writes its report under build/soak, and is not run again while the
report is of this commit: a soak that was ended goes on with the first part that has none. CI runs a
twentieth of eight parts, as the Makefile says.

Run: python -m tests.soak.soak [--only NAME…] [--percent N] [--again] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "soak"
LAST_WORDS = 40
POWER_CUTS = (str(ROOT / "build" / "release" / "powercut_soak"),)


@dataclass(frozen=True, slots=True)
class Part:
    """Its command writes a JSON report to the path that it is given, and fails where a promise is
    broken. It takes the number of kills, interrupts, cuts, images, cells or seconds as
    `count_flag`."""

    name: str
    program: tuple[str, ...]
    count_flag: str
    count: int
    flags: tuple[str, ...] = ()

    def command(self, answer: Path) -> tuple[str, ...]:
        count = (self.count_flag, str(self.count))
        return (*self.program, *count, *self.flags, "--json", str(answer))

    def outcome(self, answer: Path, log: Path) -> object:
        return json.loads(answer.read_text())

    @property
    def report(self) -> Path:
        return FOLDER / f"{self.name}-{self.count}.json"

    def reduced_to(self, percent: int) -> Part:
        return replace(self, count=max(1, self.count * percent // 100))


class Target(Part):
    """Targets of the Makefile, whose last words are the report. Where they need root, or a tool
    that is not here, they fail, and say so in a sentence."""

    def command(self, answer: Path) -> tuple[str, ...]:
        # Also where it is empty: it hides those that `make soak` was given.
        arguments = f"ARGS={self.count_flag} {self.count}" if self.count_flag else "ARGS="
        return ("make", "--no-print-directory", *self.program, arguments)

    def outcome(self, answer: Path, log: Path) -> object:
        return log.read_text().splitlines()[-LAST_WORDS:]


def python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def live_kills(
    what: str, dtype: str, durability: str, memory: str, count: int, *, early: bool = False
) -> Part:
    name = f"kill-{what}-{dtype}-{durability.replace(':', '')}-{memory}{'-early' * early}"
    flags: tuple[str, ...] = ("--what", what, "--dtype", dtype, "--durability", durability)
    flags += ("--memory", memory, "--seed", "2")
    flags += ("--early",) * early
    return Part(name, python("tests.soak.live_kills"), "--count", count, flags)


def rank_kills(what: str, micro_count: int, durability: str, count: int) -> Part:
    """With several micro-batches a step, gradients are accumulated."""
    name = f"kill-{what}-of-2-{micro_count}-{durability.replace(':', '')}"
    flags = ("--what", what, "--micro", str(micro_count), "--durability", durability, "--seed", "2")
    return Part(name, python("tests.soak.rank_kills"), "--count", count, flags)


PARTS = (
    live_kills("daemon", "fp32", "step", "resident", 60),
    live_kills("daemon", "fp32", "step", "short", 50),
    live_kills("daemon", "bf16", "step", "resident", 40),
    live_kills("daemon", "bf16", "step", "short", 50),
    live_kills("daemon", "fp32", "every:5", "short", 40),
    live_kills("daemon", "bf16", "every:3", "resident", 20),
    live_kills("daemon", "fp32", "none", "resident", 20),
    live_kills("daemon", "bf16", "none", "short", 20),
    live_kills("trainer", "fp32", "step", "short", 50),
    live_kills("trainer", "bf16", "step", "resident", 50),
    live_kills("both", "fp32", "step", "short", 50),
    live_kills("both", "bf16", "step", "resident", 50),
    live_kills("both", "fp32", "every:5", "resident", 30),
    live_kills("daemon", "fp32", "step", "short", 50, early=True),
    live_kills("daemon", "bf16", "step", "resident", 40, early=True),
    live_kills("daemon", "fp32", "every:3", "short", 40, early=True),
    live_kills("daemon", "bf16", "none", "short", 20, early=True),
    live_kills("trainer", "bf16", "step", "short", 50, early=True),
    live_kills("both", "fp32", "step", "short", 50, early=True),
    live_kills("both", "bf16", "every:3", "short", 30, early=True),
    rank_kills("rank", 1, "step", 50),
    rank_kills("rank", 3, "step", 50),
    rank_kills("ranks", 1, "step", 15),
    rank_kills("ranks", 3, "every:3", 15),
    rank_kills("daemon", 1, "step", 50),
    rank_kills("daemon", 3, "every:3", 50),
    Part("conformance", python("tests.numerics.conformance"), "--count", 522),
    *(
        Part(
            f"kill-{killed}-{what}",
            python("tests.soak.checkpoint_kills"),
            "--count",
            100,
            ("--what", what, "--killed", killed),
        )
        for what in ("save", "dcp-save", "async-save", "load", "dcp-load", "state")
        for killed in ("trainer", "daemon")
    ),
    *(
        Part(
            f"kill-{killed}-snapshot-{what}",
            python("tests.soak.snapshot_kills"),
            "--count",
            100,
            ("--what", what, "--killed", killed),
        )
        for what in ("create", "drop")
        for killed in ("caller", "daemon")
    ),
    *(
        Part(
            f"kill-{killed}-export-{file_format}",
            python("tests.soak.export_kills"),
            "--count",
            100,
            ("--killed", killed, "--format", file_format),
        )
        for file_format in ("safetensors", "dcp")
        for killed in ("command", "daemon")
    ),
    Part("killed-clients", python("tests.soak.lease_kills"), "--count", 1000),
    *(
        Part(
            f"evaluations-{memory}",
            python("tests.soak.evaluations"),
            "--seconds",
            60,
            ("--threads", str(threads), "--memory", memory),
        )
        for memory, threads in (("resident", 3), ("short", 4))
    ),
    *(
        Part(
            f"interrupts{flag}",
            python("tests.soak.interrupts"),
            "--count",
            1000,
            (flag,) * bool(flag),
        )
        for flag in ("", "--tracks")
    ),
    # Ten seeds of each of the 324 cells, 200 of each of the cover's 36.
    Part("device-cells", python("tests.soak.device_cells"), "--count", 3240),
    Part("device-cover", python("tests.soak.device_cells"), "--count", 7200, ("--cover",)),
    Part("larger-than-memory", python("tests.soak.larger_than_memory"), "--millions", 750),
    Part("upgrades", python("tests.compat.upgrades"), "--count", 5),
    Part("power-cuts", POWER_CUTS, "--states", 1_000_000, ("--restarts", "1")),
    Part("power-cuts-early", POWER_CUTS, "--states", 200_000, ("--early", "1")),
    Part("power-cuts-loads", POWER_CUTS, "--states", 200_000, ("--loads", "1", "--restarts", "1")),
    Part("damaged-images", POWER_CUTS, "--images", 100_000),
    *(
        Part(
            f"power-cuts-{file_system}",
            python("tests.faults.file_system_power_cut"),
            "--cuts",
            50,
            ("--file-system", file_system),
        )
        for file_system in ("ext4", "xfs")
    ),
    # As root, and longer than an hour together.
    Target("operator", ("operator",), "", 1),
    Target("package", ("try-deb",), "", 1),
    Target("containers", ("try-containers",), "--kills", 20),
    Target("wheels", ("wheels", "try-wheels"), "", 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument(
        "--percent",
        type=int,
        default=100,
        help="of the kills, cuts, images and seconds of each part",
    )
    parser.add_argument("--again", action="store_true", help="run what has a report already, too")
    parser.add_argument("--list", action="store_true", help="what there is and what has a report")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    commit = _commit()
    chosen = [
        part.reduced_to(arguments.percent)
        for part in PARTS
        if arguments.only is None or part.name in arguments.only
    ]
    if arguments.list:
        for part in chosen:
            print(f"{part.name:36} {'done' if _is_done(part, commit) else '-'}")
        return 0
    began = time.monotonic()
    failed = []
    for index, part in enumerate(chosen, 1):
        if _is_done(part, commit) and not arguments.again:
            print(f"[{index}/{len(chosen)}] {part.name}: done before")
            continue
        print(f"[{index}/{len(chosen)}] {part.name} …", flush=True)
        seconds, status = _run(part, commit)
        print(
            f"    {'passed' if status == 0 else f'FAILED ({status})'} in {seconds:.0f} s",
            flush=True,
        )
        if status != 0:
            failed.append(part.name)
    print(f"soak: {(time.monotonic() - began) / 60:.1f} min", end="")
    print(f", failed: {', '.join(failed)}" if failed else ", nothing failed")
    return 1 if failed else 0


def _run(part: Part, commit: str) -> tuple[float, int]:
    unfinished = part.report.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    began = time.monotonic()
    log = part.report.with_suffix(".log")
    with log.open("w") as output:
        answer = subprocess.run(
            part.command(unfinished),
            stdout=output,
            stderr=output,
            check=False,
            cwd=ROOT,
            env=outside_of_make(),
        )
    seconds = time.monotonic() - began
    if answer.returncode != 0:
        print(log.read_text()[-3000:])
        return seconds, answer.returncode
    outcome = part.outcome(unfinished, log)
    report = {"commit": commit, "seconds": round(seconds, 1), "outcome": outcome}
    part.report.write_text(json.dumps(report, indent=2) + "\n")
    unfinished.unlink(missing_ok=True)
    print("    " + json.dumps(outcome)[:500])
    return seconds, 0


def outside_of_make() -> dict[str, str]:
    """Without the flags that `make soak` hands to a make below it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def _is_done(part: Part, commit: str) -> bool:
    if not commit or not part.report.exists():
        return False
    done: bool = json.loads(part.report.read_text())["commit"] == commit
    return done


def _commit() -> str:
    """What is tested: the commit, and whether the sources differ from it. Empty where there is no
    git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
