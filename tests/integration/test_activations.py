"""offload(activations=...) with a pool that is smaller than what autograd saves, and what is left
when a trainer ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memd_client
from memd.client import DaemonClient
from tests.daemons import running_daemon
from tests.integration.safetensors_memory import SETTINGS
from tests.unit.activation_cases import activation_bytes, slot_names
from tests.unit.client_cases import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session
    from tests.daemons import Daemon, Daemons

ROOT = Path(__file__).parents[2]
# 8 MiB of layers, whose inputs are 1 MiB each.
LAYER_COUNT = 32
WIDTH = 256
ROWS = 1024
MIB = 1 << 20
HOST_BYTES = 24 * MIB


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="128MiB", nvme="1GiB") as daemon:
        yield daemon


class Deep(nn.Module):
    """Autograd saves 1 MiB of each layer, which a Tanh and the next Linear share."""

    def __init__(self, *, has_checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYER_COUNT)
        )
        self.has_checkpoints = has_checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.has_checkpoints else layer(x)
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = ROWS) -> list[Any]:
    losses = []
    for step in range(5):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def connected(daemon: Daemon, **settings: Any) -> Session:
    return memd_client.connect(
        daemon.address, job="deep", host_bytes=HOST_BYTES, nvme_bytes=512 * MIB, **settings
    )


def spilled_bytes(daemon: Daemon) -> int:
    with DaemonClient(daemon.attach_socket) as client:
        return sum(job.counters.spilled_bytes for job in client.status().jobs)


@pytest.mark.parametrize("has_checkpoints", [False, True], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("durability", ["step", "every:2", "none"])
def test_a_pool_that_is_smaller_than_what_is_saved_has_the_same_bits(
    daemon: Daemon, durability: str, has_checkpoints: bool
) -> None:
    reference = Deep(has_checkpoints=has_checkpoints)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True))
    with connected(daemon, durability=durability) as session:
        try:
            model = Deep(has_checkpoints=has_checkpoints)
            memd_client.offload(model, session, activations="nvme")
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
            assert train(model, optimizer) == expected
            found = session.statistics()
            assert found.activation_bytes == found.leases_held == 0
            assert found.activation_bytes_max >= LAYER_COUNT * MIB > HOST_BYTES
            assert spilled_bytes(daemon) > 0
            assert_same_state(model, reference)
        finally:
            session.drop_job()


@pytest.mark.parametrize("activations", ["host", "nvme"])
def test_quotas_that_are_too_small_are_one_error_that_says_how_much_there_was(
    daemon: Daemon, activations: str
) -> None:
    nvme_bytes = 512 * MIB if activations == "host" else 128 * MIB
    rows = ROWS if activations == "host" else 4 * ROWS
    reference = Deep()
    session = memd_client.connect(
        daemon.address, job="small", host_bytes=HOST_BYTES, nvme_bytes=nvme_bytes
    )
    with session:
        try:
            model = memd_client.offload(Deep(), session, activations=activations)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
            advice = 'activations="nvme"' if activations == "host" else "nvme_bytes"
            with pytest.raises(
                memd_client.CapacityError,
                match=rf"MiB of it are in memd.*more are wanted.*{advice}",
            ):
                train(model, optimizer, rows)
            assert activation_bytes(session) == 0
            assert session.committed_step == 0
            # A batch that fits has the bits of one that was the first.
            torchs = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
            assert train(model, optimizer, 32) == train(reference, torchs, 32)
            assert_same_state(model, reference)
        finally:
            session.drop_job()


def test_no_commit_writes_what_a_living_graph_has_saved(daemon: Daemon) -> None:
    def written_bytes(*, keeps_graph: bool) -> int:
        with memd_client.connect(
            daemon.address, job="graph", host_bytes=96 * MIB, fresh=True
        ) as session:
            try:
                model = memd_client.offload(Deep(), session, activations="nvme")
                optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
                graph = model(torch.ones(ROWS, WIDTH)) if keeps_graph else None
                assert bool(activation_bytes(session)) == keeps_graph
                with DaemonClient(daemon.attach_socket) as client:
                    train(model, optimizer, 32)
                    session.commit(wait=True)
                    before = sum(each.written_bytes for each in client.status().devices)
                    train(model, optimizer, 32)
                    session.commit(wait=True)
                    after = sum(each.written_bytes for each in client.status().devices)
                del graph
                return after - before
            finally:
                session.drop_job()

    plain, with_graph = written_bytes(keeps_graph=False), written_bytes(keeps_graph=True)
    assert with_graph - plain < MIB


def test_slots_end_with_the_session_and_with_a_killed_trainer(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="ended") as session:
        model = memd_client.offload(Deep(), session, activations="host")
        output = model(torch.ones(ROWS, WIDTH))
        assert len(slot_names(session)) >= LAYER_COUNT
        del output
    program = (
        "import sys, torch, memd_client\n"
        "from tests.integration.test_activations import Deep, ROWS, WIDTH\n"
        "session = memd_client.connect(sys.argv[1], job='ended')\n"
        "model = memd_client.offload(Deep(), session, activations='nvme')\n"
        "output = model(torch.ones(ROWS, WIDTH))\n"
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, daemon.address], cwd=ROOT, check=False)
    assert killed.returncode == -9
    with memd_client.connect(daemon.address, job="ended") as session:
        try:
            end = time.monotonic() + 60
            while slot_names(session) and time.monotonic() < end:
                time.sleep(0.01)
            assert not slot_names(session)
        finally:
            session.drop_job()


@pytest.mark.more
@pytest.mark.parametrize("activations", [pytest.param("host", marks=pytest.mark.soak), "nvme"])
def test_the_trainers_memory_falls_by_what_is_offloaded(daemons: Daemons, activations: str) -> None:
    """0.8 of the bytes, at the peak of a step."""
    daemon = daemons.start(name=f"memory-{activations}", host="1GiB", nvme="2GiB")
    try:
        plain_bytes, none_offloaded = _taken(daemon, "none")
        peak_bytes, offloaded_bytes = _taken(daemon, activations)
    finally:
        daemon.stop()
    assert none_offloaded == 0
    assert offloaded_bytes >= 128 * MIB
    assert plain_bytes - peak_bytes >= 0.8 * offloaded_bytes


def _taken(daemon: Daemon, activations: str) -> tuple[int, int]:
    """The trainer's peak beyond torch, and the bytes that it offloaded."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.integration.activation_memory", daemon.address, activations],
        cwd=ROOT,
        env={**os.environ, **SETTINGS},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    said = {name: int(size) for name, size in map(str.split, found.stdout.splitlines())}
    return said["train"], said["offloaded"]
