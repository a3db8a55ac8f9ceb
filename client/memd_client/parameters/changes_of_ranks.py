"""A gradient that several ranks share, or that one of them accumulates, as a program changes it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from memd_client.core.leases import MODE_WRITE
from memd_client.core.rank_changes import RankChange
from memd_client.parameters.lazy import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import GradientLeases


ASSIGNMENT = "p.grad = ..."
OPERATION = "an operation on p.grad"


class Slot(Protocol):
    """`gradients.GradientSlot`."""

    @property
    def shard(self) -> Shard: ...
    def check(self, gradient: torch.Tensor) -> None: ...
    def read(self, leases: GradientLeases) -> torch.Tensor: ...
    def end_shown(self) -> None: ...
    def note_sum(self) -> None: ...
    def show_in_assigned(self, leases: GradientLeases) -> None: ...


@contextmanager
def changing(slot: Slot, job: Job) -> Iterator[torch.Tensor]:
    """For an operation on `p.grad`, which all ranks make: inside, a copy of this rank's."""
    job.rank_gradients.complete("p.grad is changed")
    change = RankChange(job.ranks, slot.shard, OPERATION)
    with change.making():
        leases = job.gradient_leases_of(slot.shard)
        value = slot.read(leases).clone()
        yield value
    change.agree(value)
    _put(change, slot, job, value)
    slot.show_in_assigned(leases)


@torch.no_grad()
def replace(slot: Slot, job: Job, gradient: torch.Tensor) -> None:
    """For `p.grad = gradient`, on all ranks; or on this one, of what it has accumulated."""
    if job.rank_gradients.has_own(slot.shard):
        value = _copy_of(gradient, slot, job)
        slot.end_shown()
        job.rank_gradients.own_sum(slot.shard, MODE_WRITE).copy_(value)
        return
    job.rank_gradients.complete(ASSIGNMENT)
    change = RankChange(job.ranks, slot.shard, ASSIGNMENT)
    with change.making():
        value = _copy_of(gradient, slot, job)
    change.agree(value)
    change.prepare(slot.end_shown)  # reads what it was
    _put(change, slot, job, value)


def drop(slot: Slot, job: Job) -> None:
    """For `p.grad = None`, on all ranks; or on this one, of what it has accumulated."""
    what = "p.grad = None"
    if job.rank_gradients.has_failed:
        drop_all(job)  # as `optimizer.zero_grad()` does
        return
    is_shared = job.rank_gradients.shares(slot.shard)
    if is_shared:
        job.rank_gradients.complete(what)
        RankChange(job.ranks, slot.shard, what).agree(None)
    slot.end_shown()
    job.drop_gradients([slot.shard])
    if is_shared:
        job.rank_gradients.complete(what)


def drop_all(job: Job) -> None:
    """Drops the gradients of all parameters of the session, as all ranks do: theirs differ, or are
    void. If one can't be dropped, the others are, and this rank makes the call of all ranks when it
    is called again."""
    parameters = job.shards.parameters
    with ExitStack() as dropping:
        for parameter in parameters:
            dropping.callback(parameter.forget_gradient)
    job.drop_gradients([parameter.shard for parameter in parameters])


@contextmanager
def changing_tiles(slot: Slot, job: Job, what: str) -> Iterator[None]:
    """Inside, a parameter in tiles makes its change of all of them, by `what`, before the first
    one, that of `slot`. If it fails, the other ranks change nothing either."""
    if not job.rank_gradients.shares(slot.shard):
        yield
        return
    job.rank_gradients.complete(what)
    with RankChange(job.ranks, slot.shard, what).making():
        yield


def _copy_of(gradient: torch.Tensor, slot: Slot, job: Job) -> torch.Tensor:
    slot.check(gradient)
    if isinstance(gradient, LazyTensor) and gradient.source.is_gradient:
        job.rank_gradients.refuse_alone(
            slot.shard, "another gradient in memd that is assigned", "assign its clone()"
        )
    return gradient.detach().clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _put(change: RankChange, slot: Slot, job: Job, value: torch.Tensor) -> None:
    def write() -> None:
        leases = job.gradient_leases_of(slot.shard)
        leases.gradient(slot.shard, MODE_WRITE).copy_(value)

    with job.rank_gradients.changing("change gradients"):
        change.write(write)
    slot.note_sum()
