"""All measuring programs, each result as JSON in tests/bench/out; what `make bench` runs.

Takes some minutes; measure with nothing else running. A program that fails is named at the end, and
the others run all the same.

Run: python run_all.py [--only NAME …] [--list]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "out"
DATA = HERE.parents[1] / "build" / "bench"

# bench_train.py runs `memd bench train`, its cases in turn.
MEMD_BENCH = {
    "io": ["io", "--data", str(DATA)],
    "adam": ["adam"],
    "hash": ["hash"],
    "lease": ["lease", "--data", str(DATA)],
}


def programs() -> dict[str, list[str]]:
    """Commands by the name of their result; those of this folder write it to a file, `memd bench`
    to stdout."""
    listed = {
        path.stem: [sys.executable, str(path), "--json", str(OUT / f"{path.stem}.json")]
        for path in sorted(HERE.glob("bench_*.py"))
    }
    for name, arguments in MEMD_BENCH.items():
        listed[f"memd_bench_{name}"] = [sys.executable, "-m", "memd", "bench", *arguments, "--json"]
    return listed


def run(name: str, command: list[str]) -> bool:
    if not name.startswith("memd_bench_"):
        return subprocess.run(command, check=False).returncode == 0
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode == 0:
        (OUT / f"{name}.json").write_bytes(done.stdout)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = programs()
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(listed))
    parser.add_argument("--list", action="store_true", help="names, and nothing is run")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(listed))
        return
    OUT.mkdir(exist_ok=True)
    DATA.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only or listed:
        began = time.monotonic()
        print(f"{name} …", flush=True)
        if not run(name, listed[name]):
            failed.append(name)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
