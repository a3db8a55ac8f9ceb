"""A real daemon learns the order in which a trainer uses its parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

LAYER_COUNT = 24
WIDTH = 512  # a layer's weight is 1 MiB


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="96MiB", nvme="768MiB") as daemon:
        yield daemon


def counters(daemon: Daemon, job: str) -> dict[str, float]:
    text = daemon.get("/metrics")
    found = re.findall(rf'^(memd_\w+)_total{{memd_job="{job}"}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYER_COUNT))
    )


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def losses_without_memd(step_count: int) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(step_count):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_trainer_is_foreseen_from_its_second_step_on(daemon: Daemon) -> None:
    with memd_client.connect(
        daemon.address, job="foreseen", host_bytes="42MiB", nvme_bytes="300MiB"
    ) as session:
        model = memd_client.offload(make_model(), session)
        optimizer = memd_client.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.01, session=session
        )
        losses = []
        after_two: dict[str, float] = {}
        for step in range(6):
            if step == 3:
                after_two = counters(daemon, "foreseen")
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        after_six = counters(daemon, "foreseen")
        session.drop_job()
    assert losses == losses_without_memd(6)
    grown = {name: value - after_two[name] for name, value in after_six.items()}
    assert grown["memd_plan_uses_unforeseen"] == 0
    # Of each layer: forward, backward and its gradient.
    assert grown["memd_plan_uses_foreseen"] >= 2 * 3 * LAYER_COUNT
    assert grown["memd_prefetched_bytes"] > 0
    assert grown["memd_prefetch_hits"] > 0
    assert grown["memd_plan_necessary_bytes"] > 0
    # The private side's floor, a quarter of this small memory, keeps nothing.
    assert grown["memd_plan_moved_bytes"] <= 1.35 * grown["memd_plan_necessary_bytes"]


def test_evaluation_in_between_reads_what_was_trained(daemon: Daemon) -> None:
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    with memd_client.connect(
        daemon.address, job="evaluated", host_bytes="42MiB", nvme_bytes="300MiB"
    ) as session:
        model = memd_client.offload(make_model(), session)
        optimizer = memd_client.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.01, session=session
        )
        for step in range(9):
            if step % 3 == 2:
                with torch.no_grad():
                    for batch in range(100, 104):
                        assert torch.equal(loss_of(model, batch), loss_of(plain, batch))
                continue
            for each, its in ((model, optimizer), (plain, plain_optimizer)):
                loss_of(each, step).backward()
                its.step()
                its.zero_grad()
        seen = counters(daemon, "evaluated")
        session.drop_job()
    # The first time of each is new, and where one follows the other a few uses are.
    assert seen["memd_plan_uses_foreseen"] > 2 * seen["memd_plan_uses_unforeseen"]
