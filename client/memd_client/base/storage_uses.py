"""How many tensors use the memory of one."""

from __future__ import annotations

import torch


def storage_uses(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# If one tensor uses the storage.
USES_OF_ONE = storage_uses(torch.empty(1, device="cpu"))
