"""torch.compile of offloaded models, with a real daemon whose memory is short, or is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.daemons import running_daemon
from tests.unit.compiled_models import ASKS_FOR_GRADIENTS, compiling_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

pytestmark = ASKS_FOR_GRADIENTS
WIDTH = 768  # a block's parameters are 4.5 MiB, and all states 72 MiB
BLOCK_COUNT = 4


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="176MiB", nvme="1GiB") as daemon:
        yield daemon


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BLOCK_COUNT)
        )
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in compiling_first(range(5)):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    for _ in compiling_first(range(2)):
        with torch.no_grad():
            losses.append(model(torch.ones(4, WIDTH)).square().mean().item())
    return losses


@pytest.mark.parametrize("host", ["18MiB", "128MiB"])
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_training_has_the_bits_of_the_plain_model(daemon: Daemon, host: str, how: str) -> None:
    torch._dynamo.reset()
    torch.set_num_threads(1)
    reference = make_model()
    expected: Any = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True))
    with memd_client.connect(
        daemon.address, job=f"{how}-{host}", host_bytes=host, nvme_bytes="200MiB"
    ) as session:
        model = memd_client.offload(make_model(), session)
        for module in [model] if how == "whole" else model:
            module.compile(backend="aot_eager")
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
        assert train(model, optimizer) == expected
        assert session.statistics().leases_held == 0
        assert session.committed_step == 5
        for value, wanted in zip(
            model.state_dict().values(), reference.state_dict().values(), strict=True
        ):
            assert torch.equal(value, wanted)
        session.drop_job()
