"""Training with memd on the simulation, with a real daemon."""

from __future__ import annotations

import gc
import itertools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import memd_client
from memd_client import InvalidArgument
from memd_client.device import budget as device_budget
from tests.device.announced_leases import announced_leases
from tests.device.offloaded import budget_bytes, train
from tests.device.offloaded_models import build
from tests.device.registered_arena import registered_arena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.offloaded import Loop

# Shares of the parameters. The least is what the largest module needs; one that nobody has chosen
# begins with that.
BUDGETS = {"least": 0.0, "half": 0.5, "all": 1.0, "grown": None}
_numbers = itertools.count()


@contextmanager
def connected(
    daemon: Daemon, patch: pytest.MonkeyPatch, *, durability: str = "none"
) -> Iterator[Session]:
    """A job of its own, whose memory the simulation knows. No end of a lease may race."""
    job = f"device{next(_numbers)}"
    session = memd_client.connect(
        daemon.address, job=job, host_bytes="48MiB", durability=durability
    )
    with registered_arena(session), announced_leases(session, patch) as races:
        try:
            yield session
            gc.collect()
        finally:
            session.drop_job()
    assert not races, "; ".join(races)


def least_bytes(model: nn.Module, session: Session) -> int:
    """The least `device_bytes` of a model."""
    with pytest.raises(InvalidArgument) as info:
        memd_client.offload(model, session, device="sim", device_bytes=1)
    found = re.search(r"pass (\d+) or more", str(info.value))
    assert found
    return int(found[1])


def trained(
    daemon: Daemon, patch: pytest.MonkeyPatch, model: str, budget: str, loop: Loop
) -> list[Tensor]:
    """The losses and the model's state, on the host."""
    with connected(daemon, patch) as session:
        module = build(model, dtype=loop.dtype, has_checkpoints=loop.has_checkpoints)
        device_bytes = budget_bytes(module, BUDGETS[budget])
        patch.setattr(device_budget, "_STEADY_ROUNDS", 1)  # it grows within a few steps
        if device_bytes is not None:
            device_bytes = max(device_bytes, least_bytes(module, session))
        memd_client.offload(
            module,
            session,
            device="sim",
            device_bytes=device_bytes,
            activations=loop.activations,
        )
        return train(module, session, loop, "sim")
