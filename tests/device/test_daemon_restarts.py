"""The daemon is killed while copies to and from the device are under way, and another follows: the
trainer goes on with the same bits, and nothing is left of the copies.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd_client.base.interrupts import Latch
from memd_client.device.device_leases import DeviceLeases
from memd_client.parameters.parameter import streamed
from tests.device.announced_leases import announced_leases
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, RATE, STEPS, batch, reference
from tests.device.offloaded_models import build
from tests.device.registered_arena import registered_arena
from tests.device.simulation import SIM
from tests.faults.restarts import Restarts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from memd_client import Session
    from tests.daemons import Daemons

SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10)))
RESTARTED_STEP = 2
MODEL = "gpt"


@pytest.fixture(scope="module")
def restarts(daemons: Daemons) -> Iterator[Restarts]:
    """At one place for all tests, as each has a volume."""
    made = Restarts(daemons, "restarted", daemons.start(name="restarted"))
    yield made
    made.settle()
    made.daemon.stop()


@contextmanager
def connected(daemons: Restarts, patch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Without another `Session` for the next daemon. No end of a lease may race."""
    session = memd_client.connect(daemons.daemon.address, job="restarted", host_bytes="48MiB")
    with registered_arena(session), announced_leases(session, patch) as races:
        try:
            yield session
            gc.collect()
        finally:
            session.drop_job()
    assert not races, "; ".join(races)


class Disturbed:
    """A model whose daemon is killed once, at a moment of one step, when leases of values that come
    and of gradients that leave are held."""

    def __init__(self, model: nn.Module, daemons: Restarts) -> None:
        self.model = model
        self._daemons = daemons
        entry = streamed(next(model.parameters()))
        assert entry is not None
        leases = entry.job.leases_of(entry.shard)
        assert isinstance(leases, DeviceLeases)
        self._threads = leases._arrivals, leases._departures._thread
        self._is_killed = Latch()
        self.held_counts = [0, 0]  # of copies whose leases were held then

    def hold(self) -> None:
        """From now on no lease of a copy ends before the kill."""
        for thread in self._threads:
            thread.after(None, self._is_killed.wait)

    def kill(self) -> None:
        self.held_counts = [thread._tasks.qsize() for thread in self._threads]
        self._daemons.kill_and_begin_start()
        self._is_killed.open()

    @contextmanager
    def killed(self, moment: str) -> Iterator[None]:
        """In the middle of this moment."""
        layer, left = self.model.get_submodule("blocks.1.up"), [self.kill]

        def kill(*_: object) -> None:
            if left:
                left.pop()()

        if moment == "forward":
            handle = layer.register_forward_pre_hook(kill)
        else:
            handle = layer.get_parameter("weight").register_post_accumulate_grad_hook(kill)
        yield
        handle.remove()
        assert not left


def train(disturbed: Disturbed, moment: str) -> list[Tensor]:
    model = disturbed.model
    optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
    losses = []

    def both(step: int) -> Tensor:
        loss: Tensor = model(batch(step).to("sim", non_blocking=True))
        loss.backward()
        return loss.detach()

    for step in range(STEPS):
        is_disturbed = step == RESTARTED_STEP
        if is_disturbed:
            disturbed.hold()
        if is_disturbed and moment in ("forward", "backward"):
            with disturbed.killed(moment):
                losses.append(both(step))
        else:
            losses.append(both(step))
        if is_disturbed and moment == "between":
            disturbed.kill()
        optimizer.step()
        if is_disturbed and moment == "step":
            disturbed.kill()
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in (*losses, *model.state_dict().values())]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", ["forward", "backward", "between", "step"])
def test_training_goes_on_with_the_same_bits_and_nothing_is_left(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch, moment: str, seed: int
) -> None:
    expected = reference(MODEL, LOOPS[0], "sim")
    SIM.seed(seed)
    before_bytes = torch.accelerator.memory_allocated()
    with connected(restarts, monkeypatch) as session:
        disturbed = Disturbed(memd_client.offload(build(MODEL), session, device="sim"), restarts)
        found = train(disturbed, moment)
        assert are_equal(found, expected)
        come, left = disturbed.held_counts
        assert come
        assert left or moment == "forward"
        assert session.statistics().leases_held == 0
        del disturbed
    restarts.settle()
    gc.collect()
    assert torch.accelerator.memory_allocated() == before_bytes
