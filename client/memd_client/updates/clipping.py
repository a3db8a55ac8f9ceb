"""The norm of an optimizer's gradients, and its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memd_client.core.job import Job
    from memd_client.core.ranks import Ranks
    from memd_client.updates.targets import Target

_CLIPPING = "clip gradients"  # as in "all ranks clip gradients alike"


def clip_gradients(
    targets: Sequence[Target],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    job: Job,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_` over `targets`, which have gradients, with its bits.
    Gradients are leased one at a time. All are scaled, or none; where a rank of several fails while
    they are, all of them are void.

    Raises:
        InvalidArgument: ranks have other targets, or these in another order, or other arguments.
        RuntimeError: `error_if_nonfinite` and the norm is not finite.
        MemdError: another rank could not.
    """
    ranks = job.ranks
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
    norms = _norms(targets, float(norm_type), ranks)
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
        _scale(targets, factor, job)
    return total_norm


def _refuse_different(
    targets: Sequence[Target], arguments: dict[str, object], ranks: Ranks
) -> None:
    if not ranks.are_several:
        return
    named = {f"gradient {at}": target.shard.label for at, target in enumerate(targets)}
    # As text, since NaN is not equal to itself.
    settings = {name: str(value) for name, value in arguments.items()}

    def look() -> None:
        for target in targets:
            target.follow_assigned()

    ranks.refuse_different(settings | named, _CLIPPING, look=look)


def _own(targets: Sequence[Target], ranks: Ranks) -> Sequence[Target]:
    """Ranks share the work: each gradient is one rank's to read and change, told by its place."""
    return targets[ranks.rank :: ranks.world_size]


def _norms(targets: Sequence[Target], norm_type: float, ranks: Ranks) -> list[torch.Tensor]:
    """All of them, of which each rank computes its own."""

    def norms() -> Iterable[torch.Tensor]:
        for target in _own(targets, ranks):
            yield torch.linalg.vector_norm(target.gradient_for_reading(), norm_type)

    if not ranks.are_several:
        return list(norms())
    of_ranks = ranks.together(lambda: [float(norm) for norm in norms()], _CLIPPING)
    count = ranks.world_size
    return [
        torch.tensor(of_ranks[at % count][at // count], dtype=target.shard.dtype)
        for at, target in enumerate(targets)
    ]


def _scale(targets: Sequence[Target], factor: torch.Tensor, job: Job) -> None:
    ranks = job.ranks
    own = _own(targets, ranks)
    of_others = [each for at, each in enumerate(targets) if at % ranks.world_size != ranks.rank]

    def scale() -> None:
        for target in own:
            target.refuse_gradient_change()
        for target in own:
            target.multiply_gradient(factor)

    def follow() -> None:
        for target in of_others:
            target.follow_multiplied(factor)

    with job.rank_gradients.changing(_CLIPPING):
        # Nobody reads what others have not scaled yet.
        ranks.together(scale, _CLIPPING)
        ranks.together(follow, _CLIPPING)


def _in_torch_order(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """torch groups gradients by dtype before it stacks their norms, and a sum depends on the order
    of its terms.
    """
    listed: list[torch.Tensor | None] = [*norms]
    grouped = _group_tensors_by_device_and_dtype([listed], with_indices=True)
    return [norms[index] for _, indices in grouped.values() for index in indices]
