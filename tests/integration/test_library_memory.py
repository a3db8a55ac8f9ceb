"""Checkpoints of training libraries pass through a trainer; they are never whole in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.daemons import running_daemon
from tests.integration.library_memory import measured

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_checkpoint_takes_the_memory_of_some_parameters_and_not_of_the_model(
    tmp_path: Path, library: str
) -> None:
    """In a process of its own: 96 MiB of weights, 192 of moments, and the daemon has 64. Beyond the
    library, the largest module and 64 MiB."""
    with running_daemon(nvme="1GiB") as daemon:
        said = measured(library, daemon.address, tmp_path)
    for what in ("save", "load"):
        assert said[what] <= said["largest"] + (64 << 20) < said["model"], said
