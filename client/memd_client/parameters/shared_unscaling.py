"""A GradScaler over gradients that several ranks share."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memd_client.parameters.departed_unscaling import unscale_departed
from memd_client.parameters.gradients import whole_gradient
from memd_client.parameters.lazy import take_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.core.job import Job
    from memd_client.parameters.gradients import GradientSlot

_UNSCALING = "unscale gradients"  # as in "all ranks unscale gradients alike"
_unscale: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _unscale_together(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> bool:
    """torch's operation over what `p.grad` shows of `gradients`. Each is one rank's to check and
    change, told by its place, and all ranks have what one has found. Returns whether several share
    them, which they do unless this one has accumulated all of them by itself.

    Raises:
        InvalidArgument: ranks have other gradients, or these in another order, or another scale.
        MemdError: another rank could not. If it has failed while they changed, they are void. With
            a scale of one nothing changes.
    """
    shown = [whole_gradient(gradient) for gradient in gradients]
    slots = [each.slot for each in shown if each is not None and each.slot is not None]
    jobs = {each.job for each in shown if each is not None and each.job is not None}
    if len(slots) != len(gradients) or len(jobs) != 1:
        return False
    job = jobs.pop()
    ranks = job.ranks
    # As in DistributedDataParallel, each rank divides what it has accumulated by itself.
    if not ranks.are_several or all(job.rank_gradients.has_own(slot.shard) for slot in slots):
        return False
    job.rank_gradients.complete("unscale_()")
    are_infinite = _unscale_shares(slots, job, found_inf, inverse_scale)
    if are_infinite:
        found_inf.fill_(1.0)
    return True


def _unscale_shares(
    slots: Sequence[GradientSlot],
    job: Job,
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
) -> bool:
    """Each rank its own. Returns whether one has found what is infinite. With a scale of one they
    check, and change nothing: once for a step, as the same gradients are checked again with it."""
    ranks, gradients = job.ranks, job.rank_gradients
    named = {f"gradient {at}": slot.shard.label for at, slot in enumerate(slots)}
    is_check = _is_checked_only(inverse_scale)
    for known in (False, True):
        if is_check and gradients.agreed(_UNSCALING) == (named, known):
            return known

    def look() -> None:
        for slot in slots:
            slot.follow_assigned(job.gradient_leases_of(slot.shard))

    def unscale() -> bool:
        found = torch.zeros_like(found_inf)
        for slot in slots[ranks.rank :: ranks.world_size]:
            _unscale_one(slot, job, found, inverse_scale)
        return bool(found)

    def follow() -> None:
        for at, slot in enumerate(slots):
            if at % ranks.world_size != ranks.rank:
                leases = job.gradient_leases_of(slot.shard)
                slot.prepare_change(leases)
                slot.show_in_assigned(leases)

    ranks.refuse_different({"the scale": float(inverse_scale)} | named, _UNSCALING, look=look)
    with nullcontext() if is_check else gradients.changing(_UNSCALING):
        # After this nobody reads what others have not unscaled yet.
        are_infinite = any(ranks.together(unscale, _UNSCALING))
        if not is_check:
            ranks.together(follow, _UNSCALING)
    if is_check:
        gradients.note_agreed(_UNSCALING, (named, are_infinite))
    return are_infinite


def _is_checked_only(inverse_scale: torch.Tensor) -> bool:
    return float(inverse_scale) == 1.0


@torch.no_grad()
def _unscale_one(
    slot: GradientSlot, job: Job, found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    with ExitStack() as held:
        slot.hold_still(held)
        leases = job.gradient_leases_of(slot.shard)
        if _is_checked_only(inverse_scale):
            _unscale([slot.read(leases).clone()], found_inf, inverse_scale)
        else:
            _unscale([slot.change(leases)], found_inf, inverse_scale)
            slot.show_in_assigned(leases)


def _unscale_first(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> bool:
    return unscale_departed(gradients, found_inf, inverse_scale) or _unscale_together(
        gradients, found_inf, inverse_scale
    )


def take_over_unscaling() -> None:
    """From now on ranks check and unscale gradients together, and gradients that have left a device
    are checked and unscaled there. A second call does nothing."""
    take_over(_unscale, _unscale_first)
