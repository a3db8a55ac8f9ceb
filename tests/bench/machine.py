"""What a figure was measured on."""

from __future__ import annotations

import platform
from typing import Any

import torch

from memd.bench import machine


def describe_machine() -> dict[str, Any]:
    """As `memd bench` does it, and what trains."""
    return {
        **machine.describe_machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
    }
