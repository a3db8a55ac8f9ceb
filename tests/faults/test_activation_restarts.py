"""The daemon is killed while what autograd has saved lies in it: the trainer goes on with the same
bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.parameters import saved_activations
from tests.faults.restarts import STEPS, reference, restarts  # noqa: F401  # pytest finds it here
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.restarts import Restarts


def once(action: Callable[[], None]) -> Callable[..., None]:
    left = [action]

    def act(*_: object) -> None:
        if left:
            left.pop()()

    return act


@pytest.mark.parametrize("moment", ["forward", "between", "backward"])
@pytest.mark.parametrize("activations", ["host", "nvme"])
def test_a_killed_daemon_loses_nothing_that_was_saved(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    activations: str,
    moment: str,
) -> None:
    monkeypatch.setattr(saved_activations, "SMALL_BYTES", 1)
    daemons: Restarts = request.getfixturevalue("restarts")
    session = memd_client.connect(daemons.daemon.address, job="trained")
    model = build()
    memd_client.offload(model, session, activations=activations)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    assert isinstance(model, nn.Sequential)
    losses = []
    for step in range(STEPS):
        interrupt = once(daemons.kill_and_begin_start)
        handles = []
        if step == STEPS // 2 and moment == "forward":
            handles.append(model[2].register_forward_pre_hook(interrupt))
        if step == STEPS // 2 and moment == "backward":
            handles += [
                parameter.register_post_accumulate_grad_hook(interrupt)
                for parameter in model[2].parameters()
            ]
        loss = loss_of(model, batch(step))
        if step == STEPS // 2 and moment == "between":
            interrupt()
        loss.backward()
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
    expected_losses, expected = reference()
    assert all(map(torch.equal, losses, expected_losses))
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.detach(), value)
    assert session.statistics().activation_bytes == 0
    session.close()
