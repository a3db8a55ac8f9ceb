"""A GradScaler over gradients that have left a device."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from memd_client.parameters.gradients import whole_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import DepartedGradients
    from memd_client.parameters.gradients import GradientSlot

    Departed = tuple[GradientSlot, Job]

_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__


@torch.no_grad()
def unscale_departed(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> bool:
    """torch's operation over what `p.grad` shows of `gradients`. Returns whether a GradScaler has
    called it, and all of its gradients in host memory have left one device. Then nobody waits: its
    numbers go there, where gradients are checked, and what was found comes back behind that. Host
    gradients beside them would change `found_inf` meanwhile.
    """
    unscaled = _departed(_unscaled_together())
    departed = _departed(gradients)
    if not unscaled or not departed or not (found_inf.is_pinned() and inverse_scale.is_pinned()):
        return False
    device = departed[0][0].shard.device
    found_there = found_inf.to(device, non_blocking=True)
    inverse_there = inverse_scale.to(device, non_blocking=True)
    largest = torch.stack([_there(each).norm(each[0].shard, math.inf) for each in departed])
    is_infinite = largest.isfinite().all().logical_not().to(found_there.dtype)
    found_inf.copy_(torch.maximum(found_there, is_infinite), non_blocking=True)
    for slot, job in departed:
        with ExitStack() as held:
            slot.hold_still(held)
            slot.prepare_change(job.gradient_leases_of(slot.shard))
            _there((slot, job)).unscale(slot.shard, inverse_there)
    return True


def _there(departed: Departed) -> DepartedGradients:
    slot, job = departed
    return job.unordered_leases.devices.departed(slot.shard)


def _unscaled_together() -> Sequence[torch.Tensor]:
    """All gradients on this device that a GradScaler has begun to unscale, by one such operation
    for each type; none if nobody has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _UNSCALE:
        frame = frame.f_back
    if frame is None:
        return []
    of_types: Iterable[list[torch.Tensor]] = frame.f_locals["per_dtype_grads"].values()
    return [gradient for gradients in of_types for gradient in gradients]


def _departed(gradients: Sequence[torch.Tensor]) -> list[Departed]:
    """None of them if some are not, or have left several devices."""
    found: list[Departed] = []
    for gradient in gradients:
        shown = whole_gradient(gradient)
        slot, job = (shown.slot, shown.job) if shown is not None else (None, None)
        if slot is None or job is None or not slot.is_departed(job.gradient_leases_of(slot.shard)):
            return []
        found.append((slot, job))
    return found if len({slot.shard.device for slot, _ in found}) == 1 else []
