"""What one more shard costs, in time and memory, from 10² to 10⁵ of them in one job.

`small`: parameters of 16 elements, thousands to a bucket, that live through two steps: each is
declared, written, leased, given a gradient, updated and committed. `large`: parameters of one
tile (256 Ki elements), each with a bucket of its own, which are declared and committed. Their
bytes are never written. Admission counts two copies of value and moments, and a gradient: 10³ have
a volume of 7.5 GB, and more are not measured. Small ones show what a shard costs, large ones what
an entry with its moments does. `blobs`: of 16 bytes, declared one by one as Session.put() does it.

Every count is a process of its own, which runs the daemon's native half and a trainer's native
session. Memory is what malloc() has given out, of one heap for all threads, and beside it pages of
shared memory, and of both the part that grew. Sizes do not depend on the machine's load; times do.
Also measured: a plan of 10⁵ uses with what eviction makes of it.

Run: python tests/bench/bench_growth.py [--small 100 1000 …] [--large 100 …] [--blobs 100 …]
     [--rounds 1] [--data DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: F401 # leases are tensors

import memd_native
from machine import describe_machine
from memd.bench.figures import Figure
from memd_proto.v1 import types_pb2
from report import write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DATA = Path(__file__).parents[2] / "build" / "bench"
COUNTS = {
    "small": (100, 1_000, 10_000, 100_000),
    "large": (100, 1_000),
    "blobs": (100, 1_000, 10_000, 100_000),
}
ELEMENTS = {"small": 16, "large": 256 * 1024, "blobs": 4}
MIB = 1 << 20
# A small shard's value, gradient and moments have 32 elements each, where shards are aligned.
HOST_BYTES_EACH = 640
# A large one has a value and two moments of 1 MiB each, twice, and a gradient.
NVME_BYTES_EACH = {"small": 2048, "large": 7 * MIB + 2048, "blobs": 2048}
TIMEOUT_S = 600.0
FLOAT32 = types_pb2.D_TYPE_FLOAT32
ENTRY_BYTES_MAX = 400
PLAN_USES = 100_000
PLAN_SECONDS_MAX = 0.1


# ---- One count, in a process of its own ----------------------------------------------------------


class MallocInformation(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 or later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """Given out by malloc(), by mmap for large pieces too. One heap: see MALLOC_ARENA_MAX."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInformation
    gc.collect()
    now = mallinfo2()
    return int(now.uordblks + now.hblkhd)


def shared_bytes(name: str) -> int:
    """Of mappings of the memory file `name`, pages that are there."""
    total = 0
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head, _, rest = part.partition("\n")
        found = re.search(r"^Rss: +(\d+) kB", rest, re.MULTILINE)
        if f"/memfd:{name}" in head and found:
            total += int(found[1]) << 10
    return total


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, phase: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = do()
        self.seconds[phase] = time.perf_counter() - began
        return done


def declare(
    server: memd_native.Server,
    session_id: int,
    kind: str,
    specs: Iterator[memd_native.ShardSpec],
) -> list[int]:
    """Ids."""
    if kind == "blobs":
        return [server.declare(session_id, [spec])[0][0].shard_id for spec in specs]
    infos, _ = server.declare(session_id, specs)
    return [info.shard_id for info in infos]


def specs_of(kind: str, count: int) -> Iterator[memd_native.ShardSpec]:
    """One by one, as the daemon's service makes them."""
    return (
        memd_native.ShardSpec(
            name=f"layers.{number // 10}.linear{number % 10}.weight",
            kind=types_pb2.SHARD_KIND_BLOB if kind == "blobs" else types_pb2.SHARD_KIND_PARAMETER,
            dtype=FLOAT32,
            shape=[ELEMENTS[kind]],
            tier=types_pb2.TIER_NVME,
        )
        for number in range(count)
    )


def connect(server: memd_native.Server, grant: Any, theirs: socket.socket) -> Any:
    return memd_native.ClientSession(
        session_fd=os.dup(grant.session_fd),
        table_fd=os.dup(grant.table_fd),
        doorbell_fd=os.dup(grant.doorbell_fd),
        connection_fd=theirs.detach(),
        segment_bytes=grant.segment_bytes,
        arena_reserved_bytes=grant.arena_reserved_bytes,
        more_segments=lambda first: server.segment_fds(grant.session_id, first),
    )


def train(server: memd_native.Server, grant: Any, ids: Sequence[int], watch: Stopwatch) -> None:
    ours, theirs = socket.socketpair()
    client = connect(server, grant, theirs)
    shape = [ELEMENTS["small"]]
    groups = [(memd_native.AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, True), list(ids))]

    def lease_all(part: int, mode: int) -> None:
        for shard_id in ids:
            tensor = client.lease(shard_id, part, mode, FLOAT32, shape, TIMEOUT_S)
            if mode != memd_native.MODE_READ:
                tensor.fill_(0.01)

    watch.time("write", lambda: lease_all(memd_native.PART_VALUE, memd_native.MODE_OVERWRITE))
    for suffix in ("first ", ""):
        watch.time(
            f"{suffix}read", lambda: lease_all(memd_native.PART_VALUE, memd_native.MODE_READ)
        )
        watch.time(
            f"{suffix}gradient",
            lambda: lease_all(memd_native.PART_GRADIENT, memd_native.MODE_OVERWRITE),
        )
        watch.time(
            f"{suffix}step", lambda: server.step(grant.session_id, groups, timeout_s=TIMEOUT_S)
        )
    client.close()
    ours.close()


