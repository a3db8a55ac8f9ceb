"""The training loop, the same for memd and for plain PyTorch."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memd.demo.text import Batches

LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
GRADIENT_NORM_MAX = 1.0
WARM_UP_STEPS = 10


class ClippingOptimizer(Protocol):
    """A torch.optim.Optimizer that clips the gradients it is going to consume."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...
    def step(self) -> object: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    step: int
    loss: float
    gradient_norm: float
    forward_seconds: float
    backward_seconds: float
    clip_seconds: float
    update_seconds: float  # from step() until its commit
    forward_wait_seconds: float  # of these, for leases
    backward_wait_seconds: float

    @property
    def seconds(self) -> float:
        return (
            self.forward_seconds + self.backward_seconds + self.clip_seconds + self.update_seconds
        )


def learning_rate_factor(step: int, *, step_count: int) -> float:
    """A linear warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(step_count - WARM_UP_STEPS, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


def no_wait() -> float:
    return 0.0


def no_commit() -> None:
    pass


def train(
    model: nn.Module,
    optimizer: Any,  # torch.optim.Optimizer and ClippingOptimizer: Python has no intersection type
    batches: Batches,
    *,
    step_count: int,
    observe: Callable[[StepRecord], None],
    lease_wait_seconds: Callable[[], float] = no_wait,
    finish_step: Callable[[], None] = no_commit,
) -> list[float]:
    """The loss of every step, before its update."""
    clipping: ClippingOptimizer = optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, step_count=step_count)
    )
    losses: list[float] = []
    for step in range(step_count):
        inputs, targets = batches.at(step)
        clock, waits = [time.perf_counter()], [lease_wait_seconds()]

        loss = model(inputs, targets)
        clock.append(time.perf_counter())
        waits.append(lease_wait_seconds())

        # Here and not after step(): until here plain training holds the gradients of the last step,
        # so that its peak is activations beside parameters, gradients and states, all of them.
        clipping.zero_grad()
        loss.backward()
        clock.append(time.perf_counter())
        waits.append(lease_wait_seconds())

        gradient_norm = clipping.clip_grad_norm_(GRADIENT_NORM_MAX)
        clock.append(time.perf_counter())

        clipping.step()
        scheduler.step()
        # Its work beside the progress line would be in nobody's time.
        finish_step()
        clock.append(time.perf_counter())

        losses.append(loss.item())
        forward, backward, clip, update = (end - begin for begin, end in itertools.pairwise(clock))
        observe(
            StepRecord(
                step=step,
                loss=losses[-1],
                gradient_norm=gradient_norm.item(),
                forward_seconds=forward,
                backward_seconds=backward,
                clip_seconds=clip,
                update_seconds=update,
                forward_wait_seconds=waits[1] - waits[0],
                backward_wait_seconds=waits[2] - waits[1],
            )
        )
    return losses
