"""Programs of every kind have the numbers that they have without memd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import RATE
from tests.device.offloaded_models import build
from tests.device.programs import PROGRAMS
from tests.device.simulation import SIM
from tests.device.staying import WrittenOut
from tests.device.trained import connected

if TYPE_CHECKING:
    from torch import Tensor, nn

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.programs import Program
    from tests.device.staying import Stepped

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))


def offloaded(session: Session) -> tuple[nn.Module, Stepped]:
    model = memd_client.offload(build("mlp"), session, device="sim")
    return model, memd_client.AdamW(model.parameters(), lr=RATE)


def staying(session: Session) -> tuple[nn.Module, Stepped]:
    model = build("mlp").to("sim")
    return model, memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)


def outcome(program: Program, model: nn.Module, optimizer: Stepped) -> list[Tensor]:
    found = program(model, optimizer)
    return [each.detach().cpu() for each in (*found, *model.state_dict().values())]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("made", [offloaded, staying], ids=lambda made: made.__name__)
def test_a_program_has_the_numbers_of_the_same_without_memd(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, made: object, program: Program, seeds: int
) -> None:
    assert callable(made)
    plain = build("mlp").to("sim")
    expected = outcome(program, plain, WrittenOut(list(plain.parameters())))
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert are_equal(outcome(program, *made(session)), expected)
