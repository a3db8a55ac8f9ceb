"""offload(activations=...) against a daemon in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd_client.core.scratch import slot_bytes
from tests.unit.activation_cases import (  # noqa: F401  # pytest finds them by their names here
    TestActivations,
    all_are_stored,
    stored_mlp,
    stored_pair,
    tier,
)
from tests.unit.client_cases import Mlp, loss_of, session  # noqa: F401
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from tests.unit.client_cases import OpenSession


@pytest.fixture
def job() -> OpenSession:
    return FakeDaemon().session


def test_an_older_daemon_is_refused() -> None:
    module = Mlp()
    with pytest.raises(memd_client.NotYet, match="daemon is older"):
        memd_client.offload(
            module, FakeDaemon(can_keep_scratch=False).session(), activations="host"
        )
    assert type(module.first.weight) is torch.nn.Parameter


def test_backward_asks_for_what_was_saved_before_it() -> None:
    daemon = FakeDaemon()
    for activations in ("host", "nvme"):
        opened = daemon.session()
        model = memd_client.offload(Mlp(), opened, activations=activations, strict=False)
        loss = loss_of(model)
        daemon.calls.clear()
        loss.backward()
        asked = [call for call in daemon.calls if call.startswith("prefetch")]
        assert bool(asked) == (activations == "nvme")
        assert len(set(asked)) == len(asked)
        opened.close()


@pytest.mark.parametrize(
    "size_bytes", [1, 4096, 4097, 65536, 65537, 1 << 26, (1 << 26) + 64, 10**9]
)
def test_slots_are_at_most_an_eighth_larger_than_what_they_hold(size_bytes: int) -> None:
    found = slot_bytes(size_bytes)
    assert found % 4096 == 0
    assert size_bytes <= found <= max(size_bytes * 9 // 8, -(-size_bytes // 4096) * 4096)
