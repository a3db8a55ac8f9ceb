"""Parameters in tier "host": the bits of a training in memory, and what is left of them where the
trainer, the daemon or its memory is gone."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd.client import DaemonClient
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from tests.daemons import Daemon, Daemons
    from tests.faults.restarts import Restarts

STEPS = 6


class Plain:
    """The same training in memory."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.model = build()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )

    def step(self, number: int) -> torch.Tensor:
        loss = loss_of(self.model, batch(number).to(self.dtype))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, first: int, end: int) -> list[torch.Tensor]:
        return [self.step(number) for number in range(first, end)]


class Training(Plain):
    """`tiers`: of the model, or of every second child in turn."""

    def __init__(
        self,
        daemon: Daemon,
        job: str,
        tiers: tuple[str, ...] = ("host",),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.session = memd_client.connect(daemon.address, job=job)
        self.dtype = dtype
        self.model = build().to(dtype)
        if len(tiers) == 1:
            memd_client.offload(self.model, self.session, tier=tiers[0])
        else:
            children = [pair for pair in self.model.named_children() if [*pair[1].parameters()]]
            for at, tier in enumerate(tiers):
                part = nn.ModuleDict(dict(children[at :: len(tiers)]))
                memd_client.offload(part, self.session, tier=tier)
        self.optimizer = memd_client.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, session=self.session
        )

    def values(self) -> list[torch.Tensor]:
        with memd_client.gather(self.model):
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def expect(self, values: list[torch.Tensor]) -> None:
        for got, wanted in zip(self.values(), values, strict=True):
            assert torch.equal(got, wanted)

    def expect_the_bits_of(self, plain: Plain) -> None:
        self.expect([parameter.detach() for parameter in plain.model.parameters()])


def drop(daemon: Daemon, job: str) -> None:
    """Its memory is free for the next test."""
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_job(job, force=True)


@pytest.mark.parametrize("tiers", [("host",), ("host", "nvme")])
def test_tier_host_trains_with_torchs_bits(daemon: Daemon, tiers: tuple[str, ...]) -> None:
    plain = Plain()
    training = Training(daemon, "-".join(tiers), tiers)
    for number in range(STEPS):
        assert torch.equal(training.step(number), plain.step(number)), number
    training.expect_the_bits_of(plain)
    training.session.close()
    # The memory is the job's, whoever is attached.
    again = Training(daemon, "-".join(tiers), tiers)
    assert again.session.committed_step == STEPS
    again.expect_the_bits_of(plain)
    assert torch.equal(again.step(STEPS), plain.step(STEPS))
    again.session.close()
    drop(daemon, "-".join(tiers))


def test_tier_host_trains_with_the_bits_of_tier_nvme_in_bfloat16(daemon: Daemon) -> None:
    losses, values = [], []
    for tiers in (("nvme",), ("host",), ("nvme", "host")):
        training = Training(daemon, "half-" + "-".join(tiers), tiers, torch.bfloat16)
        losses.append(training.train(0, STEPS))
        values.append(training.values())
        training.session.close()
        drop(daemon, "half-" + "-".join(tiers))
    for others in losses[1:]:
        assert all(torch.equal(a, b) for a, b in zip(losses[0], others, strict=True))
    for other_values in values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values[0], other_values, strict=True))


@pytest.mark.parametrize("tiers", [("host",), ("host", "nvme")])
def test_a_killed_daemon_loses_nothing_of_it(restarts: Restarts, tiers: tuple[str, ...]) -> None:
    plain = Plain()
    training = Training(restarts.daemon, "killed", tiers)
    for number in range(STEPS):
        assert torch.equal(training.step(number), plain.step(number)), number
        if number == 2:
            assert training.session.snapshot("third") == 3
        if number in (1, 2, 4):  # the step is on its way, or made
            restarts.kill_and_begin_start()
    training.session.commit(wait=True)
    assert training.session.committed_step == STEPS
    training.expect_the_bits_of(plain)
    training.session.close()
    restarts.settle()


def test_a_daemon_that_is_followed_by_another_hands_over_what_nobody_is_attached_to(
    restarts: Restarts,
) -> None:
    plain = Plain()
    training = Training(restarts.daemon, "idle", ("host", "nvme"))
    training.train(0, 3)
    training.session.close()
    assert restarts.daemon.stop() == 0
    restarts.begin_start()
    again = Training(restarts.settle(), "idle", ("host", "nvme"))
    assert again.session.committed_step == 3
    plain.train(0, 3)
    again.expect_the_bits_of(plain)
    assert torch.equal(again.step(3), plain.step(3))
    again.session.close()


def test_a_daemon_without_a_keeper_says_what_is_lost_when_it_ends(daemons: Daemons) -> None:
    daemon = daemons.start("--holder-seconds", "0", name="ends")
    training = Training(daemon, "job")
    training.train(0, 2)
    assert training.session.snapshot("second") == 2
    training.train(2, 3)
    training.session.close()
    assert daemon.stop() == 0
    said = daemon.log.read_text()
    assert "nobody keeps what lives in tier host" in said
    daemon = daemons.start("--holder-seconds", "0", name="ends")
    again = Training(daemon, "job")
    assert again.session.committed_step == 2
    again.session.close()


