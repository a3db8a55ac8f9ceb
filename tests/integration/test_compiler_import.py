"""Trainers that compile nothing do not load torch's compiler."""

from __future__ import annotations

import subprocess
import sys

from tests.daemons import running_daemon

_TRAINED = """
import sys
import torch
import memd_client

with memd_client.connect(sys.argv[1], job="plain") as session:
    model = memd_client.offload(torch.nn.Linear(8, 8), session)
    optimizer = memd_client.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    optimizer.zero_grad()
    session.drop_job()
assert "torch._dynamo" not in sys.modules
"""


def test_a_trainer_that_compiles_nothing_does_not_import_the_compiler() -> None:
    """It takes 68 MiB, and torch's optimizers import it."""
    with running_daemon(host="96MiB", nvme="256MiB") as daemon:
        subprocess.run([sys.executable, "-c", _TRAINED, daemon.address], check=True, timeout=120)
