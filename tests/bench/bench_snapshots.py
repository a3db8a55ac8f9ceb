"""The longest turn of the server thread while a snapshot is made, gone back to and dropped, and
while a job is dropped with one: for as long every job waits.

`60M`: 60 parameters of 2^20 elements with their values, each a bucket of four tiles. `blobs`:
30,000 of 16 bytes, an extent each, all of which are written again behind the snapshot, so that job
and snapshot share none. Each operation runs in a process of its own, on the volume that the one
before has left: the longest turn counts from a start. The job has no memory then, so the part that
opens a ledger for memory that is kept is not measured here.

Run: python tests/bench/bench_snapshots.py [--rounds 3] [--blobs 30000] [--data DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: F401 # leases are tensors

import memd_native
from bench_growth import DATA, FLOAT32, MIB, TIMEOUT_S, connect
from machine import describe_machine
from memd_proto.v1 import types_pb2
from report import seconds, write_report

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = "snapshots"
BLOB_ELEMENTS = 4
PARAMETERS = 60
PARAMETER_ELEMENTS = 1 << 20
CASES = ("60M", "blobs")
OPERATIONS = ("create", "restore", "drop", "drop job")
KINDS = ("cpu", "wall")


# ---- One operation, in a process of its own ------------------------------------------------------


def specs_of(case: str, blob_count: int) -> Iterator[memd_native.ShardSpec]:
    is_blob = case == "blobs"
    for number in range(blob_count if is_blob else PARAMETERS):
        yield memd_native.ShardSpec(
            name=f"layers.{number // 10}.linear{number % 10}.weight",
            kind=types_pb2.SHARD_KIND_BLOB if is_blob else types_pb2.SHARD_KIND_PARAMETER,
            dtype=FLOAT32,
            shape=[BLOB_ELEMENTS if is_blob else PARAMETER_ELEMENTS],
            tier=types_pb2.TIER_NVME,
            value_only=not is_blob,
        )


def open_server(case: str, blob_count: int, folder: Path) -> memd_native.Server:
    state_bytes = blob_count * 4096 if case == "blobs" else PARAMETERS * PARAMETER_ELEMENTS * 4
    return memd_native.Server(
        directories=[str(folder)],
        nvme_bytes=512 * MIB + 5 * state_bytes,
        host_bytes=256 * MIB + 2 * state_bytes,
        lock_required=False,
        jobs_expected=1,
    )


def write_all(server: memd_native.Server, case: str, blob_count: int) -> None:
    job = server.open_job(JOB, uid=os.getuid())
    grant = server.attach(job.job_id)
    specs = list(specs_of(case, blob_count))
    infos, _ = server.declare(grant.session_id, specs)
    ours, theirs = socket.socketpair()
    client = connect(server, grant, theirs)
    for info, spec in zip(infos, specs, strict=True):
        tensor = client.lease(
            info.shard_id,
            memd_native.PART_VALUE,
            memd_native.MODE_OVERWRITE,
            FLOAT32,
            spec.shape,
            TIMEOUT_S,
        )
        tensor.fill_(time.monotonic())
        del tensor
    client.close()
    ours.close()
    server.sync(grant.session_id, timeout_s=TIMEOUT_S)
    server.detach(grant.session_id)


def operate(server: memd_native.Server, operation: str) -> None:
    job_id = server.find_job(JOB).job_id
    if operation == "create":
        server.create_snapshot(job_id, "first", created_s=1, number=1, timeout_s=TIMEOUT_S)
    elif operation == "restore":
        server.restore_snapshot(job_id, "first", timeout_s=TIMEOUT_S)
    elif operation == "drop":
        server.drop_snapshot(job_id, "first", timeout_s=TIMEOUT_S)
    else:
        server.drop_job(job_id, force=True)


def run_child(case: str, operation: str, blob_count: int, folder: Path) -> None:
    """Prints the longest turn as JSON."""
    server = open_server(case, blob_count, folder)
    if operation == "write":
        write_all(server, case, blob_count)
    else:
        operate(server, operation)
    turns = server.statistics().turns
    server.stop(timeout_s=TIMEOUT_S)
    print(json.dumps({"cpu": turns.cpu_seconds_max, "wall": turns.wall_seconds_max}))


# ---- All of them ---------------------------------------------------------------------------------


def measure(case: str, blob_count: int, folder: Path) -> dict[str, dict[str, float]]:
    """The longest turns of each operation."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="snapshots-") as data:
        for operation in (
            *("write", "create", "write", "restore", "write", "drop"),
            *("create", "write", "drop job"),
        ):
            command = [sys.executable, __file__, "--child", case, operation, str(blob_count), data]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{case}, {operation}: exit status {done.returncode}")
            found.setdefault(operation, json.loads(done.stdout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blobs", type=int, default=30_000)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder on a disk")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case, operation, count, folder = arguments.child
        run_child(case, operation, int(count), Path(folder))
        return
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    arguments.data.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        for case in CASES:
            print(f"{case} …", file=sys.stderr, flush=True)
            runs[case].append(measure(case, arguments.blobs, arguments.data))
    write_report(
        arguments.json,
        name="bench_snapshots",
        machine=machine,
        settings={"rounds": arguments.rounds, "blobs": arguments.blobs},
        figures=[
            seconds(f"{case}: {operation}, {kind}", [run[operation][kind] for run in runs[case]])
            for case in CASES
            for operation in OPERATIONS
            for kind in KINDS
        ],
    )


if __name__ == "__main__":
    main()
