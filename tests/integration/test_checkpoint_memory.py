"""Neither training nor a way into memd or out of it holds more in the trainer than promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.checkpoint_memory import LAYERS, WIDTH
from tests.integration.safetensors_memory import SETTINGS

if TYPE_CHECKING:
    from tests.daemons import Daemons

ROOT = Path(__file__).parents[2]
WAYS = (
    "init",
    "train",
    "save_safetensors",
    "load_safetensors",
    "state_dict",
    "load_state_dict",
    "dcp.save",
    "dcp.async_save",
    "dcp.load",
    "reset_state",
)
MIB = 1 << 20


@pytest.mark.more
def test_a_trainer_holds_one_module_and_64_mib_whatever_is_saved_and_loaded(
    daemons: Daemons, tmp_path: Path
) -> None:
    """Values and moments take 432 MiB, and the largest module 16. Its activations are 8 KiB."""
    largest_bytes = 4 * WIDTH**2
    assert 3 * LAYERS * largest_bytes >= 400 * MIB
    assert largest_bytes <= 16 * MIB
    daemon = daemons.start(name="checkpoint-memory", host="64MiB", nvme="1800MiB")
    try:
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.integration.checkpoint_memory",
                daemon.address,
                str(tmp_path),
            ],
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=280,
        )
    finally:
        daemon.stop()
    taken = {name: int(size) for name, size in map(str.split, found.stdout.splitlines())}
    # The module, its gradient, and 64 MiB.
    bytes_max = 2 * largest_bytes + 64 * MIB
    assert {way: taken[way] for way in WAYS if taken[way] > bytes_max} == {}
