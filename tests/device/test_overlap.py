"""By the simulated clock, copies of an offloaded model run while kernels run.

The share of a run is that part of the copies' time, values and inputs to the device and gradients
from it, in which a kernel runs too: two whole steps, of which nothing is left out. So the first
values of a step, before which there is nothing to compute, and the last gradient, after which there
is nothing, count as what they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.device.offloaded import budget_bytes
from tests.device.timed_training import INPUTS, ROWS, Blocks, TimedTraining
from tests.device.trained import connected, least_bytes

if TYPE_CHECKING:
    from tests.daemons import Daemon

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and the memory of its copies. Kernels of forward and backward together take longer
    than the bytes that come, and than those that leave."""

    blocks: int
    classes: int
    share: float  # of the parameters; 0: what the largest module needs, and a quarter

    def __str__(self) -> str:
        return f"{self.blocks}-blocks-{self.classes}-classes-{self.share or 'least'}"


SHAPES = (Shape(16, 8, 0.5), Shape(16, 1024, 0.25), Shape(16, 1024, 0.0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nineteen_of_twenty_parts_of_the_copies_time_are_the_kernels_time_too(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = Blocks(shape.blocks, shape.classes)
        device_bytes = max(budget_bytes(model, shape.share) or 0, least_bytes(model, session))
        memd_client.offload(model, session, device="sim", device_bytes=device_bytes)
        training = TimedTraining(model, session, torch.randn(ROWS, INPUTS))
        for speed in (50, 25):
            found = training.time(gigabytes_per_second=speed)
            kernels_ns, *copies_ns = map(found.timeline.busy_ns, ("compute", "copy_in", "copy_out"))
            assert kernels_ns > max(copies_ns)
            log.info("%s, %d GB/s: %.4f", shape, speed, found.overlapped_share)
            assert found.overlapped_share >= 0.95
        del model, training
