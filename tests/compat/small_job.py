"""A few steps of a training, and what came of them: run by the interpreter of any release. It uses
names of the public interface alone, and imports nothing of tests.

Run: python small_job.py ADDRESS DURABILITY STEPS_TO
Prints one line of JSON: where it went on, and the hash of all state after step STEPS_TO. A number
on its standard input is the step to go on to, and then comes another such line. Keeps its session,
whose end would write everything to disk, until its standard input ends.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn

WIDTH = 192


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (model(inputs) - inputs).square().mean()
    return loss


def digest(values: dict[str, torch.Tensor], moments: dict[int, dict[str, Any]]) -> str:
    """Over parameters, both moments and the number of updates of every parameter."""
    found = hashlib.sha256()
    parts = list(values.values())
    for index in sorted(moments):
        state = moments[index]
        parts += [torch.as_tensor(state["step"]).float().reshape(1)]
        parts += [state["exp_avg"], state["exp_avg_sq"]]
    for tensor in parts:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(address: str, durability: str, steps_to: int) -> None:
    import memd_client

    session = memd_client.connect(
        address, job="small", durability=durability, host_bytes="24MiB", nvme_bytes="128MiB"
    )
    model = memd_client.offload(build(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, session=session)
    first = session.resume()
    while True:
        for step in range(first, steps_to):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.commit()
        # state_dict() waits for every step that was closed.
        found = digest(model.state_dict(), optimizer.state_dict()["state"])
        print(json.dumps({"went_on_at": first, "digest": found}), flush=True)
        first, line = steps_to, sys.stdin.readline()
        if not line:
            break
        steps_to = int(line)
    session.close()


def train_in_memory(steps: int) -> str:
    from memd.demo.twin import MemoryAdamW

    torch.set_num_threads(1)
    model = build()
    optimizer = MemoryAdamW([{"params": list(model.parameters())}])
    for group in optimizer.param_groups:
        group.update(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.state_dict(), optimizer.state_dict()["state"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
