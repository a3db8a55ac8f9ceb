"""Trains a model whose activations are larger than its parameters, and says what memory that took,
in bytes beyond those of an interpreter with torch imported, and how much of it was offloaded.

Run: python -m tests.integration.activation_memory ADDRESS none|host|nvme
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from tests.integration.safetensors_memory import peak

LAYERS = 24
WIDTH = 512
ROWS = 4096
STEPS = 3


def build() -> nn.Module:
    """Its parameters take 24 MiB, and what autograd saves 8 MiB for each Linear and each Tanh."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def main(address: str, activations: str) -> None:
    import memd_client

    with memd_client.connect(
        address, job="memory", fresh=True, host_bytes="512MiB", nvme_bytes="1GiB"
    ) as session:
        model = memd_client.offload(
            build(), session, activations=None if activations == "none" else activations
        )
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
        with peak("train"):
            for step in range(STEPS):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        sys.stdout.write(f"offloaded {session.statistics().activation_bytes_max}\n")
        session.drop_job()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2])
