"""Every LR scheduler of torch comes back exactly: the rates after resume() are those of a run that
nothing disturbed.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler

import memd_client
from tests.unit.client_cases import Mlp
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

Optimizer = torch.optim.Optimizer
BEFORE, AFTER = 7, 9


def warm_then_cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=4),
            lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ],
        milestones=[4],
    )


def chained(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


MAKE: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=12),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": warm_then_cosine,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=[0, 1e-9]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 1e-4, 1e-2, step_size_up=5, mode="exp_range", gamma=0.99
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 1e-3], total_steps=20),
}


def test_these_are_all_of_torchs() -> None:
    theirs = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind)
        and issubclass(kind, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and name != "LRScheduler"
    }
    assert theirs == MAKE.keys()


def make(session: Session, name: str) -> tuple[Optimizer, Any]:
    model = memd_client.offload(Mlp(), session)
    parameters = list(model.parameters())
    optimizer = memd_client.AdamW(
        [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 1e-3}]
    )
    scheduler = MAKE[name](optimizer)
    session.track(scheduler=scheduler)
    return optimizer, (scheduler, model)


def run(
    session: Session, optimizer: Optimizer, scheduler: Any, first: int, count: int
) -> list[Any]:
    """The settings of every group after each of the steps."""
    seen = []
    for step in range(first, first + count):
        optimizer.step()  # without gradients: nothing but the scheduler moves
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(abs(step - 2)))
        else:
            scheduler.step()
        session.commit()
        seen += [{**group, "params": None} for group in optimizer.param_groups]
    return seen


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
def test_a_scheduler_goes_on_as_if_nothing_had_happened(name: str) -> None:
    with FakeDaemon().session() as session:
        optimizer, (scheduler, _model) = make(session, name)
        undisturbed = run(session, optimizer, scheduler, 0, BEFORE + AFTER)
        state = scheduler.state_dict()
    daemon = FakeDaemon()
    with daemon.session() as session:
        optimizer, (scheduler, _model) = make(session, name)
        seen = run(session, optimizer, scheduler, 0, BEFORE)
        del optimizer, scheduler, _model
    with daemon.session() as session:
        optimizer, (scheduler, _model) = make(session, name)
        assert session.resume() == BEFORE
        seen += run(session, optimizer, scheduler, BEFORE, AFTER)
        assert seen == undisturbed
        assert repr(scheduler.state_dict()) == repr(state)
