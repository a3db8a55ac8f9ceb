"""The scripts of README.md and docs/training.md, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.daemons import Daemons

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


def first_script(document: str | Path) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def run(script: str, folder: Path, **environ: str) -> str:
    """Returns what the script prints. It runs in `folder`, without the sources in reach."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout


def test_the_readmes_script_prints_a_loss_that_falls(tmp_path: Path) -> None:
    printed = [line.split() for line in run(first_script("README.md"), tmp_path).splitlines()]
    assert [int(step) for step, _ in printed] == list(range(10))
    losses = [float(loss) for _, loss in printed]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.soak
def test_the_guides_script_trains_to_its_end_and_then_has_nothing_to_do(
    daemons: Daemons, tmp_path: Path
) -> None:
    daemon = daemons.start(host="256MiB", nvme="1GiB")
    script = first_script("docs/training.md") + 'print("loss" in globals())\n'
    assert run(script, tmp_path, MEMD_ADDRESS=daemon.address) == "True\n"
    assert run(script, tmp_path, MEMD_ADDRESS=daemon.address) == "False\n"
