"""Names of a module's parameters and buffers, whatever wraps the modules that have them."""

from __future__ import annotations

from torch import nn

# torch.compile and torch's activation checkpoints put these between a module and its child.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def plain_name(module: nn.Module, name: str) -> str:
    """`name` as `module.named_parameters()` gives it, without its wrappers, as torch's distributed
    checkpoints have it: one job serves the model with and without them."""
    parts: list[str] = []
    owner: nn.Module | None = module
    for part in name.split("."):
        if not (part in _WRAPPERS or (part == "module" and isinstance(owner, _PARALLEL))):
            parts.append(part)
        owner = owner._modules.get(part) if owner is not None else None
    return ".".join(parts)


def without_wrappers(name: str) -> str:
    """As `plain_name` of a module that is not known: "module." may be the model's own."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
