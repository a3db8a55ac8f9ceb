"""A loop that takes its arguments from a DeepSpeed configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.more
def test_a_configuration_trains_with_torchs_bits(
    tmp_path: Path, disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMD_ADDRESS", raising=False)
    config_path = tmp_path / "ds_config.json"
    nvme = {"device": "nvme", "nvme_path": str(disk_path)}
    config_path.write_text(
        json.dumps(
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": nvme,
                    "offload_optimizer": nvme,
                },
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1},
                },
            }
        )
    )
    config = memd_client.from_deepspeed(config_path)
    plain, offloaded = nn.Linear(8, 8), nn.Linear(8, 8)
    offloaded.load_state_dict(plain.state_dict())
    expected = torch.optim.AdamW(
        plain.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1, fused=True
    )
    inputs = torch.randn(4, 8)
    with memd_client.connect(
        job="converted", host_bytes="256MiB", nvme_bytes="64MiB", **config["connect"]
    ) as session:
        memd_client.offload(offloaded, session, **config["offload"])
        optimizer = memd_client.AdamW(
            offloaded.parameters(), session=session, **config["optimizer"]
        )
        for _ in range(3):
            for model, update in ((plain, expected), (offloaded, optimizer)):
                model(inputs).square().mean().backward()
                update.step()
                update.zero_grad()
        assert torch.equal(offloaded.weight.detach().clone(), plain.weight)
    assert any(disk_path.iterdir())
