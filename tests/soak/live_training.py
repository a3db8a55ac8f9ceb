"""A training whose every bit shows: dropout, batch norm, a learning rate that moves, random numbers
that the session tracks. One process runs it with memd and is killed at will; another repeats it in
memory, undisturbed, with torch's own optimizer.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import memd_client
from memd.demo.twin import MemoryAdamW

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WIDTH = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Everything resident; or so little that parameters are evicted and gradients spill.
HOST_BYTES = {
    ("resident", "fp32"): "32MiB",
    ("resident", "bf16"): "32MiB",
    ("short", "fp32"): "12MiB",
    ("short", "bf16"): "10MiB",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    address: str
    job: str
    dtype: str
    durability: str
    memory: str
    step_in_backward: bool
    log: Path  # "STEP LOSS" for each loss that was computed, also those of steps that were lost
    stop: Path  # the training ends when it exists
    end: Path  # "STEPS HASH", written when it has ended


def build(dtype: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.BatchNorm1d(2 * WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WIDTH),
    )
    return model.to(DTYPES[dtype])


def loss_of(model: nn.Module, step: int, dtype: str) -> torch.Tensor:
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    inputs = inputs.to(DTYPES[dtype])
    loss: torch.Tensor = (model(inputs) - inputs).float().square().mean()
    return loss


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)


def import_all() -> None:
    """The first optimizer of a process imports for a second: what is forked afterwards need not."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])


def train(training: Training) -> None:
    """Until `training.stop` exists. Where the session is given up, it starts over at the last
    committed step as a new process would.
    """
    torch.set_num_threads(1)
    while True:
        try:
            _train_in_one_session(training)
        except memd_client.SessionFenced as fenced:
            append(training.log, f"# fenced: {fenced}".replace("\n", " "))
        else:
            return


def _train_in_one_session(training: Training) -> None:
    session = memd_client.connect(
        training.address,
        job=training.job,
        durability=training.durability,
        host_bytes=HOST_BYTES[training.memory, training.dtype],
    )
    model = memd_client.offload(build(training.dtype), session)
    optimizer = memd_client.AdamW(
        model.parameters(),
        lr=1e-3,
        weight_decay=0.1,
        session=session,
        step_in_backward=training.step_in_backward,
    )
    scheduler = schedule(optimizer)
    session.track(scheduler=scheduler, rng=True)
    torch.manual_seed(1)
    step = session.resume()
    while not training.stop.exists():
        loss = loss_of(model, step, training.dtype)
        append(training.log, f"{step} {float(loss).hex()}")
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.commit()
        step += 1
    session.commit(wait=True)  # one more, of nothing: what was closed before it is committed
    state = model.state_dict()
    digest = hash_of(state.values(), optimizer.state_dict()["state"])
    replace(training.end, f"{step} {digest}")
    session.close()


def repeat_in_memory(dtype: str, step_count: int) -> tuple[list[str], str]:
    """Loss of every step and the hash of all state, without memd."""
    torch.set_num_threads(1)
    model = build(dtype)
    optimizer = MemoryAdamW([{"params": list(model.parameters())}])
    for group in optimizer.param_groups:
        group.update(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    scheduler = schedule(optimizer)
    torch.manual_seed(1)
    losses = []
    for step in range(step_count):
        loss = loss_of(model, step, dtype)
        losses.append(float(loss).hex())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    return losses, hash_of(model.state_dict().values(), state)


def hash_of(tensors: Iterable[torch.Tensor], moments: dict[int, dict[str, Any]]) -> str:
    """Of parameters, buffers, both moments and the number of updates of every parameter."""
    digest = hashlib.sha256()
    parts = list(tensors)
    for index in sorted(moments):
        state = moments[index]
        parts += [torch.as_tensor(state["step"]).float().reshape(1)]
        parts += [state["exp_avg"].float(), state["exp_avg_sq"].float()]
    for tensor in parts:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def losses_of(log: Path) -> tuple[dict[int, set[str]], list[str]]:
    """Every loss that was computed for each step, and what was said beside them."""
    losses: dict[int, set[str]] = {}
    said = []
    for line in log.read_text().splitlines():
        if line.startswith("#"):
            said.append(line)
            continue
        step, loss = line.split()
        losses.setdefault(int(step), set()).add(loss)
    return losses, said


def append(path: Path, line: str) -> None:
    """In one write: a killed process leaves whole lines."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (line + "\n").encode())
    os.close(fd)


def replace(path: Path, line: str) -> None:
    """At once: a killed process leaves all of it or none."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(line + "\n")
    unfinished.rename(path)
