"""Checksums of values on a device, which the device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# So many halfwords of a value are summed at once, each with a weight of its own.
_WEIGHT_COUNT = 1 << 20
_SEED = 0x6D656D64
_CHUNK_FACTOR = 0x5851F42D4C957F2D  # odd: no sum is lost


class DeviceChecksums:
    """Those of one device. The checksum of a value is the sum of its halfwords times weights, and
    overflows, so that two values that differ have the same with a chance of 2^-48. Nothing waits
    for the device.
    """

    def __init__(self, device: torch.device) -> None:
        # Not torch's own generator, whose numbers are the program's.
        generator = torch.Generator().manual_seed(_SEED)
        ends = torch.iinfo(torch.int64)
        weights = torch.randint(
            ends.min, ends.max, (_WEIGHT_COUNT,), generator=generator, device="cpu"
        )
        self._weights = weights.to(device)

    @torch.no_grad()
    def of(self, value: torch.Tensor) -> torch.Tensor:
        """One number, on the device."""
        halfwords = value.detach().contiguous().view(-1).view(torch.int16)
        total: torch.Tensor | None = None
        for part in self._sums(halfwords):
            total = part if total is None else total * _CHUNK_FACTOR + part
        assert total is not None  # no value is empty
        return total

    def _sums(self, halfwords: torch.Tensor) -> Iterator[torch.Tensor]:
        for chunk in halfwords.split(_WEIGHT_COUNT):
            yield (chunk * self._weights[: len(chunk)]).sum()
