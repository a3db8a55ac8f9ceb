"""What a figure was measured on."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from memd.bench import machine


def describe_machine() -> dict[str, Any]:
    """As `memd bench` does it, and what trains."""
    return {
        **machine.describe_machine(),
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def revision() -> str:
    """Of the sources, "-dirty" where they differ from it; empty outside of a checkout."""
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--tags"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
