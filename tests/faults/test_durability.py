"""Steps that stay in memory for a while: the bits of a training in memory, what is on disk when,
and what is left where the memory is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd.client import DaemonClient
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from tests.daemons import Daemon, Daemons
    from tests.faults.restarts import Restarts

STEPS = 7


class Plain:
    """The same training in memory."""

    def __init__(self) -> None:
        self.model = build()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )

    def step(self, number: int) -> torch.Tensor:
        loss = loss_of(self.model, batch(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Training(Plain):
    def __init__(self, daemon: Daemon, durability: str | None = None, job: str = "trained") -> None:
        self.session = memd_client.connect(daemon.address, job=job, durability=durability)
        self.model = memd_client.offload(build(), self.session)
        self.optimizer = memd_client.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, session=self.session
        )

    def expect_the_bits_of(self, plain: Plain) -> None:
        with memd_client.gather(self.model):
            for got, wanted in zip(self.model.parameters(), plain.model.parameters(), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("durability", "durable_steps"),
    [
        ("step", [1, 2, 3, 4, 5, 6, 7]),
        ("every:3", [0, 0, 3, 3, 3, 6, 6]),
        ("none", [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_each_durability_trains_with_the_same_bits(
    daemon: Daemon, durability: str, durable_steps: list[int]
) -> None:
    plain = Plain()
    training = Training(daemon, durability, durability)
    for number in range(STEPS):
        assert torch.equal(training.step(number), plain.step(number)), number
        training.session.commit(wait=True)
        assert training.session.committed_step == number + 1
        assert training.session.durable_step == durable_steps[number]
    with DaemonClient(daemon.attach_socket) as client:
        (job,) = (each for each in client.jobs() if each.name == durability)
    assert (job.durability, job.durable_step) == (durability, durable_steps[-1])
    training.expect_the_bits_of(plain)
    training.session.close()

    again = Training(daemon, None, durability)  # closed in order: all of it is on disk
    assert (again.session.committed_step, again.session.durable_step) == (STEPS, STEPS)
    again.expect_the_bits_of(plain)
    again.session.close()


def test_without_its_memory_a_job_goes_on_from_its_last_step_on_disk(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    plain = Plain()
    daemon = daemons.start("--holder-seconds", "0", name="alone")
    training = Training(daemon, "every:3")
    for number in range(5):
        training.step(number)
        if number < 3:
            plain.step(number)
    training.session.commit(wait=True)
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises(memd_client.DaemonUnavailable):
        training.session.close()

    again = Training(daemons.start("--holder-seconds", "0", name="alone"))
    assert again.session.committed_step == 3
    again.expect_the_bits_of(plain)
    for number in range(3, STEPS):
        assert torch.equal(again.step(number), plain.step(number)), number
    again.expect_the_bits_of(plain)
    again.session.close()


def test_without_its_memory_a_job_without_durability_is_refused_until_it_starts_over(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    daemon = daemons.start("--holder-seconds", "0", name="unsure")
    training = Training(daemon, "none")
    training.step(0)
    training.session.commit(wait=True)
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises(memd_client.DaemonUnavailable):
        training.session.close()

    again = daemons.start("--holder-seconds", "0", name="unsure")
    with pytest.raises(memd_client.MemdError, match="without durability since step 1"):
        memd_client.connect(again.address, job="trained")
    fresh = memd_client.connect(again.address, job="trained", fresh=True)
    assert fresh.committed_step == 0
    fresh.close()


@pytest.mark.parametrize("durability", ["every:3", "none"])
def test_a_killed_daemon_loses_nothing_that_was_committed_in_memory(
    restarts: Restarts, durability: str
) -> None:
    plain = Plain()
    training = Training(restarts.daemon, durability)
    for number in range(STEPS):
        assert torch.equal(training.step(number), plain.step(number)), number
        if number in (2, 4, 5):  # the step is on its way, or made
            restarts.kill_and_begin_start()
    training.session.commit(wait=True)
    assert training.session.committed_step == STEPS
    durable_step = training.session.durable_step
    assert durable_step == 0 if durability == "none" else durable_step >= STEPS - 3
    training.expect_the_bits_of(plain)
    training.session.close()
    restarts.settle()

    again = Training(restarts.daemon)
    assert (again.session.committed_step, again.session.durable_step) == (STEPS, STEPS)
    again.expect_the_bits_of(plain)
    again.session.close()


@pytest.mark.parametrize("text", ["Step", "every:0", "every:x", "every:", "always"])
def test_another_durability_is_refused(daemon: Daemon, text: str) -> None:
    with pytest.raises(memd_client.InvalidArgument, match='"every:k" with k from 1'):
        memd_client.connect(daemon.address, job="trained", durability=text)
