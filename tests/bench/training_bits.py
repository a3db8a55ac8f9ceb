"""Losses of one small GPT, trained in ways that must not differ in a single bit.

`resident`: a pool that holds everything. `streamed`: a cache for a quarter of parameters and
states, and after each step the loop waits until it is committed. `overlapped`: the same cache, and
nobody waits: updates go on beside the next forward. `in_backward`: updates begin during backward.
All against plain PyTorch with its fused AdamW.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

import memd_client
from memd.client import DaemonClient
from memd.demo import sizes
from memd.demo.model import GPTShape, build_model, parameter_groups
from memd.demo.run import private_daemon
from memd.demo.text import Batches, read_standard_library
from memd.demo.train import BETAS, LEARNING_RATE, WEIGHT_DECAY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

# 1.6 M parameters, most of them in matrices of a tile or more: each of these has a bucket of its
# own, and the small ones share another.
SHAPE = GPTShape(width=256, depth=2, sequence=32)
BATCH = 4
CACHE_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    cache_fraction: float = CACHE_FRACTION
    waits: bool = False
    step_in_backward: bool = False
    durability: str = "step"


WAYS = {
    "resident": Way(cache_fraction=2.0, durability="none"),
    "streamed": Way(waits=True),
    "overlapped": Way(),
    "overlapped, every:10": Way(durability="every:10"),
    "in backward": Way(step_in_backward=True),
}


def drawn_batches() -> Batches:
    return Batches(read_standard_library(), batch=BATCH, sequence=SHAPE.sequence, seed=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    losses: list[float]
    read_bytes: int = 0  # of the disk, in all


def nothing() -> None:
    pass


def _losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step_count: int,
    *,
    after_step: Callable[[], object] = nothing,
) -> list[float]:
    batches = drawn_batches()
    losses: list[Tensor] = []
    for step in range(step_count):
        inputs, targets = batches.at(step)
        loss: Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        after_step()
    return [loss.item() for loss in losses]


def train_plain(step_count: int) -> Trained:
    model = build_model(SHAPE, dtype=torch.float32, seed=0)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay=WEIGHT_DECAY),
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )
    return Trained(losses=_losses(model, optimizer, step_count))


def train_with_memd(way: Way, step_count: int, folder: Path) -> Trained:
    pool = sizes.host_pool(
        SHAPE.parameter_count,
        gradient_element_bytes=4,
        cache_fraction=way.cache_fraction,
        module_elements_max=SHAPE.module_elements_max,
    )
    volume = sizes.volume(SHAPE.parameter_count, gradient_element_bytes=4)
    nvme_bytes = volume.total_bytes + volume.state_bytes  # as `every:k` needs
    address = f"embedded:{quote(str(folder))}?host={pool.total_bytes}B&nvme={nvme_bytes}B"
    with (
        private_daemon(address) as daemon,
        memd_client.connect(address, job="bits", durability=way.durability) as session,
        DaemonClient(daemon.address.attach_socket) as meter,
    ):
        model = build_model(SHAPE, dtype=torch.float32, seed=0)
        memd_client.offload(model, session, tier="nvme")
        optimizer = memd_client.AdamW(
            parameter_groups(model, weight_decay=WEIGHT_DECAY),
            lr=LEARNING_RATE,
            betas=BETAS,
            session=session,
            step_in_backward=way.step_in_backward,
        )

        def wait_for_commit() -> None:
            _ = session.committed_step

        losses = _losses(
            model,
            optimizer,
            step_count,
            after_step=wait_for_commit if way.waits else nothing,
        )
        wait_for_commit()
        read_bytes = sum(device.read_bytes for device in meter.status().devices)
    return Trained(losses=losses, read_bytes=read_bytes)


def first_difference(losses: Sequence[float], expected: Sequence[float]) -> int | None:
    """The first step whose loss has other bits, or that only one of them has."""
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=False)):
        if struct.pack("<d", loss) != struct.pack("<d", wanted):
            return step
    return None if len(losses) == len(expected) else min(len(losses), len(expected))
