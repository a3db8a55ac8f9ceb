"""The norm of an optimizer's gradients, and its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.core.ranks import Ranks
    from memd_client.updates.targets import Target


def clip_gradients(
    targets: Sequence[Target],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    ranks: Ranks,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_` over `targets`, which have gradients, with its bits.
    Gradients are leased one at a time. All are scaled, or none.

    Raises:
        InvalidArgument: ranks have other targets, or these in another order, or other arguments.
        RuntimeError: `error_if_nonfinite` and the norm is not finite.
    """
    _refuse_different(
        targets,
        {
            "max_norm": float(max_norm),
            "norm_type": float(norm_type),
            "error_if_nonfinite": error_if_nonfinite,
        },
        ranks,
    )
    if not targets:
        return torch.tensor(0.0)
    # Ranks share the work: each gradient is one rank's to read and change, told by its place.
    own = [target for at, target in enumerate(targets) if at % ranks.world_size == ranks.rank]
    norms = _of_all_ranks(
        [torch.linalg.vector_norm(each.gradient_for_reading(), float(norm_type)) for each in own],
        [target.shard.dtype for target in targets],
        ranks,
    )
    total_norm: torch.Tensor = torch.linalg.vector_norm(
        torch.stack(_in_torch_order(norms)), float(norm_type)
    )
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they can't be "
            f"clipped: {total_norm.item()}"
        )
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    if factor != 1.0:  # true for NaN too
        for target in own:
            target.refuse_gradient_change()
        for target in own:
            target.multiply_gradient(factor)
        # Nobody reads what others have not scaled yet.
        ranks.exchange(None, "clip gradients")
    return total_norm


def _refuse_different(
    targets: Sequence[Target], arguments: dict[str, object], ranks: Ranks
) -> None:
    if not ranks.are_several:
        return
    named = {f"gradient {at}": target.shard.label for at, target in enumerate(targets)}
    # As text, since NaN is not equal to itself.
    settings = {name: str(value) for name, value in arguments.items()}
    ranks.refuse_different(settings | named, "clip gradients")


def _of_all_ranks(
    norms: list[torch.Tensor], dtypes: Sequence[torch.dtype], ranks: Ranks
) -> list[torch.Tensor]:
    """All norms, of which this rank has its own."""
    if not ranks.are_several:
        return norms
    # A sum with zeros, of numbers that fit float32, is exact.
    everyone = torch.zeros(len(dtypes), dtype=torch.float32)
    everyone[ranks.rank :: ranks.world_size] = torch.tensor([float(each) for each in norms])
    ranks.sum(everyone, "clip gradients")
    return [norm.to(dtype) for norm, dtype in zip(everyone, dtypes, strict=True)]


def _in_torch_order(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """torch groups gradients by dtype before it stacks their norms, and a sum depends on the order
    of its terms.
    """
    listed: list[torch.Tensor | None] = [*norms]
    grouped = _group_tensors_by_device_and_dtype([listed], with_indices=True)
    return [norms[index] for _, indices in grouped.values() for index in indices]
