"""Programs that torch writes over all parameters or all gradients at once, with a model and
gradients that are each larger than the job's host memory: the bits of the same program in plain
PyTorch, and no CapacityError.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
)

import memd_client
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session
    from tests.daemons import Daemon

    # Trains a model of its own, which `prepare` may offload and `make_adam` updates; returns what
    # it computed.
    Program = Callable[["Trainer"], list[torch.Tensor]]

# 8 MiB, twice what leases may take: the quota is rounded up to 12 MiB, of which updates need 8.
LAYER_COUNT = 32
WIDTH = 256
HOST_BYTES = 10 << 20
STEP_COUNT = 2
# The tensors are small: more threads would only wait for each other.
torch.set_num_threads(1)


class Trainer:
    """One run of a program: with memd, or in plain PyTorch."""

    def __init__(self, session: Session | None) -> None:
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for _ in range(LAYER_COUNT):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.model = nn.Sequential(*layers)
        self.session = session
        if session is not None:
            memd_client.offload(self.model, session)

    def adam(self) -> torch.optim.Optimizer:
        if self.session is not None:
            return memd_client.AdamW(self.model.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def loss(self, step: int, model: nn.Module | None = None) -> torch.Tensor:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = (model or self.model)(batch).square().mean()
        return loss

    def result(self) -> list[torch.Tensor]:
        return list(self.model.state_dict().values())


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="64MiB", nvme="512MiB") as daemon:
        yield daemon


def assert_torchs_bits(program: Program, daemon: Daemon) -> None:
    expected = program(Trainer(None))
    job = "small-pool"
    with memd_client.connect(daemon.address, job=job, host_bytes=HOST_BYTES) as session:
        try:
            found = program(Trainer(session))
            assert session.statistics().leases_held == 0
        finally:
            session.drop_job()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def clipping(trainer: Trainer, clip: Callable[[list[nn.Parameter]], Any]) -> list[torch.Tensor]:
    optimizer = trainer.adam()
    norms = []
    for step in range(STEP_COUNT):
        trainer.loss(step).backward()
        norm = clip(list(trainer.model.parameters()))
        norms += [norm] if norm is not None else []
        optimizer.step()
        optimizer.zero_grad()
    return norms + trainer.result()


def stepping_in_backward(trainer: Trainer) -> list[torch.Tensor]:
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trainer.model.parameters():
        optimizers[parameter] = (
            memd_client.AdamW([parameter], lr=1e-3)
            if trainer.session is not None
            else torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        )
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(STEP_COUNT):
        trainer.loss(index).backward()
    if trainer.session is not None:
        assert trainer.session.committed_step == STEP_COUNT
    return trainer.result()


def test_steps_called_in_backward(daemon: Daemon) -> None:
    assert_torchs_bits(stepping_in_backward, daemon)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_norm(daemon: Daemon, norm_type: float, *, foreach: bool | None) -> None:
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1e-3, norm_type=norm_type, foreach=foreach)
    assert_torchs_bits(partial(clipping, clip=clip), daemon)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(daemon: Daemon, *, foreach: bool | None) -> None:
    clip = partial(nn.utils.clip_grad_value_, clip_value=1e-6, foreach=foreach)
    assert_torchs_bits(partial(clipping, clip=clip), daemon)


def scaling(trainer: Trainer, *, unscale: bool) -> list[torch.Tensor]:
    optimizer = trainer.adam()
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0, growth_interval=2)
    scales = []
    for step in range(STEP_COUNT + 1):
        loss = trainer.loss(step)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            scales.append(nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(torch.tensor(scaler.get_scale()))
    if trainer.session is not None:
        assert trainer.session.committed_step == STEP_COUNT + 1
    # A norm of NaN differs from itself.
    return [each.nan_to_num() for each in scales] + trainer.result()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_and_a_step_with_infs(daemon: Daemon, *, unscale: bool) -> None:
    assert_torchs_bits(partial(scaling, unscale=unscale), daemon)


def averaging(trainer: Trainer, **averages: Any) -> list[torch.Tensor]:
    optimizer = trainer.adam()
    averaged = AveragedModel(trainer.model, **averages)
    for step in range(STEP_COUNT):
        trainer.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(trainer.model)
    return list(averaged.state_dict().values()) + trainer.result()


@pytest.mark.parametrize(
    "averages",
    [
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"avg_fn": get_ema_avg_fn(0.9)},
        {"avg_fn": get_swa_avg_fn(), "use_buffers": True},
    ],
    ids=["swa", "ema, foreach", "ema", "swa, one by one"],
)
def test_averages_of_parameters(daemon: Daemon, averages: dict[str, Any]) -> None:
    assert_torchs_bits(partial(averaging, **averages), daemon)


def averaging_in_memd(trainer: Trainer, **averages: Any) -> list[torch.Tensor]:
    """The average is offloaded too."""
    averaged = AveragedModel(Trainer(None).model, **averages)
    averaged.requires_grad_(False)
    if trainer.session is not None:
        memd_client.offload(averaged, trainer.session)
    optimizer = trainer.adam()
    for step in range(STEP_COUNT + 1):
        trainer.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(trainer.model)
    return list(averaged.state_dict().values()) + trainer.result()


@pytest.mark.parametrize(
    "averages", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": get_ema_avg_fn(0.9)}]
)
def test_averages_that_are_offloaded(daemon: Daemon, averages: dict[str, Any]) -> None:
    assert_torchs_bits(partial(averaging_in_memd, **averages), daemon)


def flattening(trainer: Trainer) -> list[torch.Tensor]:
    """As natural gradients and federated averages do."""
    parameters = list(trainer.model.parameters())
    optimizer = trainer.adam()
    found = []
    for step in range(STEP_COUNT):
        vector = nn.utils.parameters_to_vector(parameters)
        (trainer.loss(step) + vector.square().sum() * 1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(vector.detach())
        found.append(torch.cat([parameter.data.reshape(-1) for parameter in parameters]))
        nn.utils.vector_to_parameters(found[-1] * 0.5, parameters)
    return found + trainer.result()


def test_parameters_as_a_vector(daemon: Daemon) -> None:
    assert_torchs_bits(flattening, daemon)


def saving_on_cpu(trainer: Trainer) -> list[torch.Tensor]:
    optimizer = trainer.adam()
    for step in range(STEP_COUNT):
        with torch.autograd.graph.save_on_cpu():
            loss = trainer.loss(step)
        if trainer.session is not None:
            assert trainer.session.statistics().leases_held == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainer.result()


def test_save_on_cpu(daemon: Daemon) -> None:
    assert_torchs_bits(saving_on_cpu, daemon)


def training_by(
    trainer: Trainer, make: Callable[[Any], torch.optim.Optimizer]
) -> list[torch.Tensor]:
    optimizer = make(trainer.model.parameters())
    for step in range(STEP_COUNT):
        trainer.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainer.result()


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, foreach=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(torch.optim.AdamW, lr=0.1, foreach=True),
        partial(torch.optim.Adam, lr=0.1, fused=True),
        partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    ],
    ids=["sgd, foreach", "nesterov", "sgd, fused", "adamw, foreach", "adam, fused", "adagrad"],
)
def test_optimizers_of_others(daemon: Daemon, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    assert_torchs_bits(partial(training_by, make=make), daemon)


def reading_all_gradients(trainer: Trainer) -> list[torch.Tensor]:
    """As loops do that log, check or average gradients."""
    optimizer = trainer.adam()
    found = []
    for step in range(STEP_COUNT):
        trainer.loss(step).backward()
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        found.append(torch.stack([gradient.norm() for gradient in gradients]))
        found += torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 0.5)
        found.append(nn.utils.parameters_to_vector(gradients))
        found.append(torch.cat([gradient.detach().flatten() for gradient in gradients]))
        found.append(torch.tensor([bool(torch.isfinite(g.data).all()) for g in gradients]))
        optimizer.step()
        # Still what they were.
        found.append(torch.stack([gradient.sum() for gradient in gradients]))
        del gradients
        optimizer.zero_grad()
    return found + trainer.result()


def test_reading_all_gradients(daemon: Daemon) -> None:
    assert_torchs_bits(reading_all_gradients, daemon)
