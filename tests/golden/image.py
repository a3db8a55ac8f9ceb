"""What is in a golden image, how it is written, and how it is read back.

Everything repeats with a short period, so that an image of 24 MiB packs into a few KiB.
"""

from __future__ import annotations

import base64
import hashlib
import lzma
import os
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memd_native import (
    MODE_OVERWRITE,
    MODE_READ,
    PART_GRADIENT,
    PART_VALUE,
    AdamSettings,
    Server,
    ShardSpec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NVME_BYTES = 24 << 20
HOST_BYTES = 64 << 20
TIMEOUT_S = 60.0
JOB = "golden"
OTHER_JOB = "golden-other"
STEPS = 2
# From format 1.3 on.
SNAPSHOT = "kept"
SNAPSHOT_STEP = 1

PARAMETER, BLOB, BUFFER = 1, 2, 3
FLOAT32, BFLOAT16, UINT8, INT64 = 1, 2, 5, 8
HOST, NVME = 1, 2
ELEMENT_BYTES = {FLOAT32: 4, BFLOAT16: 2, UINT8: 1, INT64: 8}
TILE_ELEMENTS = 262144


def spec(name: str, kind: int, dtype: int, shape: list[int], tier: int = NVME) -> ShardSpec:
    return ShardSpec(name=name, kind=kind, dtype=dtype, tier=tier, shape=shape)


# More than a tile, two dtypes in shared buckets, a scalar, blobs of none, one and two extents.
SPECS = (
    spec("weight", PARAMETER, FLOAT32, [300, 1000]),
    spec("head.weight", PARAMETER, FLOAT32, [7, 9]),
    spec("norm.weight", PARAMETER, BFLOAT16, [33]),
    spec("norm.bias", PARAMETER, BFLOAT16, []),
    spec("blob", BLOB, UINT8, [(1 << 20) + 1]),
    spec("running_mean", BUFFER, INT64, [5]),
    spec("empty", BUFFER, INT64, [0], HOST),
    spec("never-written", BLOB, UINT8, [10]),
)
WRITTEN = tuple(each.name for each in SPECS if each.name != "never-written")


def element_count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def pattern(name: str, dtype: int, count: int, *, gradient: bool = False) -> bytes:
    """Values that differ by shard and repeat every 64 elements."""
    seed = sum(name.encode()) % 17
    steps = [(index * 7 + seed) % 64 - 31 for index in range(64)]
    scale = 0.001 if gradient else 0.01
    if dtype in (FLOAT32, BFLOAT16):
        unit = array("f", [step * scale for step in steps]).tobytes()
    elif dtype == INT64:
        unit = array("q", steps).tobytes()
    else:
        unit = bytes(step + 31 for step in steps)
    if dtype == BFLOAT16:
        unit = b"".join(unit[at + 2 : at + 4] for at in range(0, len(unit), 4))
    size_bytes = count * ELEMENT_BYTES[dtype]
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


@contextmanager
def opened(folder: Path) -> Iterator[Server]:
    server = Server(
        directories=[str(folder)],
        nvme_bytes=NVME_BYTES,
        host_bytes=HOST_BYTES,
        lock_required=False,
        huge_pages=False,
        update_thread_count=1,
    )
    try:
        yield server
    finally:
        server.stop(timeout_s=TIMEOUT_S)


def put(server: Server, session_id: int, shard: Any, data: bytes, *, part: int) -> None:
    lease = server.lease(
        session_id, shard.shard_id, part=part, mode=MODE_OVERWRITE, timeout_s=TIMEOUT_S
    )
    if data:
        lease.memory()[: len(data)] = data
    lease.release()


def get(server: Server, session_id: int, shard: Any) -> bytes:
    lease = server.lease(
        session_id, shard.shard_id, part=PART_VALUE, mode=MODE_READ, timeout_s=TIMEOUT_S
    )
    data = bytes(lease.memory()[: shard.bytes]) if shard.bytes else b""
    lease.release()
    return data


def train_one_step(server: Server, session_id: int) -> int:
    """With the same gradients in every step; the step at which the job then stands."""
    shards, _ = server.declare(session_id, list(SPECS))
    parameters = [shard for shard in shards if shard.spec.kind == PARAMETER]
    for shard in parameters:
        count = element_count(shard.spec.shape)
        data = pattern(shard.spec.name, shard.spec.dtype, count, gradient=True)
        put(server, session_id, shard, data, part=PART_GRADIENT)
    settings = AdamSettings(1e-2, 0.9, 0.999, 1e-8, 0.01, True)
    ids = [shard.shard_id for shard in parameters]
    report = server.step(session_id, [(settings, ids)], timeout_s=TIMEOUT_S)
    return int(report.committed_step)


def write(folder: Path) -> None:
    """Fills an empty folder with a volume that this version of memd writes."""
    with opened(folder) as server:
        job = server.open_job(JOB, uid=1000, host_bytes=HOST_BYTES // 2, nvme_bytes=14 << 20)
        session_id = server.attach(job.job_id).session_id
        shards, _ = server.declare(session_id, list(SPECS))
        for shard in shards:
            if shard.spec.name in WRITTEN:
                count = element_count(shard.spec.shape)
                data = pattern(shard.spec.name, shard.spec.dtype, count)
                put(server, session_id, shard, data, part=PART_VALUE)
        server.sync(session_id, timeout_s=TIMEOUT_S)
        for step in range(1, STEPS + 1):
            train_one_step(server, session_id)
            if step == SNAPSHOT_STEP:
                server.create_snapshot(
                    job.job_id, SNAPSHOT, created_s=1_800_000_000, number=1, timeout_s=TIMEOUT_S
                )
        server.detach(session_id)
        # Its number is given and stays unused.
        dropped = server.open_job(
            "golden-dropped", uid=1000, host_bytes=HOST_BYTES // 2, nvme_bytes=1 << 20
        )
        server.drop_job(dropped.job_id, force=True)
        other = server.open_job(OTHER_JOB, uid=0, host_bytes=HOST_BYTES // 2, nvme_bytes=1 << 20)
        session_id = server.attach(other.job_id).session_id
        shards, _ = server.declare(session_id, [spec("only", BLOB, UINT8, [5000])])
        put(server, session_id, shards[0], pattern("only", UINT8, 5000), part=PART_VALUE)
        server.sync(session_id, timeout_s=TIMEOUT_S)


def moments(server: Server, session_id: int, shard: Any) -> str:
    digest = hashlib.sha256()
    count = element_count(shard.spec.shape)
    for first in range(0, count, TILE_ELEMENTS):
        some = min(TILE_ELEMENTS, count - first)
        for part in server.read_moments(
            session_id, shard.shard_id, first, some, with_master=False, timeout_s=TIMEOUT_S
        ):
            digest.update(part)
    return digest.hexdigest()


def content(server: Server) -> dict[str, Any]:
    """Everything there is, by name: what users of the image rely on."""
    jobs = {}
    for job in server.jobs():
        session_id = server.attach(job.job_id).session_id
        shards = {}
        for shard in server.shards(job.job_id):
            told: dict[str, Any] = {
                "kind": shard.spec.kind,
                "dtype": shard.spec.dtype,
                "tier": shard.spec.tier,
                "shape": list(shard.spec.shape),
                "generation": shard.generation,
                "written": shard.written,
            }
            if shard.written:
                told["sha256"] = hashlib.sha256(get(server, session_id, shard)).hexdigest()
                if shard.spec.kind == PARAMETER:
                    told["moments_sha256"] = moments(server, session_id, shard)
            shards[shard.spec.name] = told
        jobs[job.name] = {
            "job_id": job.job_id,
            "uid": job.uid,
            "step": job.committed_step,
            "nvme_bytes": job.nvme_bytes,
            "shards": shards,
        }
        server.detach(session_id)
    return jobs


def snapshots(server: Server) -> list[dict[str, Any]]:
    """The job's snapshots, oldest first."""
    return [
        {
            "name": each.name,
            "step": each.step,
            "created_s": each.created_s,
            "bytes": each.bytes,
            "extents": each.extent_count,
        }
        for each in server.snapshots(server.find_job(JOB).job_id)
    ]


def pack(volume: Path, image: Path) -> None:
    packed = lzma.compress(volume.read_bytes(), preset=9)
    # Text, as every file of the repository is.
    image.write_bytes(base64.encodebytes(packed))


def unpack(image: Path, folder: Path) -> Path:
    volume = folder / "memd.volume"
    volume.write_bytes(lzma.decompress(base64.decodebytes(image.read_bytes())))
    # Direct I/O reads what is on disk.
    descriptor = os.open(volume, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return volume
