"""Host registration of a real daemon's arena, by a driver that looks at this process's mappings."""

from __future__ import annotations

import gc
import itertools
import os
import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.core.registration import HostRegistration, _Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session
    from tests.daemons import Daemon

CUDA = torch.device("cuda", 0)
COUNT = 1 << 20  # elements, of four bytes


def mappings(begin: int, end: int) -> set[str]:
    """The permissions of all that is mapped in these addresses; "----" for what is not."""
    found, covered = set(), begin
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        first, last = (int(each, 16) for each in addresses.split("-"))
        if first < end and begin < last:
            if first > covered:
                found.add("----")
            found.add(permissions)
            covered = max(covered, last)
    return found if covered >= end else found | {"----"}


@dataclass
class Driver:
    """Registers what is mapped, as CUDA does, and keeps what is registered."""

    refuses: bool = False
    registered: dict[int, int] = field(default_factory=dict)  # address → bytes
    asked: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    has_error: bool = False  # which torch raises at the next kernel

    def launch(self, _device: torch.device) -> None:
        if self.has_error:
            self.has_error = False
            raise RuntimeError("CUDA error: out of memory")

    def cudaHostRegister(self, address: int, length_bytes: int, _flags: int) -> int:
        self.asked.append((address, length_bytes))
        if self.refuses:
            self.has_error = True
            return 2
        if mappings(address, address + length_bytes) != {"rw-s"}:
            self.wrong.append("registered what is not mapped for sharing")
        if any(b < address + length_bytes and address < b + n for b, n in self.registered.items()):
            self.wrong.append("registered twice")
        self.registered[address] = length_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        length_bytes = self.registered.pop(address, 0)
        if not length_bytes:
            self.wrong.append("unregistered what is not registered")
        elif mappings(address, address + length_bytes) != {"rw-s"}:
            self.wrong.append("unregistered what is mapped no more")
        return 0

    def cudaGetErrorString(self, _result: int) -> str:
        return "out of memory"

    def has(self, view: torch.Tensor) -> bool:
        begin, end = view.data_ptr(), view.data_ptr() + view.nbytes
        return any(b <= begin and end <= b + n for b, n in self.registered.items())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr("memd_client.core.registration._launch", driver.launch)
    yield driver
    assert not driver.wrong
    assert not driver.has_error


@contextmanager
def connected(daemon: Daemon) -> Iterator[Session]:
    with memd_client.connect(daemon.address, job="registered", host_bytes="32MiB") as session:
        yield session
        session.drop_job()


def test_the_shared_mapping_is_registered_in_whole_segments_and_once(
    daemon: Daemon, driver: Driver
) -> None:
    with connected(daemon) as session:
        value = torch.arange(float(COUNT))
        session.put("x", value)
        lease = session.get("x")
        registration = session.leases.registration
        host = registration.host(lease, CUDA)
        assert torch.equal(host, value)
        assert host.data_ptr() != lease.data_ptr(), "a lease for reading is a private mapping"
        base, segment = session.leases.plane.arena_address, session.leases.plane.segment_bytes
        assert driver.has(host)
        ((address, length_bytes),) = driver.registered.items()
        assert (address - base) % segment == 0
        assert length_bytes % segment == 0
        assert length_bytes < host.nbytes + 2 * segment
        assert torch.equal(registration.host(lease[5:9], CUDA), value[5:9])
        assert len(driver.asked) == 1
        assert session.statistics().registered_bytes == length_bytes
        assert session.statistics().registration_refusals == 0


def test_what_no_copy_crosses_is_not_registered(daemon: Daemon, driver: Driver) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        lease = session.get("x")
        registration = session.leases.registration
        host = registration.host(lease, torch.device("xpu", 0))
        assert torch.equal(host, lease)
        assert not driver.asked
        assert session.statistics().registered_bytes == 0


def test_a_small_lease_a_gradient_and_a_scalar_show_the_arena(
    daemon: Daemon, driver: Driver
) -> None:
    with connected(daemon) as session:
        model = memd_client.offload(nn.Linear(300, 300), session)
        registration = session.leases.registration
        for name in ("weight", "bias"):  # memory of its own if it is small
            shard = session.find_shard(name)
            host = registration.host(session.leases.value(shard), CUDA)
            assert torch.equal(host, getattr(model, name))
            assert driver.has(host)
            slot = session.leases.gradient(shard, MODE_OVERWRITE)
            into = registration.host(slot, CUDA)
            registration.copy(into, torch.full(shard.shape, 3.0))
            assert torch.equal(slot, torch.full(shard.shape, 3.0))
        session.put("scalar", torch.tensor(7.0))
        assert registration.host(session.get("scalar"), CUDA).item() == 7.0


def test_inside_a_transform_of_torch_func_the_bytes_are_the_same(
    daemon: Daemon, driver: Driver
) -> None:
    with connected(daemon) as session:
        value = torch.arange(float(COUNT))
        session.put("x", value)
        lease = session.get("x")
        shown: list[torch.Tensor] = []

        def loss(x: torch.Tensor) -> torch.Tensor:
            shown.append(session.leases.registration.host(lease, CUDA))
            return x.sum()

        torch.func.grad(loss)(torch.ones(2))
        assert torch.equal(shown[0], value)
        assert driver.has(shown[0])