@pytest.mark.parametrize("tiers", [("host",), ("host", "nvme")])
def test_without_its_memory_the_whole_job_is_at_its_last_snapshot(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    name = f"lost-{len(tiers)}"
    plain = Plain()
    daemon = daemons.start("--holder-seconds", "0", name=name)
    training = Training(daemon, "job", tiers)
    training.train(0, 2)
    training.session.snapshot("second")
    training.train(2, 3)
    assert training.session.snapshot("third") == 3
    training.train(3, 5)
    training.session.commit(wait=True)
    assert training.session.committed_step == 5
    assert training.session.durable_step == 3
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises(memd_client.DaemonUnavailable):
        training.session.close()

    daemon = daemons.start("--holder-seconds", "0", name=name)
    again = Training(daemon, "job", tiers)
    assert "goes back to snapshot third, at step 3" in daemon.log.read_text()
    assert again.session.committed_step == 3
    plain.train(0, 3)
    again.expect_the_bits_of(plain)
    for number in range(3, STEPS):
        assert torch.equal(again.step(number), plain.step(number)), number
    again.expect_the_bits_of(plain)
    again.session.close()


def test_without_its_memory_and_a_snapshot_it_is_refused_until_it_starts_over(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    daemon = daemons.start("--holder-seconds", "0", name="none")
    training = Training(daemon, "job", ("host", "nvme"))
    training.train(0, 2)
    training.session.commit(wait=True)
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises(memd_client.DaemonUnavailable):
        training.session.close()
    daemon = daemons.start("--holder-seconds", "0", name="none")
    with pytest.raises(memd_client.MemdError, match="kept parameters in tier host alone since"):
        memd_client.connect(daemon.address, job="job")
    memd_client.connect(daemon.address, job="job", fresh=True).close()


def test_the_command_line_and_metrics_say_what_a_power_cut_loses(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="memd_client"):
        training = Training(daemon, "told")
    said = [each.getMessage() for each in caplog.records if 'tier "host"' in each.getMessage()]
    assert len(said) == 1
    assert "power cut takes the whole job back to its last one" in said[0]
    training.train(0, 2)
    training.session.commit(wait=True)
    with DaemonClient(daemon.attach_socket) as client:
        (job,) = (each for each in client.jobs() if each.name == "told")
        element_count = sum(parameter.numel() for parameter in training.model.parameters())
        assert job.host_tier_bytes >= 12 * element_count
        assert (job.durability, job.durable_step, job.snapshot_count) == ("step", 0, 0)
    metrics = daemon.get("/metrics")
    found = re.search(r'^memd_job_host_tier_bytes\{memd_job="told"\} (\S+)$', metrics, re.MULTILINE)
    assert found
    assert float(found[1]) == job.host_tier_bytes
    training.session.snapshot("kept")
    training.train(2, 3)
    training.session.commit(wait=True)
    assert training.session.durable_step == 2
    training.session.close()
    drop(daemon, "told")


def test_what_tier_host_cannot_hold_is_refused_with_each_term(daemon: Daemon) -> None:
    session = memd_client.connect(daemon.address, job="large", host_bytes="32MiB")
    model = nn.Linear(1024, 1024, bias=False)
    memd_client.offload(model, session, tier="host")
    wider = nn.ModuleDict({"wider": nn.Linear(2048, 1024, bias=False)})
    with pytest.raises(memd_client.CapacityError, match="for tier host"):
        memd_client.offload(wider, session, tier="host")
    with pytest.raises(memd_client.CapacityError, match="more than its host quota") as refused:
        memd_client.AdamW(wider.named_parameters(), session=session, tier="host")
    for term in ("of tier host", "the largest parameter and its gradient", "tiles in work"):
        assert term in str(refused.value)
    session.close()
    session = memd_client.connect(daemon.address, job="large", host_bytes="32MiB")
    with pytest.raises(memd_client.MemdError, match='the job holds it in tier "host"'):
        memd_client.offload(nn.Linear(1024, 1024, bias=False), session, tier="nvme")
    session.close()
    drop(daemon, "large")


def test_a_snapshot_of_it_is_gone_back_to(daemon: Daemon) -> None:
    plain = Plain()
    training = Training(daemon, "back", ("host", "nvme"))
    training.train(0, 2)
    training.session.snapshot("second")
    training.train(2, 4)
    training.session.close()
    with DaemonClient(daemon.attach_socket) as client:
        client.restore_snapshot("back", "second")
    again = Training(daemon, "back", ("host", "nvme"))
    assert again.session.committed_step == 2
    plain.train(0, 2)
    again.expect_the_bits_of(plain)
    assert torch.equal(again.step(2), plain.step(2))
    again.session.close()
    drop(daemon, "back")
