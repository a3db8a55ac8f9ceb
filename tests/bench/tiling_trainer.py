"""Trains a feed-forward block for bench_tiling.py, with nothing but torch and memd's client.

Run: python tiling_trainer.py ADDRESS VALUES HIDDEN TILES HOST_BYTES NVME_BYTES
"""

from __future__ import annotations

import math
import sys
from unittest import mock

import torch
from torch import nn

TOKENS = 16
STEPS = 2


def block(hidden: int) -> nn.Module:
    """Its values come from a file, so its memory is not written, and the kernel gives it none."""
    with mock.patch.object(nn.Linear, "reset_parameters"):
        return nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )


def main(
    address: str, values: str, hidden: int, tiles: int, host_bytes: int, nvme_bytes: int
) -> None:
    import memd_client

    torch.set_num_threads(1)
    with memd_client.connect(
        address, job="tiling", fresh=True, host_bytes=host_bytes, nvme_bytes=nvme_bytes
    ) as session:
        model = block(hidden)
        if tiles > 1:
            memd_client.tile_linears(model, bytes_max=math.ceil(16 * hidden * hidden / tiles))
        memd_client.offload(model, session)
        memd_client.load_safetensors(model, values, session)
        optimizer = memd_client.AdamW(model.parameters())
        for step in range(STEPS):
            inputs = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.committed_step == STEPS
        session.drop_job()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