def test_a_view_keeps_its_lease(daemon: Daemon, driver: Driver) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        lease = session.get("x")
        before = session.statistics().leases_held
        host = session.leases.registration.host(lease, CUDA)
        del lease
        gc.collect()
        assert session.statistics().leases_held == before
        del host
        gc.collect()
        assert session.statistics().leases_held == before - 1


def test_bytes_of_no_lease_are_refused(daemon: Daemon, driver: Driver) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        lease = session.get("x")
        with pytest.raises(Exception, match="no bytes of a living lease"):
            session.leases.registration.host(torch.ones(4), CUDA)
        with pytest.raises(ValueError, match="strides"):
            session.leases.registration.host(lease.view(1024, 1024).t(), CUDA)
        assert not driver.asked


def test_a_closed_session_has_unregistered_before_it_unmaps(daemon: Daemon, driver: Driver) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        registration = session.leases.registration
        host = registration.host(session.get("x"), CUDA)
        assert driver.registered
    assert not driver.registered
    assert host.sum().item() == COUNT, "its memory stays mapped"
    with pytest.raises(memd_client.MemdError):
        session.get("x")
    registration.close()
    assert not driver.wrong


def test_a_session_that_nobody_closed_unregisters_before_it_unmaps(
    daemon: Daemon, driver: Driver
) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        lease = session.get("x")
        registration = HostRegistration(session.leases.plane)
        registration.host(lease, CUDA)
        assert driver.registered
        del registration
        gc.collect()
        assert not driver.registered


def test_a_forked_child_unregisters_nothing(daemon: Daemon, driver: Driver) -> None:
    with connected(daemon) as session:
        session.put("x", torch.ones(COUNT))
        registration = session.leases.registration
        registration.host(session.get("x"), CUDA)
        child = os.fork()
        if not child:
            registration.close()
            os._exit(len(driver.registered) != 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_if_the_driver_refuses_copies_are_right_and_the_refusal_is_counted_and_told_once(
    daemon: Daemon, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refuses = True
    with connected(daemon) as session:
        value = torch.arange(float(COUNT))
        session.put("x", value)
        registration = session.leases.registration
        for _ in range(2):
            host = registration.host(session.get("x"), CUDA)
        target = torch.zeros(COUNT)
        registration.copy(target, host)
        assert torch.equal(target, value)
        assert len(driver.asked) == 1, "it is not asked again"
        assert session.statistics().registration_refusals == 1
        assert session.statistics().registered_bytes == 0
        told = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
        assert len(told) == 1
        assert f"cuda:0 refuses to register {driver.asked[0][1]} bytes" in told[0]
        assert "out of memory" in told[0]


class Mapped:
    """An arena of small segments."""

    arena_address = 1 << 40
    segment_bytes = 1 << 12

    def arena_view(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_part_lies_in_two_registrations(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    registered: dict[int, int] = {}

    class Dicing:
        def cudaHostRegister(self, address: int, length_bytes: int, _flags: int) -> int:
            assert length_bytes <= 3 * Mapped.segment_bytes
            if dice.random() < 0.2:
                return 2
            registered[address] = length_bytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del registered[address]
            return 0

        def cudaGetErrorString(self, _result: int) -> str:
            return "refused"

    monkeypatch.setattr(torch.cuda, "cudart", Dicing)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr("memd_client.core.registration._launch", lambda _device: None)
    pieces = _Pieces(Mapped(), 3 * Mapped.segment_bytes)
    size = 64 * Mapped.segment_bytes

    def place() -> tuple[int, int]:
        begin = dice.randrange(size - 1)
        return Mapped.arena_address + begin, dice.randint(1, min(size - begin, size // 4))

    def piece_of(byte: int) -> int:
        """The registration that has this byte; 0: none."""
        return next((b for b, n in registered.items() if b <= byte < b + n), 0)

    for _ in range(30):
        address, length_bytes = place()
        pieces.cover(address, length_bytes, CUDA)
        # Also of bytes that nobody has covered.
        for begin, length in ((address, length_bytes), place()):
            cuts = pieces.cuts(begin, length)
            assert cuts == sorted(set(cuts))
            assert all(0 < cut < length for cut in cuts)
            ends = [0, *cuts, length]
            for first, last in itertools.pairwise(ends):
                borders = [each for b, n in registered.items() for each in (b, b + n)]
                inside = [each for each in borders if begin + first <= each < begin + last]
                looked_at = {begin + first, begin + last - 1, *inside}
                assert len({piece_of(byte) for byte in looked_at}) == 1
    spans = sorted((b, b + n) for b, n in registered.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert pieces.registered_bytes == sum(registered.values())
    pieces.release()
    assert not registered


def test_a_copy_over_two_registrations_has_all_its_bytes(
    daemon: Daemon, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon) as session:
        segment = session.leases.plane.segment_bytes
        value = torch.arange(segment // 4 * 5 // 4, dtype=torch.int32)
        session.put("long", torch.zeros_like(value))
        lease = session.leases.value(session.find_shard("long"), MODE_OVERWRITE)
        registration = HostRegistration(session.leases.plane, piece_bytes_max=segment)
        host = registration.host(lease, CUDA)
        assert not driver.has(host)
        parts: list[bool] = []
        plain = torch.Tensor.copy_

        def copy(part: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
            parts.append(driver.has(part))
            return plain(part, source, non_blocking)

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "copy_", copy)
            registration.copy(host, value)
        assert len(parts) == len(driver.registered) > 1
        assert all(parts)
        assert torch.equal(lease, value)
        registration.close()
