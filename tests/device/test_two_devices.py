"""Two models in memd, each on a device of its own, in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import RATE, STEPS, batch
from tests.device.offloaded_models import Mlp
from tests.device.simulation import SIM
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session
    from tests.daemons import Daemon

SEEDS = (2, pytest.param(10, marks=pytest.mark.soak))
DEVICES = "sim:0", "sim:1"


class Part(nn.Module):
    """Names of two models in one job differ."""

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        layers = nn.Linear(inputs, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, outputs)
        self.add_module(name, nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        (layers,) = self.children()
        made: Tensor = layers(x)
        return made


def parts() -> list[Part]:
    torch.manual_seed(0)
    return [Part("first", 24, 32), Part("second", 32, 8)]


def one_after_the_other(models: list[Part], step: int) -> list[Tensor]:
    """The second takes what the first makes."""
    hidden = models[0](batch(step).to(DEVICES[0], non_blocking=True))
    loss = models[1](hidden.to(DEVICES[1], non_blocking=True)).square().mean()
    loss.backward()
    return [loss.detach()]


def beside_each_other(models: list[Part], step: int) -> list[Tensor]:
    """Nothing orders what one device does after the other."""
    inputs = batch(step), batch(step)[:, :8].repeat(1, 4)
    losses = [
        model(x.to(device, non_blocking=True)).square().mean()
        for model, x, device in zip(models, inputs, DEVICES, strict=True)
    ]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def _values(models: list[Part]) -> list[Tensor]:
    return [value.cpu() for model in models for value in model.state_dict().values()]


def reference(run: Callable[[list[Part], int], list[Tensor]]) -> list[Tensor]:
    there = [part.to(device) for part, device in zip(parts(), DEVICES, strict=True)]
    host = [each for part in parts() for each in part.parameters()]
    optimizer = torch.optim.AdamW(host, lr=RATE, fused=True)
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses += run(there, step)
        on_devices = [each for part in there for each in part.parameters()]
        for one, other in zip(on_devices, host, strict=True):
            assert one.grad is not None
            other.grad, one.grad = one.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for one, other in zip(on_devices, host, strict=True):
                one.copy_(other)
    return [*(loss.cpu() for loss in losses), *_values(there)]


def trained(
    session: Session, run: Callable[[list[Part], int], list[Tensor]], *, optimizers: int
) -> list[Tensor]:
    models = parts()
    for part, device in zip(models, DEVICES, strict=True):
        memd_client.offload(part, session, device=device)
    groups = [list(part.parameters()) for part in models]
    if optimizers == 1:
        groups = [[*groups[0], *groups[1]]]
    made = [memd_client.AdamW(group, lr=RATE) for group in groups]
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses += run(models, step)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return [*(loss.cpu() for loss in losses), *_values(models)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("run", [one_after_the_other, beside_each_other])
def test_both_have_the_bits_of_training_without_memd(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[list[Part], int], list[Tensor]],
    optimizers: int,
    seeds: int,
) -> None:
    expected = reference(run)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert are_equal(trained(session, run, optimizers=optimizers), expected)
            assert session.statistics().leases_held == 0


class Parts(nn.Module):
    """One loss over both devices: its backward has a thread for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Mlp() for _ in DEVICES)

    def forward(self, x: Tensor) -> Tensor:
        losses = [part(x.to(to)) for to, part in zip(DEVICES, self.parts, strict=True)]
        return torch.stack([loss.to(DEVICES[0]) for loss in losses]).sum()


@pytest.mark.parametrize("seeds", SEEDS)
def test_one_backward_over_both_loses_no_gradient(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    plain = Parts()
    for part, device in zip(plain.parts, DEVICES, strict=True):
        part.to(device)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            model = Parts()
            for name, device in enumerate(DEVICES):
                holder = nn.ModuleDict({str(name): model.parts[name]})
                memd_client.offload(holder, session, device=device, device_bytes="1MiB")
            # Values stay as they are.
            optimizer = memd_client.AdamW(model.named_parameters(), lr=0.0, session=session)
            for number in range(STEPS):
                for each in (plain, model):
                    each.zero_grad()
                    each(batch(number).to("sim", non_blocking=True)).backward()
                assert are_equal(gradients(model), gradients(plain))
                optimizer.step()


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.cpu() for each in model.parameters() if each.grad is not None]
