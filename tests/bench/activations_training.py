"""Trains residual blocks for bench_activations.py, with nothing but torch and memd's client; says
how much it offloaded, and how long each step after the first two took.

Run: python activations_training.py ADDRESS HOST_BYTES WIDTH ROWS STEPS none|host|nvme
                                      plain|checkpoints
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 8
STEPS_LEFT_OUT = 2  # the first declares slots, and the second makes the plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return output


class Blocks(nn.Module):
    def __init__(self, width: int, *, has_checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.has_checkpoints = has_checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.has_checkpoints else block(x)
        return x


def state_bytes(width: int) -> int:
    """Parameters in fp32, with their optimizer state."""
    return 12 * BLOCKS * (8 * width * width + 7 * width)


def main(
    address: str, host_bytes: int, width: int, rows: int, steps: int, activations: str, kind: str
) -> None:
    import memd_client

    torch.manual_seed(0)
    settings: dict[str, Any] = {} if activations == "none" else {"activations": activations}
    with memd_client.connect(
        address, job="activations", fresh=True, durability="none", host_bytes=host_bytes
    ) as session:
        model = Blocks(width, has_checkpoints=kind == "checkpoints")
        memd_client.offload(model, session, **settings)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-4)
        ends, losses = [], []
        for step in range(steps + STEPS_LEFT_OUT):
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            ends.append(time.perf_counter())
        found = {
            "offloaded_bytes": session.statistics().activation_bytes_max,
            "step_seconds": [
                after - before
                for before, after in zip(
                    ends[STEPS_LEFT_OUT - 1 : -1], ends[STEPS_LEFT_OUT:], strict=True
                )
            ],
            "losses": losses,
        }
        session.drop_job()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    address, host_bytes, width, rows, steps, activations, kind = sys.argv[1:]
    main(address, int(host_bytes), int(width), int(rows), int(steps), activations, kind)
