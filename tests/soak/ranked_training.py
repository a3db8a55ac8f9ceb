"""A training by several ranks whose every bit shows, as `live_training` has it for one process.
Ranks run it with memd and are killed at will; others repeat it undisturbed, with
DistributedDataParallel over gloo and torch's own optimizer.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import memd_client
from memd.demo.twin import MemoryAdamW
from tests.soak.live_training import append, build, hash_of, loss_of, replace, schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

WORLD_SIZE = 2
# Exit status of a rank that has said in its log why it ends.
TOLD = 3
# It ends so long after that: others say what they have seen, and not that this one has ended.
END_S = 0.5
# A rank that waits for another one in vain ends after this.
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedTraining:
    address: str
    durability: str
    micro_count: int  # micro-batches a step, all but the last under `no_sync`
    folder: Path

    def log(self, rank: int) -> Path:
        """A line "INDEX LOSS" for each micro-batch that this rank has computed, counted from the
        first step, and "# ERROR" where it was told."""
        return self.folder / f"losses-{rank}"

    @property
    def last(self) -> Path:
        """Holds the number of the step before which training ends, once that is known."""
        return self.folder / "last"

    @property
    def end(self) -> Path:
        """Holds "STEPS HASH" when training has ended."""
        return self.folder / "end"


def train(training: RankedTraining, rank: int, meeting: Path) -> None:
    """Until the step in `training.last`. Ends the process with TOLD where it cannot go on, as a
    program under torchrun would."""
    _meet(rank, meeting)
    try:
        _train(training, rank)
    except (memd_client.MemdError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        append(training.log(rank), f"# {said}")
        time.sleep(END_S)
        os._exit(TOLD)
    distributed.destroy_process_group()


def _train(training: RankedTraining, rank: int) -> None:
    session = memd_client.connect(
        training.address, job="ranked", durability=training.durability, host_bytes="32MiB"
    )
    model = memd_client.offload(build("fp32"), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, session=session)
    scheduler = schedule(optimizer)
    session.track(scheduler=scheduler, rng=True)
    torch.manual_seed(1 + rank)
    step = session.resume()
    while step != _read_number(training.last):
        _accumulate(
            model,
            rank,
            step,
            training.micro_count,
            session.no_sync,
            lambda index, loss: append(training.log(rank), f"{index} {loss}"),
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.commit()
        step += 1
    session.commit(wait=True)  # one more, of nothing: what was closed before it is committed
    if rank == 0:
        digest = hash_of(model.state_dict().values(), optimizer.state_dict()["state"])
        replace(training.end, f"{step} {digest}")
    distributed.barrier()
    session.close()


def repeat_undisturbed(
    rank: int, meeting: Path, micro_count: int, step_count: int
) -> tuple[list[str], str]:
    """Loss of every micro-batch of this rank, and the hash of all state, without memd."""
    _meet(rank, meeting)
    module = build("fp32")
    model = DistributedDataParallel(module)
    optimizer = MemoryAdamW([{"params": list(module.parameters())}])
    for group in optimizer.param_groups:
        group.update(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    scheduler = schedule(optimizer)
    torch.manual_seed(1 + rank)
    losses: list[str] = []
    for step in range(step_count):
        _accumulate(
            model, rank, step, micro_count, model.no_sync, lambda _, loss: losses.append(loss)
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    digest = hash_of(module.state_dict().values(), optimizer.state_dict()["state"])
    distributed.destroy_process_group()
    return losses, digest


def _accumulate(
    model: nn.Module,
    rank: int,
    step: int,
    micro_count: int,
    no_sync: Callable[[], AbstractContextManager[None]],
    note: Callable[[int, str], None],
) -> None:
    """All micro-batches of a step."""
    for index in range(micro_count * step, micro_count * (step + 1)):
        is_last = (index + 1) % micro_count == 0
        with nullcontext() if is_last else no_sync():
            loss = loss_of(model, WORLD_SIZE * index + rank, "fp32")
            note(index, float(loss.detach()).hex())
            loss.backward()


def _meet(rank: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=_TIMEOUT,
    )


def _read_number(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None
