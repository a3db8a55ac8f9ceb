"""A daemon dies under its trainer, and nobody keeps its memory or waits for it: the trainer ends
with an error; the job does not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.daemons import TIMEOUT_S
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from tests.daemons import Daemons

STEPS_BEFORE, STEPS_AFTER = 3, 3


def test_the_trainer_is_told_and_the_job_stands_at_its_last_commit(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    plain = build()
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def train_both(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int
    ) -> None:
        for step in range(first, first + count):
            loss, wanted = loss_of(model, batch(step)), loss_of(plain, batch(step))
            assert torch.equal(loss, wanted), step
            loss.backward()
            wanted.backward()
            optimizer.step()
            twin.step()
            optimizer.zero_grad()
            twin.zero_grad()

    daemon = daemons.start("--holder-seconds", "0", name="killed")
    session = memd_client.connect(daemon.address, job="outlives")
    model = memd_client.offload(build(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, session=session)
    train_both(model, optimizer, 0, STEPS_BEFORE)
    loss_of(model, batch(STEPS_BEFORE)).backward()  # gradients that no step has seen
    daemon.process.kill()
    daemon.process.wait()

    started = time.monotonic()
    # What was in memory is still there, and is read without asking anybody.
    loss, wanted = loss_of(model, batch(STEPS_BEFORE)), loss_of(plain, batch(STEPS_BEFORE))
    assert torch.equal(loss, wanted)
    with pytest.raises(memd_client.DaemonUnavailable, match="has ended"):
        loss.backward()
    assert time.monotonic() - started < TIMEOUT_S, "a lease waits for a daemon that is gone"
    optimizer.step()
    with pytest.raises(memd_client.DaemonUnavailable, match=r"step 4: it is not known whether"):
        session.commit(wait=True)
    with pytest.raises(memd_client.DaemonUnavailable):
        session.close()

    again = daemons.start("--holder-seconds", "0", name="killed")
    session = memd_client.connect(again.address, job="outlives")
    assert session.committed_step == STEPS_BEFORE
    model = memd_client.offload(build(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, session=session)
    train_both(model, optimizer, STEPS_BEFORE, STEPS_AFTER)
    with memd_client.gather(model):
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got, expected)
    session.close()
