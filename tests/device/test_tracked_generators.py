"""track(rng=True) keeps the generators of devices: drawn numbers go on as if nobody had stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memd_client
from memd_client import InvalidArgument
from memd_client.random_states import random_state, refuse_other_generators, set_random_state
from tests.device.models import are_equal
from tests.device.offloaded import RATE, STEPS, batch
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from memd_client import Session
    from tests.daemons import Daemon

JOB = "generators"


class Dropping(nn.Module):
    """Draws on the device in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.gelu(self.first(x)), 0.5)
        loss: Tensor = self.second(hidden).square().mean()
        return loss


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A generator of its own for each device: the simulation's is the CPU's."""
    held = [torch.tensor([number], dtype=torch.uint8) for number in range(2)]

    def get_state(device: int = 0) -> Tensor:
        return held[device].clone()

    def set_state(state: Tensor, device: int = 0) -> None:
        held[device] = state.clone()

    monkeypatch.setattr(SIM, "get_rng_state", get_state)
    monkeypatch.setattr(SIM, "set_rng_state", set_state)
    return held


def train(session: Session, last: int) -> tuple[list[Tensor], list[Tensor]]:
    """From where the job is: the losses and the model's state."""
    torch.manual_seed(0)
    model = memd_client.offload(Dropping(), session, device="sim")
    optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
    session.track(rng=True)
    losses = []
    for step in range(session.resume(), last):
        loss = model(batch(step).to("sim"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()
        losses.append(loss.detach().cpu())
    return losses, [each.cpu() for each in model.state_dict().values()]


def test_drawn_numbers_go_on_after_a_resume(daemon: Daemon) -> None:
    found = []
    for stops in ((STEPS,), (2, STEPS)):
        losses: list[Tensor] = []
        values: list[Tensor] = []
        for stop in stops:
            with memd_client.connect(daemon.address, job=JOB, host_bytes="32MiB") as session:
                more, values = train(session, stop)
            losses += more
        found.append([*losses, *values])
        with memd_client.connect(daemon.address, job=JOB) as session:
            session.drop_job()
    assert are_equal(*found)


def test_the_states_of_all_devices_come_back(daemon: Daemon, states: list[Tensor]) -> None:
    with memd_client.connect(daemon.address, job=JOB, host_bytes="32MiB") as session:
        states[1].fill_(7)
        train(session, 1)
    for state in states:
        state.fill_(9)
    with memd_client.connect(daemon.address, job=JOB) as session:
        train(session, 1)
        session.drop_job()
    assert [int(state) for state in states] == [0, 7]


def test_the_states_of_devices_that_are_not_there_are_refused(states: list[Tensor]) -> None:
    state = random_state()
    refuse_other_generators(state)
    set_random_state(state)
    one = {**state, "others": {"sim": states[:1]}}
    with pytest.raises(InvalidArgument, match="of 1 devices of type 'sim'; this process has 2"):
        refuse_other_generators(one)
    with pytest.raises(InvalidArgument, match="of 2 devices of type 'xpu'; this process has 0"):
        refuse_other_generators({**state, "others": {"xpu": states}})
