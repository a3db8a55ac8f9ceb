"""What checksums cost: steps with them beside steps of a build without, a cache for a quarter.

There is no setting that turns checksums off. Two builds of the same sources are made here, under
build/checksums and build/nochecksums, which differ in one file (see MEMD_WITHOUT_CHECKSUMS in
native/CMakeLists.txt) and run in the daemons of this program alone: neither takes the other's
volumes for whole. Rounds alternate, each run a process with a private daemon of its own, as in
bench_durability.py.

Run: python tests/bench/bench_checksums.py [--rounds 5] [--params 30M] [--steps 10]
     [--durability step] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import memd_native
from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.quantities import parse_count
from report import ratio, seconds, write_report

ROOT = Path(__file__).parents[2]
STEPS_LEFT_OUT = 3  # as in bench_durability.py
# In front of the finder of an editable installation, which knows one build alone.
SITECUSTOMIZE = '''"""memd_native._core of another build: see tests/bench/bench_checksums.py."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class OtherBuild:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "memd_native._core":
            return None
        return PathFinder.find_spec(name, [str(Path(__file__).parent / "memd_native")])


sys.meta_path.insert(0, OtherBuild)
'''
BUILDS = {
    "with": ROOT / "build" / "checksums",
    "without": ROOT / "build" / "nochecksums",
}
HASHED = tuple(BUILDS)


def make_build(hashed: str) -> None:
    """Of the sources as they are; a second time it costs a second."""
    build, site = BUILDS[hashed], BUILDS[hashed] / "site"
    without = "OFF" if hashed == "with" else "ON"
    configure = ["cmake", "-S", "native", "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DMEMD_WITHOUT_CHECKSUMS={without}", f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    commands = [
        configure,
        ["cmake", "--build", str(build), "-j", "2"],
        ["cmake", "--install", str(build), "--component", "python", "--prefix", str(site)],
    ]
    for command in commands:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}")
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)


def environment(hashed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(BUILDS[hashed] / "site")}


def check_builds() -> None:
    """A daemon is a child of the trainer and inherits its environment: what this sees it sees."""
    program = "import memd_native; print(memd_native.EXTENTS_ARE_HASHED)"
    for hashed in HASHED:
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment(hashed), stdout=subprocess.PIPE, text=True, check=True
        )
        if done.stdout.strip() != str(hashed == "with"):
            raise SystemExit(f"the build {hashed} checksums says of itself: {done.stdout.strip()}")


def run_child(arguments: argparse.Namespace, hashed: str) -> dict[str, Any]:
    program = str(Path(__file__).with_name("bench_durability.py"))
    command = [sys.executable, program, "--child", arguments.durability, "quarter"]
    command += ["--params", str(arguments.params), "--steps", str(arguments.steps)]
    done = subprocess.run(
        command, env=environment(hashed), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the run {hashed} checksums failed, {done.returncode}")
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def figures_of(runs: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    times = {hashed: [run["seconds"] for run in each] for hashed, each in runs.items()}
    return [
        ratio("step with checksums / without", *times.values(), less_is_better=True),
        *(seconds(f"step {hashed} checksums", values) for hashed, values in times.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=parse_count, default=30_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--durability", choices=("step", "none"), default="step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= STEPS_LEFT_OUT or arguments.rounds < 1:
        parser.error(f"at least one round of more than {STEPS_LEFT_OUT} steps is needed")
    machine = describe_machine()
    for hashed in HASHED:
        make_build(hashed)
    check_builds()
    runs: dict[str, list[dict[str, Any]]] = {hashed: [] for hashed in HASHED}
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for hashed in HASHED if number % 2 == 0 else HASHED[::-1]:
            runs[hashed].append(run_child(arguments, hashed))
    # What checksums are made of, alone: a step hashes what it writes and what it reads.
    hashing = memd_native.measure_hash(bytes=256 << 20, round_count=arguments.rounds)
    rates = [hashing.bytes / 1e9 / each for each in hashing.hash_seconds]
    write_report(
        arguments.json,
        name="bench_checksums",
        machine=machine,
        settings={
            name: getattr(arguments, name) for name in ("params", "steps", "rounds", "durability")
        },
        figures=[*figures_of(runs), Figure(name="hashing, one thread", unit="GB/s", runs=rates)],
    )


if __name__ == "__main__":
    main()
