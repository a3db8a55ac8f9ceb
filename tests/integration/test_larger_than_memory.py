"""The whole way of a model that is larger than the memory of trainer and daemon, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cgroups import memory_limit

ROOT = Path(__file__).parents[2]


@pytest.mark.more
@pytest.mark.timeout(900)
def test_a_model_larger_than_memory_is_built_trained_exported_and_loaded_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """60M parameters: a state of 687 MiB, and a limit of 540. In the soak it has 0.75B."""
    try:
        with memory_limit(1 << 30):
            pass
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    command = [sys.executable, "-m", "tests.soak.larger_than_memory", "--millions", "60"]
    found = subprocess.run(
        [*command, "--json", str(tmp_path / "outcome")],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MEMD_")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    outcome = json.loads((tmp_path / "outcome").read_text())
    assert outcome["memory_bytes"] < 0.8 * outcome["state_bytes"]
    assert outcome["saved_bytes"] > outcome["state_bytes"]
