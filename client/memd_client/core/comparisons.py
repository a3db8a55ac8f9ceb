"""Comparisons that a device makes before memd takes values and gradients from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.base.device_waits import note_device_wait

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class Comparison:
    """Two checksums on one device, each a tensor of one number."""

    found: torch.Tensor
    expected: torch.Tensor
    is_same: bool = False  # since `compare_together`


@torch.no_grad()
def compare_together(comparisons: Iterable[Comparison]) -> None:
    """The caller waits once for each device."""
    by_device: dict[torch.device, list[Comparison]] = {}
    for each in comparisons:
        by_device.setdefault(each.found.device, []).append(each)
    for those in by_device.values():
        found, expected = (
            torch.stack(checksums)
            for checksums in zip(*((each.found, each.expected) for each in those), strict=True)
        )
        note_device_wait("comparison")
        for each, is_same in zip(those, (found == expected).tolist(), strict=True):
            each.is_same = is_same
