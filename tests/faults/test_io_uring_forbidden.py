"""Where a container runtime forbids io_uring the daemon runs on threads, says so, and trains the
same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memd_client
from memd.client import DaemonClient
from tests.daemons import running_daemon
from tests.faults.small_training import batch, build, loss_of

FILTER = Path(__file__).parents[2] / "build/release/without_io_uring"


@pytest.mark.parametrize(
    ("errno_name", "reason"),
    [("EPERM", "Operation not permitted"), ("ENOSYS", "Function not implemented")],
)
def test_training_goes_on_over_threads(errno_name: str, reason: str) -> None:
    with running_daemon(before=[str(FILTER), errno_name]) as daemon:
        with DaemonClient(daemon.attach_socket) as client:
            status = client.status()
        assert status.io_engine == "threads"
        assert reason in status.io_engine_reason

        plain = build()
        model = build()
        with memd_client.connect(daemon.address, job="forbidden") as session:
            memd_client.offload(model, session)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, session=session)
            twin = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
            for step in range(3):
                loss = loss_of(model, batch(step))
                wanted = loss_of(plain, batch(step))
                assert torch.equal(loss, wanted)
                loss.backward()
                wanted.backward()
                optimizer.step()
                twin.step()
                optimizer.zero_grad()
                twin.zero_grad()
            session.put("blob", torch.arange(100_000))
            assert torch.equal(session.get("blob"), torch.arange(100_000))
