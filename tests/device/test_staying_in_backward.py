"""Updates of parameters that stay on a device begin while backward runs, with the same bits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client import InvalidArgument
from memd_client.parameters.early import EarlyUpdates
from tests.device.models import are_equal
from tests.device.offloaded import RATE
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.staying import (
    backward,
    change_late,
    clamp_data,
    clip,
    drop_gradient,
    nothing,
    replace_gradient,
    with_memd,
    write_data,
    write_value,
    written_out,
)
from tests.device.trained import connected

if TYPE_CHECKING:
    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.staying import Change

SEEDS = (1, pytest.param(20, marks=pytest.mark.soak))
STEPS_MAX = 200


def early(model: nn.Module, session: Session) -> memd_client.AdamW:
    return memd_client.AdamW(
        model.named_parameters(), lr=RATE, session=session, step_in_backward=True
    )


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    "change",
    [
        *(nothing, replace_gradient, write_data, clamp_data),
        *(
            pytest.param(change, marks=pytest.mark.more)
            for change in (clip, drop_gradient, change_late, write_value)
        ),
    ],
)
def test_what_a_program_changes_before_a_step_counts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, change: Change, seeds: int
) -> None:
    """The update that has begun by then is made again."""
    expected = written_out(change, backwards=1)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch, durability="step") as session:
            found = with_memd(session, change, backwards=1, step_in_backward=True)
        assert are_equal(found, expected)


def adopted_count(daemon: Daemon, job: str) -> float:
    """Tiles of which the step took over the early update."""
    name = f'memd_early_tiles_adopted_total{{memd_job="{job}"}}'
    found = re.search(rf"^{re.escape(name)} (\S+)$", daemon.get("/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_steps_take_over_what_was_updated_during_backward(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch, durability="step") as session:
        model = build("mlp").to("sim")
        optimizer = early(model, session)
        for step in range(STEPS_MAX):
            backward(model, step)
            torch.accelerator.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            if adopted_count(daemon, session.transaction.job.name):
                return
        pytest.fail("no update has begun in backward")


def test_a_second_gradient_before_the_step(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(daemon, monkeypatch) as session:
        model = build("mlp").to("sim")
        optimizer = early(model, session)
        backward(model, 0)
        with pytest.raises(InvalidArgument, match=r"a second gradient of .* came before step"):
            backward(model, 1)
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, 0)
        model.zero_grad()  # a batch that the loop skips
        backward(model, 0)
        with pytest.raises(InvalidArgument, match="changes gradients after backward"):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert session.committed_step == 1


def test_an_update_that_cannot_begin_in_backward_is_made_by_the_step(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(EarlyUpdates, "gradient_is_final", fail)
    with connected(daemon, monkeypatch) as session:
        found = with_memd(session, nothing, backwards=1, step_in_backward=True)
    assert are_equal(found, written_out(nothing, backwards=1))
    assert "begins at step(), and not in backward: not today" in caplog.text


def test_offloaded_parameters_beside_are_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = nn.Sequential(build("mlp"), nn.Linear(1, 1).to("sim"))
        memd_client.offload(model[0], session, device="sim")
        with pytest.raises(memd_client.NotYet, match="step_in_backward=True with parameters on"):
            early(model, session)
