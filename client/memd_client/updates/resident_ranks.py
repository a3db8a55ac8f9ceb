"""Parameters that stay in the processes of several ranks, where DistributedDataParallel averages
their gradients."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from memd_client.errors import InvalidArgument
from memd_client.updates.sharded_target import ShardedTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from memd_client.core.job import Job
    from memd_client.updates.resident_target import ResidentTarget

_STEP = "step"  # as in "all ranks step"
_Found = list[tuple[str, int, int]]  # see `ResidentTarget.compared`


def refuse_apart(targets: Sequence[ResidentTarget], job: Job, *, look: Callable[[], None]) -> None:
    """Before a step over `targets`, of which one rank gives the gradient and the first the value:
    all ranks have the same. Each calls `look` before.

    Raises:
        InvalidArgument: on all ranks, with the first difference.
        Exception: of `look`.
        MemdError: on the other ranks, if it has failed on one.
    """
    ranks = job.ranks
    if not ranks.are_several:
        look()
        return

    def find() -> _Found:
        look()
        for target in targets:
            target.check_gradient()
        return _found_in(targets)

    agreed = job.rank_gradients.agreed(_STEP)
    if agreed is not None and find() == agreed:
        return
    found: _Found = []

    def digest() -> bytes:
        found.extend(find())
        return hashlib.blake2b(repr(found).encode()).digest()

    # All tell all what they have only where it differs.
    is_equal = len(set(ranks.together(digest, _STEP))) == 1
    of_ranks = [found] if is_equal else ranks.exchange(found, "compare steps")
    sharded = {each.shard.label: each for each in targets if isinstance(each, ShardedTarget)}
    for rank, others in enumerate(of_ranks):
        _refuse_other(found, others, rank=rank, sharded=sharded.keys(), job=job)
    for label, target in sharded.items():
        if any((label, 0, 1) in others for others in of_ranks):
            target.write_whole()
    if found:
        job.rank_gradients.note_agreed(_STEP, _found_in(targets) if sharded else found)


def _refuse_other(
    found: _Found, others: _Found, *, rank: int, sharded: Collection[str], job: Job
) -> None:
    """`others` is what `rank` has."""
    for (label, gradient, value), other in zip(found, others, strict=False):
        if other[0] != label:
            break
        what = "gradient" if other[1] != gradient else "value"
        if label not in sharded and other[1:] != (gradient, value):
            raise InvalidArgument(
                f"job {job.name!r}: the {what} of {label!r} is another one on rank {rank} than "
                f"on rank {job.ranks.rank}, and no step is made. Parameters that are not offloaded "
                "are the same on all ranks: wrap their model in DistributedDataParallel, which "
                "averages gradients, and change either on all ranks by what is equal on all"
            )
    if [each[0] for each in others] != [each[0] for each in found]:
        raise InvalidArgument(
            f"job {job.name!r}: rank {rank} steps with gradients of other parameters that are "
            f"not offloaded than rank {job.ranks.rank}, or in another order: "
            f"{_only(others, found)} there, {_only(found, others)} here"
        )


def note_divided(targets: Sequence[ResidentTarget], job: Job) -> None:
    """This rank has divided gradients of `targets`, which all ranks have compared. If it makes the
    step again, others have sent theirs, and it must find what they agreed on."""
    if job.rank_gradients.agreed(_STEP) is not None:
        job.rank_gradients.note_agreed(_STEP, _found_in(targets))


def _found_in(targets: Iterable[ResidentTarget]) -> _Found:
    return [target.compared() for target in targets]


def _only(some: Iterable[tuple[str, int, int]], others: Iterable[tuple[str, int, int]]) -> str:
    left = [label for label, *_ in some if label not in {each[0] for each in others}]
    return f"{left[0]!r} and {len(left) - 1} more" if left else "no other"
