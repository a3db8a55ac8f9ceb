"""`memd bench train` as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nvme

# Threads of torch that wait by spinning make each other slow where tests run side by side.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PARTS = {
    "compute alone, CPU",
    "Adam alone, CPU",
    "checksums alone, CPU",
    "I/O alone, CPU",
    "backward alone",
    "disk, in the step's mix",
}


@pytest.fixture
def data() -> Path:
    """Below the build folder: the temporary folder may be tmpfs."""
    folder = Path(__file__).parents[2] / "build" / "tests" / "bench-train"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def bench(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memd", "bench", "train", "--data", str(data), "--json"]
    command += ["--params", "1M", "--sequence", "64", "--rounds", "2", "--steps", "2"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=ONE_THREAD,
    )


def figures(data: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    result = bench(data, *arguments)
    assert result.returncode == 0, result.stderr
    assert not list(data.iterdir()), "a volume or file was left behind"
    told = json.loads(result.stdout)
    return {figure["name"]: figure for figure in told["figures"]}, told


@pytest.mark.more
def test_a_step_stands_beside_its_parts_and_says_which_bound(data: Path) -> None:
    found, told = figures(data)
    assert found.keys() >= PARTS
    step = found["step"]
    assert step["limit_name"].startswith(("roofline: ", "backward + 2 (state - cache)"))
    assert len(step["runs"]) == len(step["limit_runs"]) == 2
    assert step["fraction"] > 0
    # The other bound is never below the roofline.
    assert all(
        bound >= lowest
        for bound, lowest in zip(
            step["limit_runs"], found["step, against the roofline"]["limit_runs"], strict=True
        )
    )
    settings = told["settings"]
    assert settings["state_bytes"] == 12 * settings["parameters"]
    assert settings["cache"] == pytest.approx(0.25)
    # Every commit is on disk, with its catalogue.
    assert found["written a step"]["minimum"] >= settings["state_bytes"]
    assert 0 < found["read a step"]["maximum"] < settings["state_bytes"]
    assert told["machine"]["cores"] >= 1


@pytest.mark.soak
def test_what_is_resident_and_not_durable_moves_nothing(data: Path) -> None:
    found, told = figures(data, "--resident", "--durability", "none", "--dtype", "bf16")
    assert found["read a step"]["maximum"] == 0
    assert found["written a step"]["maximum"] == 0
    assert found["step"]["limit_name"] == "roofline: CPU work / cores"
    assert told["settings"]["durability"] == "none"


def test_a_model_that_cannot_be_built_is_refused(data: Path) -> None:
    result = bench(data, "--params", "1K")
    assert result.returncode == 1
    assert "can't be built" in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_durability_is_wrong_use(data: Path) -> None:
    result = bench(data, "--durability", "often")
    assert result.returncode == 2
    assert "'often' is none of step, every:k and none" in result.stderr
