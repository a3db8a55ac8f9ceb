"""Training with memd on the simulation, with a real daemon."""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import memd_client
from tests.device.announced_leases import announced_leases
from tests.device.offloaded import budget_bytes, build, train
from tests.device.registered_arena import registered_arena

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from torch import Tensor

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.offloaded import Loop

# Shares of the parameters; the least is what the largest module needs.
BUDGETS = {"least": None, "half": 0.5, "all": 1.0}
_numbers = itertools.count()


@contextmanager
def connected(daemon: Daemon, patch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A job of its own, whose memory the simulation knows. No end of a lease may race."""
    job = f"device{next(_numbers)}"
    session = memd_client.connect(daemon.address, job=job, host_bytes="48MiB", durability="none")
    with registered_arena(session), announced_leases(session, patch) as races:
        try:
            yield session
            gc.collect()
        finally:
            session.drop_job()
    assert not races, "; ".join(races)


def trained(
    daemon: Daemon, patch: pytest.MonkeyPatch, model: str, budget: str, loop: Loop
) -> list[Tensor]:
    """The losses and the model's state, on the host."""
    with connected(daemon, patch) as session:
        module = build(model)
        device_bytes = budget_bytes(module, BUDGETS[budget])
        memd_client.offload(module, session, device="sim", device_bytes=device_bytes)
        return train(module, session, loop, "sim")
