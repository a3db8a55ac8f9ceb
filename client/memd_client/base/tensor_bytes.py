"""The bytes of a tensor."""

from __future__ import annotations

import torch

from memd_native import checksum


def checksum_of(tensor: torch.Tensor) -> int:
    """The checksum of its elements, in row-major order. It is dense and on the CPU."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return checksum(flat.numpy().data)
