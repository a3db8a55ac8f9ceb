"""Every operator of torch's own table, with an offloaded parameter as an input: its result is that
of a resident one, or it is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSED_MAX = 1


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("every", "resident_min"), [(20, 31), pytest.param(1, 641, marks=pytest.mark.soak)]
)
def test_every_operator_gives_the_resident_result_or_is_refused(
    every: int, resident_min: int
) -> None:
    command = [sys.executable, "-m", "tests.numerics.operators", f"--every={every}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    outcomes: dict[str, str] = json.loads(done.stdout)
    expected = {"resident", "NotResident", "plain PyTorch raises", "has no float32 tensor"}
    assert {name: each for name, each in outcomes.items() if each not in expected} == {}
    counts = Counter(outcomes.values())
    assert counts["resident"] >= resident_min
    assert counts["NotResident"] <= REFUSED_MAX
