"""Checksums of values: any device computes them as a CPU does."""

from __future__ import annotations

import pytest
import torch

from memd_client.device import device_checksums
from memd_client.device.device_checksums import DeviceChecksums

COUNT = 40


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> DeviceChecksums:
    """A value has several chunks of weights, the last of them shorter."""
    monkeypatch.setattr(device_checksums, "_WEIGHT_COUNT", 16)
    return DeviceChecksums(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_bit_of_each_element_counts(checksums: DeviceChecksums, dtype: torch.dtype) -> None:
    value = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = torch.int32 if dtype == torch.float32 else torch.int16
    found = {checksums.of(value).item()}
    for at in range(COUNT):
        for bit in range(8 * value.element_size() - 1):
            changed = value.clone()
            changed.view(words)[at] ^= 1 << bit
            found.add(checksums.of(changed).item())
    assert len(found) == 1 + COUNT * (8 * value.element_size() - 1)
    assert checksums.of(value.clone()).item() in found


def test_chunks_in_another_order_have_another_checksum(checksums: DeviceChecksums) -> None:
    value = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert checksums.of(value) != checksums.of(value.roll(8))
