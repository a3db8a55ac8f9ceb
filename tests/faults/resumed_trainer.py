"""Trains with everything that a loop can have in it, and kills itself where it is told to.

Run: python -m tests.faults.resumed_trainer   (test_exact_resume.py does)

For each line of standard input, `ADDRESS JOB MODEL DTYPE PLACE STEP`, it forks a process that
attaches to the job, resumes and trains, and dies by SIGKILL at PLACE of STEP; `nowhere 0`: it
trains to the end and drops the job. It says `start STEP`, `loss STEP BITS` for each step and
`end DIGEST` of the final state, and then the parent says `exit STATUS`. A fork has torch imported
already; each is a process of its own for the daemon.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memd_client

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchdata about torch
    from torchdata.stateful_dataloader import StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

STEPS, BATCHES_OF_AN_EPOCH, BATCH = 24, 10, 4
WIDTH, LENGTH, VOCABULARY = 32, 8, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        output: torch.Tensor = x + self.dropout(self.mlp(x))
        return output


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, die: Callable[[str], None]) -> torch.Tensor:
        x = self.embedding(x.long() % VOCABULARY)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 0:
                die("forward")
                x.register_hook(lambda _: die("backward"))
        output: torch.Tensor = self.head(x)
        return output


class Normed(nn.Module):
    """Batch norm, whose statistics and counter are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8, momentum=None)  # its average needs the counter
        self.second = nn.Linear(8 * LENGTH, VOCABULARY)

    def forward(self, x: torch.Tensor, die: Callable[[str], None]) -> torch.Tensor:
        x = self.first(x[:, None].to(self.first.weight.dtype) / 100)
        die("forward")
        x.register_hook(lambda _: die("backward"))
        x = functional.dropout(functional.relu(self.norm(x)), 0.1)
        output: torch.Tensor = self.second(x.flatten(1))
        return output


def train(address: str, job: str, kind: str, dtype: str, place: str, when: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    session = memd_client.connect(address, job=job, host_bytes="24MiB", nvme_bytes="48MiB")
    model = (Normed() if kind == "normed" else Gpt()).to(getattr(torch, dtype))
    memd_client.offload(model, session)
    if kind == "stepped":
        assert isinstance(model, Gpt)
        train_in_backward(session, model, place, when)
        return
    optimizer = memd_client.AdamW(
        model.parameters(), lr=1e-2, amsgrad=kind == "normed", session=session
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    samples = torch.randint(0, 200, (BATCHES_OF_AN_EPOCH * BATCH, LENGTH))
    loader = StatefulDataLoader(samples, batch_size=BATCH, shuffle=True)
    session.track(scheduler=scheduler, loader=loader, rng=True)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = -1

    def die(here: str) -> None:
        if (here, step) == (place, when):
            os.kill(os.getpid(), signal.SIGKILL)

    def average(commit: int) -> None:
        die("committed")
        if commit % 2:
            averaged.update_parameters(model)
        die("averaged")

    if kind == "averaged":
        session.track(averaged=averaged)
        session.after_commit(average)
    step = session.resume()
    say(f"start {step}")

    while step < STEPS:
        for batch in loader:
            noise = random.random() + np.random.random()
            output = model(batch, die)
            loss = output.float().square().mean() + noise * output.float().mean()
            say(f"loss {step} {loss.item().hex()}")
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            die("between")
            session.commit()
            die("after")
            if (place, step) == ("during", when):
                time.sleep(0.003)  # the daemon has it, or has just answered
                die("during")
            step += 1
            if step == STEPS:
                break
    digest = hashlib.sha256()
    state = model.state_dict()
    if kind == "averaged":
        state |= averaged.state_dict(prefix="averaged.")
    for name, value in state.items():
        digest.update(name.encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    for parameter in optimizer.state_dict()["state"].values():
        digest.update(parameter["exp_avg"].numpy().tobytes())
        digest.update(parameter["exp_avg_sq"].numpy().tobytes())
    say(f"end {digest.hexdigest()}")
    session.drop_job()


def train_in_backward(session: Session, model: Gpt, place: str, when: int) -> None:
    """Each parameter is stepped by a hook of its own, and nothing is tracked."""
    optimizers: dict[torch.Tensor, memd_client.AdamW] = {
        parameter: memd_client.AdamW([parameter], lr=1e-2) for parameter in model.parameters()
    }

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    first = session.resume()
    say(f"start {first}")
    for step in range(first, STEPS):

        def die(here: str, step: int = step) -> None:
            if (here, step) == (place, when):
                os.kill(os.getpid(), signal.SIGKILL)

        torch.manual_seed(step)
        loss = model(torch.randint(0, 200, (BATCH, LENGTH)), die).float().square().mean()
        say(f"loss {step} {loss.item().hex()}")
        loss.backward()
        die("after")
        if (place, step) == ("during", when):
            time.sleep(0.003)
            die("during")
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    for optimizer in optimizers.values():
        (moments,) = optimizer.state_dict()["state"].values()
        digest.update(moments["exp_avg"].numpy().tobytes())
        digest.update(moments["exp_avg_sq"].numpy().tobytes())
    assert session.committed_step == STEPS
    say(f"end {digest.hexdigest()}")
    session.drop_job()


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        address, job, kind, dtype, place, when = line.split()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(address, job, kind, dtype, place, int(when))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        say(f"exit {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main()
