"""Training with memd whose steps the simulated clock times.

The clock has the device's kernels and copies, and the waits of the host's threads. It has neither
Python's time nor the daemon's: a step is made once it is sent, behind the last gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import memd_client
from memd_client.device.device_leases import DeviceLeases
from memd_client.device.space import aligned
from memd_client.parameters.parameter import streamed
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from memd_client import Session
    from memd_client.connection.shard import Shard
    from tests.device.timeline import Timeline

INPUTS, WIDTH, ROWS = 24, 128, 256
# The copies' memory has its size then, and the order of uses is known.
WARM_STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return changed


class Blocks(nn.Module):
    """A perceptron with residuals, 512 KiB a block, and a head for `classes`."""

    def __init__(self, blocks: int, classes: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Whole steps, one after the other: each begins when the step before it is made."""

    timeline: Timeline
    copied_bytes: int  # of values to the device, a step: the memory that they take there
    uses: list[int]  # of one step, by shard id
    size_bytes: dict[int, int]  # that copies take, by shard id
    kept_ids: set[int]  # no step changes them

    @property
    def overlapped_share(self) -> float:
        """The part of the copies' time, into the device and out of it, in which a kernel runs too.
        All copies count, those of inputs as well."""
        copying_ns = sum(self.timeline.busy_ns(each) for each in ("copy_in", "copy_out"))
        both_ns = sum(self.timeline.overlap_ns("compute", each) for each in ("copy_in", "copy_out"))
        return both_ns / copying_ns


def leases_of(model: nn.Module) -> DeviceLeases:
    entry = streamed(next(model.parameters()))
    assert entry is not None
    leases = entry.job.leases_of(entry.shard)
    assert isinstance(leases, DeviceLeases)
    return leases


class TimedTraining:
    """Trains a model that is offloaded to the device."""

    def __init__(self, model: nn.Module, session: Session, batch: Tensor) -> None:
        self._model = model
        self._session = session
        self._batch = batch
        trained = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = memd_client.AdamW(trained, lr=1e-3)
        for _ in range(WARM_STEPS):
            self._step()

    def time(self, *, gigabytes_per_second: int = 50, steps: int = 2) -> TimedSteps:
        """Trains `steps` more."""
        torch.accelerator.synchronize()
        with SIM.copies_at(gigabytes_per_second * 1e9), SIM.timeline() as timeline:
            for _ in range(steps):
                self._step()
        leases = leases_of(self._model)
        copies_stream = leases._copies._stream.stream_id
        moved = timeline.entries("copy_in")
        shards = {_shard(each): each for each in self._model.parameters()}
        return TimedSteps(
            timeline=timeline,
            copied_bytes=sum(aligned(e.moved_bytes) for e in moved if e.stream == copies_stream)
            // steps,
            uses=list(leases._order._order),
            size_bytes={shard.shard_id: aligned(each.nbytes) for shard, each in shards.items()},
            kept_ids={shard.shard_id for shard, each in shards.items() if not each.requires_grad},
        )

    def _step(self) -> None:
        self._model(self._batch.to("sim", non_blocking=True)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        # The order of copies depends on nothing that the daemon has yet to do.
        self._session.transaction.job.steps.settle()


def _shard(parameter: nn.Parameter) -> Shard:
    entry = streamed(parameter)
    assert entry is not None
    return entry.shard
