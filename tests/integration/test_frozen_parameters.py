"""A quantised model that is larger than the pool trains its adapters, over a daemon's death."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

import memd_client
from tests.daemons import daemons

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS = 2048, 17  # 68 MiB of bytes; the pool has 64 MiB


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(0, 256, (WIDTH, WIDTH), dtype=torch.uint8, generator=generator)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.001, dtype=torch.float16), requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = (self.weight.float() - 128) * self.scale.float()
        return functional.layer_norm(functional.linear(x, whole) + self.up(self.down(x)), (WIDTH,))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(seed) for seed in range(LAYERS)))


def losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    found = []
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        found.append(loss.item())
    return found


@pytest.mark.more
def test_a_quantised_model_larger_than_the_pool_trains_over_a_daemon_s_death() -> None:
    reference = build()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    expected = losses(reference, plain, range(5))
    found: list[float] = []
    with daemons() as made:
        for first, last in ((0, 3), (3, 5)):
            daemon = made.start()
            session = memd_client.connect(daemon.address, job="qlora")
            model = memd_client.offload(build(), session)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
            assert session.resume() == first
            found += losses(model, optimizer, range(first, last))
            if last < 5:
                session.commit(wait=True)
                session.close()
                daemon.process.kill()
                daemon.process.wait()
                continue
            state = model.state_dict()
            assert all(torch.equal(state[key], at) for key, at in reference.state_dict().items())
            session.close()
    assert found == expected
    assert len(set(expected)) == 5