def run_child(kind: str, count: int, folder: Path) -> None:
    """Prints what it measured as JSON."""
    train_all = kind == "small"
    bytes_each = HOST_BYTES_EACH if train_all else 0
    server = memd_native.Server(
        directories=[str(folder)],
        nvme_bytes=256 * MIB + NVME_BYTES_EACH[kind] * count,
        host_bytes=128 * MIB + bytes_each * count,
        lock_required=False,
        jobs_expected=1,
    )
    watch = Stopwatch()
    job = server.open_job("growth", uid=os.getuid())
    grant = server.attach(job.job_id)
    declare(server, grant.session_id, kind, specs_of(kind, 1))  # what only the first one costs
    heap_before, shared_before = heap_bytes(), shared_bytes("memd-")
    specs = specs_of(kind, count)
    ids = watch.time("declare", partial(declare, server, grant.session_id, kind, specs))
    del specs
    # Of Python's, what is left is the list of ids; they themselves lie where malloc() does not.
    ids_bytes = sys.getsizeof(ids)
    heap_declared = heap_bytes() - ids_bytes
    if train_all:
        train(server, grant, ids, watch)
    else:
        watch.time("commit", lambda: server.sync(grant.session_id, timeout_s=TIMEOUT_S))
    heap_after = heap_bytes() - ids_bytes
    shared = shared_bytes("memd-") - shared_before
    watch.time("statistics", lambda: server.statistics())
    watch.time("detach", lambda: server.detach(grant.session_id))
    server.stop(timeout_s=TIMEOUT_S)
    answer = {
        "seconds": watch.seconds,
        "heap_declared_bytes": heap_declared - heap_before,
        "heap_bytes": heap_after - heap_before,
        "shared_bytes": shared,
    }
    print(json.dumps(answer))


# ---- All counts ----------------------------------------------------------------------------------


def measure(kind: str, count: int, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="growth-") as data:
        command = [sys.executable, __file__, "--child", kind, str(count), data]
        environ = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environ)
        if done.returncode:
            raise SystemExit(f"{count} {kind} shards: exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def figures_of(kind: str, count: int, runs: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """For one shard."""
    case = (
        f"{kind}, 10^{len(str(count)) - 1}" if str(count).strip("0") == "1" else f"{kind}, {count}"
    )
    for phase in runs[0]["seconds"]:
        yield Figure(
            name=f"{case}: {phase}",
            unit="us",
            runs=[run["seconds"][phase] / count * 1e6 for run in runs],
            less_is_better=True,
        )
    for key, name in (
        ("heap_declared_bytes", "heap, declared"),
        ("heap_bytes", "heap, committed"),
        ("shared_bytes", "shared memory"),
    ):
        yield Figure(
            name=f"{case}: {name}",
            unit="B",
            runs=[run[key] / count for run in runs],
            less_is_better=True,
            limit_name="of an entry" if key == "heap_bytes" else "",
            limit_runs=[float(ENTRY_BYTES_MAX)] * len(runs) if key == "heap_bytes" else [],
        )


def plan_figure(rounds: int) -> Figure:
    """As the steps of 20 thousand parameters make it: forward, backward, and the updates. Of a
    processor, which is all that it takes."""
    count = PLAN_USES // 5
    order = list(range(count))
    random.Random(0).shuffle(order)
    uses = [(item, memd_native.USE_READ) for item in order]
    for item in reversed(order):
        uses += [(item, memd_native.USE_READ), (item + count, memd_native.USE_OVERWRITE)]
    for item in order:
        uses += [(item, memd_native.USE_CHANGE), (item + count, memd_native.USE_LAST)]
    assert len(uses) == PLAN_USES
    sizes = [4 * MIB] * (2 * count)
    times = []
    for _ in range(rounds):
        began = time.process_time()
        memd_native.simulate_plan(
            uses,
            sizes,
            cache_bytes=sum(sizes) // 4,
            writes_changes=True,
            warm_count=0,
            measured_count=1,
        )
        times.append(time.process_time() - began)
    return Figure(
        name="a plan of 10^5 uses and its evictions",
        unit="CPU s",
        runs=times,
        limit_name="allowed",
        limit_runs=[PLAN_SECONDS_MAX] * rounds,
        less_is_better=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for kind, counts in COUNTS.items():
        parser.add_argument(f"--{kind}", type=int, nargs="*", default=list(counts), metavar="N")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder on a disk")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, count, folder = arguments.child
        run_child(kind, int(count), Path(folder))
        return
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    arguments.data.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    figures = [plan_figure(max(arguments.rounds, 5))]
    for kind in COUNTS:
        for count in getattr(arguments, kind):
            print(f"{count} {kind} shards …", file=sys.stderr, flush=True)
            runs = [measure(kind, count, arguments.data) for _ in range(arguments.rounds)]
            figures += figures_of(kind, count, runs)
    write_report(
        arguments.json,
        name="bench_growth",
        machine=machine,
        settings={name: getattr(arguments, name) for name in (*COUNTS, "rounds")},
        figures=figures,
    )


if __name__ == "__main__":
    main()
