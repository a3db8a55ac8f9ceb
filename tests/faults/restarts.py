"""A daemon that is followed by another at the same place, and a training to disturb with that."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from tests.daemons import NVME_BYTES
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon, Daemons

ROOT = Path(__file__).parents[2]
STEPS = 6
PATIENCE_S = 60.0

# In front of the daemon's command: the same program, calling itself another version.
NEW_VERSION = (
    sys.executable,
    "-c",
    "import runpy, sys, memd; memd.__version__ = '9.9.9'; sys.argv = sys.argv[3:]; "
    "runpy.run_module('memd', run_name='__main__')",
)


@dataclass
class Restarts:
    """One daemon after the other, at the same place."""

    made: Daemons
    name: str
    daemon: Daemon
    threads: list[threading.Thread] = field(default_factory=list)

    def kill(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait(PATIENCE_S)

    def begin_start(self, before: tuple[str, ...] = ()) -> None:
        """Beside the test, which waits for it as a trainer does."""

        def start() -> None:
            self.daemon = self.made.start(name=self.name, before=before)

        self.threads.append(threading.Thread(target=start))
        self.threads[-1].start()

    def kill_and_begin_start(self) -> None:
        self.kill()
        self.begin_start()

    def settle(self) -> Daemon:
        for thread in self.threads:
            thread.join(PATIENCE_S)
        self.threads.clear()
        return self.daemon

    def holder_process_id(self) -> int:
        """Of the holder that listens beside the control socket; nobody else names that path."""
        wanted = str(self.daemon.socket.with_name("holder.sock")).encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in command and any(word.endswith(b"holder.py") for word in command):
                return int(folder.name)
        raise AssertionError("no holder runs")


@pytest.fixture
def restarts(daemons: Daemons, request: pytest.FixtureRequest) -> Iterator[Restarts]:
    name = f"r{abs(hash(request.node.name)) % 10**8}"
    roomy = replace(daemons, nvme_bytes=NVME_BYTES)  # for snapshots beside what is trained
    made = Restarts(roomy, name, roomy.start(name=name))
    yield made
    made.settle()
    if made.daemon.process.poll() is None:
        made.daemon.stop()


def reference(**settings: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final parameters of the same training, in memory and undisturbed."""
    model = build()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.1, fused=True, **settings
    )
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in model.parameters()]


class SteppedTraining:
    """An optimizer for each parameter, stepped in backward."""

    def __init__(self, daemon: Daemon) -> None:
        self.session = memd_client.connect(daemon.address, job="stepped")
        self.model = memd_client.offload(build(), self.session)
        self.losses: list[torch.Tensor] = []
        self._optimizers: dict[torch.Tensor, memd_client.AdamW] = {
            parameter: memd_client.AdamW([parameter], lr=1e-3, weight_decay=0.1)
            for parameter in self.model.parameters()
        }
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad()

    def step(self, number: int) -> None:
        loss = loss_of(self.model, batch(number))
        loss.backward()
        self.losses.append(loss.detach())

    def expect_the_bits_of(self, losses: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        expect_the_bits_of(self, losses, values)


class Training:
    def __init__(self, daemon: Daemon, **settings: Any) -> None:
        self.session = memd_client.connect(daemon.address, job="trained")
        self.model = memd_client.offload(build(), self.session)
        self.optimizer = memd_client.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, session=self.session, **settings
        )
        self.losses: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        loss = loss_of(self.model, batch(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def expect_the_bits_of(self, losses: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        expect_the_bits_of(self, losses, values)


def expect_the_bits_of(
    training: Training | SteppedTraining, losses: list[torch.Tensor], values: list[torch.Tensor]
) -> None:
    for number, (got, wanted) in enumerate(zip(training.losses, losses, strict=True)):
        assert torch.equal(got, wanted), number
    with memd_client.gather(training.model):
        for got, wanted in zip(training.model.parameters(), values, strict=True):
            assert torch.equal(got, wanted)
