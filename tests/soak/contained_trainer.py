"""A training for a container that has torch and memd_client alone: it says each loss, and at the
end a hash of all state, in bits. `--plain` makes the same steps without memd.

Run: python -m tests.soak.contained_trainer --job NAME --steps N [--plain]
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import TYPE_CHECKING

import torch

import memd_client
from tests.faults.small_training import batch, build, loss_of

if TYPE_CHECKING:
    from torch import nn


def hash_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters, both moments and the number of updates of each."""
    digest = hashlib.sha256()
    parts = list(model.state_dict().values())
    for _, moments in sorted(optimizer.state_dict()["state"].items()):
        parts += [moments["step"].float(), moments["exp_avg"], moments["exp_avg_sq"]]
    for part in parts:
        digest.update(part.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def say(*words: object) -> None:
    print(*words, flush=True)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = loss_of(model, batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(step, float(loss).hex())


def train_plain(steps: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(steps):
        step_once(model, optimizer, step)
    say("end", hash_of(model, optimizer))


def train_in_one_session(job: str, steps: int) -> None:
    with memd_client.connect(job=job, host_bytes="32MiB") as session:
        model = memd_client.offload(build(), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        for step in range(session.resume(), steps):
            step_once(model, optimizer, step)
        session.commit(wait=True)
        say("end", hash_of(model, optimizer))


def train(job: str, steps: int) -> None:
    """Where the daemon came back without its memory, it goes on from the last commit as a new
    process would."""
    while True:
        try:
            return train_in_one_session(job, steps)
        except memd_client.SessionFenced as fenced:
            say("fenced", str(fenced).replace("\n", " "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="contained")
    parser.add_argument("--steps", type=int, default=sys.maxsize)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.plain:
        train_plain(arguments.steps)
    else:
        train(arguments.job, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
