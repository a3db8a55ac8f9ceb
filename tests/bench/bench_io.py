"""memd's queue beside fio: bandwidth, and bytes for CPU time, on one file of random bytes.

Both use io_uring with registered buffers and file, O_DIRECT, the same block size and depth, and go
through the file in order. fio runs as lean as it can be told to: without clocks for latencies,
without changing its buffers between writes. Rounds alternate, and a ratio is that of neighbours.
Each is measured with small pages and with pages that lie together, as those of the daemon's pool
do: fewer segments make a transfer faster and cheaper. fio maps memd's buffers, so both use the same
pages: those of a fresh process may lie side by side by chance, and others not.

How long all of it takes is said before it begins, and grows with --seconds, those of one run.

Run: python tests/bench/bench_io.py [--data DIR] [--size 1024] [--block 1024 ...] [--depth 16]
     [--rounds 5] [--seconds 0.5] [--json FILE]                                  (needs fio >= 3.33)
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from memd.bench.figures import Figure
from memd_native import IoBench
from report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUILD = Path(__file__).parents[2] / "build"
MIB = 1 << 20
KIB = 1 << 10
MIXES = ("read", "write")
# Beside the seconds that it measures, a run of fio takes this long to start and to end.
FIO_START_S = 0.5
# A drive that takes longer than this beside its measured seconds does not answer.
FIO_LATE_S = 30.0
# The file is filled at this rate at the least, on what is worth measuring.
FILL_BYTES_PER_S = 500e6


def expected_seconds(*, size: int, block_count: int, rounds: int, seconds: float) -> float:
    """Of everything: each mix with small and with gathered pages, memd and fio in each round."""
    pair_count = block_count * len(MIXES) * 2 * rounds
    return size / FILL_BYTES_PER_S + pair_count * (2 * seconds + FIO_START_S)


def fio(
    path: Path, mix: str, *, size: int, block: int, depth: int, seconds: float, memory: str
) -> dict[str, Any]:
    """What a job of fio moved through the buffers in `memory`, in how many seconds, of them how
    many of a core."""
    command = ["fio", "--name=memd", f"--filename={path}", f"--size={size}", f"--rw={mix}"]
    command += [f"--bs={block}", f"--iodepth={depth}", "--ioengine=io_uring", "--direct=1"]
    command += [
        "--fixedbufs=1",
        "--registerfiles=1",
        "--time_based",
        f"--runtime={round(seconds * 1000)}ms",
    ]
    command += ["--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"]
    command += [f"--iomem=mmapshared:{memory}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds + FIO_LATE_S,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"the drive does not answer: {seconds + FIO_LATE_S:.0f} s for {' '.join(command)}")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"fio failed, {failed.returncode}: {failed.stderr.strip()}")
    (job,) = json.loads(done.stdout)["jobs"]
    if job["error"]:
        sys.exit(f"fio: error {job['error']} of {' '.join(command)}")
    job_seconds = job["job_runtime"] / 1e3
    return {
        "bytes": job["read"]["io_bytes"] + job["write"]["io_bytes"],
        "seconds": job_seconds,
        "cpu_seconds": (job["usr_cpu"] + job["sys_cpu"]) / 100 * job_seconds,
    }


def memd(
    bench: IoBench, mix: str, *, block: int, depth: int, seconds: float, gathered: bool
) -> dict[str, Any]:
    rate = bench.through_queue(
        mix, block_bytes=block, depth=depth, seconds=seconds, gathered=gathered
    )
    return {
        "bytes": rate.read_bytes + rate.written_bytes,
        "seconds": rate.seconds,
        "cpu_seconds": rate.cpu_seconds,
    }


def figures(
    name: str, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> Iterator[Figure]:
    for suffix, unit, key in (
        ("", "GB/s", "seconds"),
        (", bytes for CPU time", "GB/CPU s", "cpu_seconds"),
    ):
        yield Figure(
            name=name + suffix,
            unit=unit,
            runs=[each["bytes"] / 1e9 / max(each[key], 1e-6) for each in ours],
            limit_name="fio",
            limit_runs=[each["bytes"] / 1e9 / max(each[key], 1e-6) for each in theirs],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=BUILD, help="a folder on the disk to measure")
    parser.add_argument("--size", type=int, default=1024, help="of the file, in MiB")
    parser.add_argument("--block", type=int, nargs="+", default=[1024, 4096], help="in KiB")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if min(*arguments.block, arguments.size, arguments.depth, arguments.rounds) < 1:
        parser.error("--size, --block, --depth and --rounds are at least 1")
    if arguments.seconds < 0.1:
        parser.error(f"fio measures nothing in less than 0.1 s: --seconds {arguments.seconds}")
    if shutil.which("fio") is None:
        sys.exit("nothing to compare with: apt-get install fio")
    size = arguments.size * MIB
    expected_s = expected_seconds(
        size=size,
        block_count=len(arguments.block),
        rounds=arguments.rounds,
        seconds=arguments.seconds,
    )
    print(f"bench_io: about {expected_s:.0f} s", file=sys.stderr, flush=True)
    machine = describe_machine()
    found: list[Figure] = []
    bench = IoBench(str(arguments.data.resolve()), bytes=size)
    for block in (kib * KIB for kib in arguments.block):
        for mix in MIXES:
            for gathered in (False, True):
                ours, theirs = [], []
                shared = {
                    "block": block,
                    "depth": arguments.depth,
                    "seconds": arguments.seconds,
                }
                for _ in range(arguments.rounds):
                    ours.append(memd(bench, mix, gathered=gathered, **shared))
                    memory = bench.memory_path
                    theirs.append(fio(Path(bench.path), mix, size=size, memory=memory, **shared))
                pages = "2 MiB" if gathered else "4 KiB"
                found += figures(f"{mix} of {block // KIB} KiB, pages of {pages}", ours, theirs)
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    write_report(
        arguments.json,
        name="bench_io",
        machine={**machine, "fio": version.stdout.strip()},
        settings={
            "file_bytes": size,
            "rounds": arguments.rounds,
            "depth": arguments.depth,
            "seconds": arguments.seconds,
        },
        figures=found,
    )


if __name__ == "__main__":
    main()
