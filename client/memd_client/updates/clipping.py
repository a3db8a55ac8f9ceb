"""The norm of an optimizer's gradients, and its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from memd_client.device.departed_gradients import norm_of
from memd_client.errors import InvalidArgument
from memd_client.updates.device_target import DeviceTarget
from memd_client.updates.sharded_target import ShardedTarget, norm_of_all
from memd_client.updates.streamed_target import StreamedTarget

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
    total_norm = _total_norm(targets, float(norm_type), ranks)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they can't be "
            f"clipped: {total_norm.item()}"
        )
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    # On a device always, as torch does: a comparison would wait. A factor of 1 changes nothing.
    if not factor.is_cpu or factor != 1.0:
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


def _total_norm(targets: Sequence[Target], norm_type: float, ranks: Ranks) -> torch.Tensor:
    sharded = [target for target in targets if isinstance(target, ShardedTarget)]
    if sharded and len(sharded) != len(targets):
        other = next(target for target in targets if not isinstance(target, ShardedTarget))
        raise InvalidArgument(
            f"torch has no norm of gradients of which some are shards of fully_shard(), as that of "
            f"{sharded[0].shard.label!r}, and others are not, as that of {other.shard.label!r}; "
            "give them to two optimizers, and clip each"
        )
    if sharded:
        return norm_of_all(sharded, norm_type, ranks)
    if all(isinstance(target, DeviceTarget) for target in targets):
        return torch.nn.utils.get_total_norm(_gradients(targets), norm_type)
    norms = _norms(targets, norm_type, ranks)
    there = [norm.to(norms[0].device) for norm in _in_torch_order(norms)]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(there), norm_type)
    return total


def _gradients(targets: Sequence[Target]) -> list[torch.Tensor]:
    return [target.gradient_for_reading() for target in targets]


def _own(targets: Sequence[Target], ranks: Ranks) -> Sequence[Target]:
    """Ranks share the work: each gradient is one rank's to read and change, told by its place. A
    shard is each rank's own."""
    if targets and isinstance(targets[0], ShardedTarget):
        return targets
    return targets[ranks.rank :: ranks.world_size]


def _norms(targets: Sequence[Target], norm_type: float, ranks: Ranks) -> list[torch.Tensor]:
    """All of them, of which each rank computes its own."""

    def norms() -> Iterable[torch.Tensor]:
        for target in _own(targets, ranks):
            if isinstance(target, StreamedTarget):
                yield target.gradient_norm(norm_type)
            else:
                yield norm_of(target.gradient_for_reading(), norm_type)

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
    are_own = {id(target) for target in own}
    of_others = [target for target in targets if id(target) not in are_own]

    def scale() -> None:
        for target in own:
            target.refuse_gradient_change()
        # Only gradients in host memory wait for a factor on a device, and once, as in torch.
        here = factor if all(map(_is_on_device, own)) else factor.cpu()
        for target in own:
            target.multiply_gradient(factor if _is_on_device(target) else here)

    def follow() -> None:
        for target in of_others:
            target.follow_multiplied(factor)

    with job.rank_gradients.changing(_CLIPPING):
        # Nobody reads what others have not scaled yet.
        ranks.together(scale, _CLIPPING)
        ranks.together(follow, _CLIPPING)


def _is_on_device(target: Target) -> bool:
    return isinstance(target, DeviceTarget) or target.shard.is_on_device


def _in_torch_order(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """torch groups gradients by dtype before it stacks their norms, and a sum depends on the order
    of its terms.
    """
    listed: list[torch.Tensor | None] = [*norms]
    grouped = _group_tensors_by_device_and_dtype([listed], with_indices=True)
    return [norms[index] for _, indices in grouped.values() for index in indices]
