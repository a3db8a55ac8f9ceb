"""Memory that stays where it is, whoever saves a tensor of it."""

from __future__ import annotations

import torch

# An attribute of a storage, whose Python object torch keeps for as long as the storage lives.
_KEPT = "_memd_kept"


def keep_in_place(tensor: torch.Tensor) -> None:
    """Tensors over this memory, a module's buffer or memd's own, are not stored elsewhere."""
    if tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), _KEPT, True)


def is_kept_in_place(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, _KEPT, False)
