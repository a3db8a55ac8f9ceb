"""Blobs come back as they were put, over shared memory and over gRPC streams, from many clients at
once."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.daemons import Daemon, running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENT_COUNT = 8
SIZES_BYTES = (1, 2, 63, 4096, 1024 * 1024 + 2, 16 * 1024 * 1024, 64 * 1024 * 1024)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
transports = pytest.mark.parametrize(
    "shared_memory",
    [
        pytest.param(True, id="shared memory"),
        pytest.param(False, id="gRPC streams", marks=pytest.mark.more),
    ],
)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def random_tensor(size_bytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """At least one element; random bits, whatever they mean in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    size_bytes = max(size_bytes, dtype.itemsize) // dtype.itemsize * dtype.itemsize
    raw = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # Every client holds its largest tensor, and a get beside it.
    with running_daemon(host="1GiB", nvme="4GiB") as daemon:
        yield daemon


@transports
def test_eight_clients_get_what_they_put_from_1_byte_to_64_mib(
    daemon: Daemon, shared_memory: bool
) -> None:
    def one_client(index: int) -> int:
        compared = 0
        with memd_client.connect(
            daemon.address, job="eight", shared_memory=shared_memory
        ) as session:
            for dtype in DTYPES:
                wanted = {}
                for size_bytes in SIZES_BYTES:
                    tensor = random_tensor(size_bytes, dtype, seed=1000 * index + size_bytes % 997)
                    name = f"client {index}, {size_bytes} bytes of {dtype}"
                    session.put(name, tensor)
                    wanted[name] = (tensor.shape, sha256(tensor))
                session.prefetch(list(wanted))
                for name, (shape, digest) in wanted.items():
                    got = session.get(name)
                    assert got.dtype == dtype
                    assert got.shape == shape
                    assert sha256(got) == digest, name
                    del got
                    compared += 1
                for name in wanted:
                    session.delete(name)
        return compared

    with ThreadPoolExecutor(CLIENT_COUNT) as clients:
        compared = list(clients.map(one_client, range(CLIENT_COUNT)))
    assert compared == [len(DTYPES) * len(SIZES_BYTES)] * CLIENT_COUNT
    session = memd_client.connect(daemon.address, job="eight")
    session.drop_job()


@pytest.fixture(scope="module")
def gibibyte() -> tuple[torch.Tensor, str]:
    tensor = random_tensor(1024**3, torch.uint8, seed=7)
    return tensor, sha256(tensor)


@pytest.fixture(scope="module")
def large_daemon() -> Iterator[Daemon]:
    with running_daemon(host="1216MiB", nvme="1200MiB") as daemon:
        yield daemon


@pytest.mark.more
@transports
def test_one_client_gets_the_gibibyte_it_put(
    large_daemon: Daemon, gibibyte: tuple[torch.Tensor, str], shared_memory: bool
) -> None:
    tensor, digest = gibibyte
    session = memd_client.connect(
        large_daemon.address,
        job="one",
        host_bytes="1216MiB",
        nvme_bytes="1100MiB",
        shared_memory=shared_memory,
    )
    with session:
        session.put("gibibyte", tensor)
        assert sha256(session.get("gibibyte")) == digest


def test_what_was_put_over_one_transport_is_got_over_the_other(daemon: Daemon) -> None:
    tensor = torch.randn(123, 45)
    mapped = memd_client.connect(daemon.address, job="both")
    with memd_client.connect(daemon.address, job="both", shared_memory=False) as streamed:
        mapped.put("a", tensor)
        streamed.put("b", tensor)
        assert torch.equal(streamed.get("a"), tensor)
        assert torch.equal(mapped.get("b"), tensor)
    mapped.drop_job()


def test_a_name_that_another_session_deleted_is_no_other_tensors(daemon: Daemon) -> None:
    mine = memd_client.connect(daemon.address, job="two-sessions")
    with memd_client.connect(daemon.address, job="two-sessions") as other:
        other.put("x", torch.ones(64))
        assert torch.equal(mine.get("x"), torch.ones(64))
        other.delete("x")
        other.put("y", torch.zeros(64))
        with pytest.raises(memd_client.UnknownName, match="x"):
            mine.get("x")
        mine.put("x", torch.full((64,), 2.0))
        assert torch.equal(other.get("y"), torch.zeros(64))
        assert torch.equal(other.get("x"), torch.full((64,), 2.0))
    mine.drop_job()
