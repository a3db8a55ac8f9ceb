"""Shards go in and come out of the data plane one by one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import memd_native
from memd_native import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
BLOB, UINT8, NVME = 2, 9, 2


@pytest.fixture
def server(disk_path: Path) -> Iterator[memd_native.Server]:
    server = memd_native.Server(
        directories=[str(disk_path)],
        nvme_bytes=64 * MIB,
        host_bytes=128 * MIB,
        lock_required=False,
        jobs_expected=1,
    )
    yield server
    server.stop(timeout_s=60)


@pytest.fixture
def session_id(server: memd_native.Server) -> int:
    return server.attach(server.open_job("job", uid=os.getuid()).job_id).session_id


def test_specs_are_taken_from_any_iterable_and_answers_are_a_sequence(
    server: memd_native.Server, session_id: int
) -> None:
    specs = (ShardSpec(name, BLOB, UINT8, [size], NVME) for size, name in enumerate("abc", 1))
    infos, _ = server.declare(session_id, specs)
    assert [(info.spec.name, info.bytes) for info in infos] == [("a", 1), ("b", 2), ("c", 3)]
    assert len(infos) == 3
    assert infos[2].spec.name == "c"
    with pytest.raises(IndexError):
        infos[3]
    last = infos[2]
    del infos
    assert last.spec.shape == [3], "it outlives the sequence"
    assert [info.shard_id for info in server.shards(server.jobs()[0].job_id)] == [0, 1, 2]


def test_what_is_no_spec_is_refused_and_nothing_is_declared(
    server: memd_native.Server, session_id: int
) -> None:
    good = ShardSpec("a", BLOB, UINT8, [1], NVME)
    wrong: Any = "b"
    with pytest.raises(TypeError, match="ShardSpec"):
        server.declare(session_id, [good, wrong])

    def failing() -> Iterator[ShardSpec]:
        yield good
        raise LookupError("no such dtype")

    with pytest.raises(LookupError, match="no such dtype"):
        server.declare(session_id, failing())
    assert len(server.shards(server.jobs()[0].job_id)) == 0
