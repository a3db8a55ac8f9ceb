"""States that an optimizer is given: checked first, and then replaced, all or none."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.base.mapped_files import MappedFiles
from memd_client.connection.shard import MAXIMUM, MOMENTS
from memd_client.errors import InvalidArgument
from memd_client.parameters.loaded_places import replace_all
from memd_client.transaction.adam_settings import refuse_older_daemon
from memd_client.transaction.loaded_moments import (
    HeldMoment,
    LoadedMoments,
    moment_reads,
    update_count_of,
)
from memd_client.transaction.moments import ordinary_moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memd_client.base.mapped_files import FileBytes
    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Transaction
    from memd_client.updates.targets import Target

_LOADING = "load an optimizer's state"  # as in "all ranks load an optimizer's state alike"
# As DTensor is. torch's type for it would make mypy take the rest for unreachable.
_is_made_of_others: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass


def state_of(states: Mapping[Any, Any], index: Any) -> dict[str, Any] | None:
    """The state of one parameter in torch's format; None if there is none. torch's optimizers list
    a parameter without moments as absent or empty, and what torch makes of a flattened state has
    empty moments where that had none."""
    state = {
        name: value
        for name, value in (states.get(index) or {}).items()
        if not (isinstance(value, dict) and not value)
    }
    return state or None


def refuse_state(target: Target, state: dict[str, Any] | None, job: Job) -> None:
    """
    Raises:
        InvalidArgument: `target` can't have this state.
    """
    if state is None:
        return
    if MAXIMUM in state:
        refuse_older_daemon("amsgrad", job)
    name = target.shard.name
    for each in ("step", *MOMENTS):
        if each not in state and each != MAXIMUM:
            raise InvalidArgument(
                f"the state of parameter {name!r} is not one of Adam: it has no {each!r}"
            )
    update_count_of(state["step"], name=name)
    for each in MOMENTS:
        if each in state:
            _refuse_moment(state[each], each, target)


def replace_states(
    targets: Sequence[tuple[Target, dict[str, Any] | None, bool]], transaction: Transaction
) -> None:
    """Gives each target its state, all or none. They are durable when it returns. All ranks call it
    with the same states: the first one stores them.

    Args:
        targets: with their states in torch's format, or None: none yet, with a maximum or not.

    Raises:
        As `replace_all`.
        MemdError: on the other ranks, if it has failed on the first.
    """
    ranks = transaction.job.ranks
    changed = [
        (target, state, amsgrad)
        for target, state, amsgrad in targets
        if not _has_state(target, state, transaction)
    ]
    with closing(MappedFiles()) as files:
        loaded = [
            (target, _moments_of(target, state, files, amsgrad=amsgrad))
            for target, state, amsgrad in changed
        ]
        stored = [each for target, each in loaded if target.is_stored]
        if ranks.are_several:
            counts = {
                f"the step of {target.shard.label!r}": _count_of(state)
                for target, state, _ in targets
            }
            shards = [each.shard for each in stored]
            keep = partial(transaction.moments.read_of, shards, besides=())
            ranks.refuse_different(counts, _LOADING, look=keep)

        def replace() -> None:
            states = {each: state for (_, each), (_, state, _) in zip(loaded, changed, strict=True)}
            if stored:
                files.expect(_upcoming(stored, states, files))
                replace_all(
                    [],
                    _nothing,
                    moments=stored,
                    transaction=transaction,
                    what="new state of the optimizer",
                )

        ranks.by_one(0, replace, _LOADING)
        if not ranks.is_first:
            for optimizer in transaction.optimizers:
                optimizer.note_states(stored)
    for target, each in loaded:
        if not target.is_stored:
            target.note_state(each.update_count, keeps_maximum=each.has_maximum)


def _count_of(state: Mapping[str, Any] | None) -> int:
    return int(state["step"]) if state is not None else 0


def _moments_of(
    target: Target, state: dict[str, Any] | None, files: MappedFiles, *, amsgrad: bool
) -> LoadedMoments:
    return LoadedMoments(
        shard=target.shard,
        update_count=_count_of(state),
        has_maximum=MAXIMUM in state if state is not None else amsgrad,
        read=partial(_held, state, files) if state is not None else None,
    )


def _upcoming(
    loaded: Iterable[LoadedMoments],
    states: Mapping[LoadedMoments, Mapping[str, Any] | None],
    files: MappedFiles,
) -> Iterator[tuple[FileBytes, int]]:
    """The reads of files, in their order."""
    held: dict[str, HeldMoment] = {}
    last: LoadedMoments | None = None
    for each, name, first, count in moment_reads(loaded):
        if each is not last:
            state, last = states[each] or {}, each
            # Others are of the daemon.
            plain = [name for name in MOMENTS if type(state.get(name)) is torch.Tensor]
            held = {name: HeldMoment(state[name], files) for name in plain}
        source = held[name].in_file(first) if name in held else None
        if source is not None:
            yield source, 4 * count


def _held(state: Mapping[str, Any], files: MappedFiles) -> dict[str, HeldMoment]:
    """The moments of a state in torch's format, by their names."""
    return {
        # One that is read only now may lie where a file was mapped before.
        name: HeldMoment(each, files if each is state[name] else None)
        for name, each in ordinary_moments(state).items()
    }


def _has_state(target: Target, state: dict[str, Any] | None, transaction: Transaction) -> bool:
    """Whether to load `state` would change nothing."""
    if state is None:
        return target.update_count == 0
    return transaction.moments.are_in_memd(state, target.shard, target.update_count)


def _refuse_moment(moment: Any, moment_name: str, target: Target) -> None:
    what = f"{moment_name} of parameter {target.shard.name!r}"
    if not isinstance(moment, torch.Tensor):
        raise InvalidArgument(f"{what} is no tensor: {type(moment).__name__}")
    if _is_made_of_others(moment):
        raise InvalidArgument(
            f"{what} is a {type(moment).__name__}, of which this process may have a part; load "
            "its full_tensor()"
        )
    if moment.shape != target.shard.shape:
        raise InvalidArgument(
            f"{what} has another shape than the parameter: {list(moment.shape)}, "
            f"{list(target.shard.shape)}"
        )
    if not moment.dtype.is_floating_point or moment.layout is not torch.strided:
        raise InvalidArgument(
            f"{what} is no dense tensor of floating-point numbers: {moment.dtype}, {moment.layout}"
        )


def _nothing(index: int, into: torch.Tensor) -> None:
    raise AssertionError((index, into.shape))  # there are no values
