"""States of an optimizer whose last update is pending, in torch's format.

memd has the moments after the update, and `model.state_dict()` of that moment has the values from
before it. So the state has the values after it too. An optimizer that does not know this would go
on without the update. So what Adam looks for has other names, which torch's distributed checkpoint
misses in a load, and `step` is a sentence, which torch's Adam shows when it refuses the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from memd_client.base.tensor_bytes import checksum_of
from memd_client.errors import InvalidArgument
from memd_client.updates.delayed_values import delayed_values
from memd_client.updates.resident_target import ResidentTarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memd_client.transaction.transaction import Transaction
    from memd_client.updates.delayed_updates import DelayedUpdates
    from memd_client.updates.targets import Target

_STEP = "step"
_SENTENCE = (
    b"an update of memd's delayed_update is pending in this state: load it into memd_client.AdamW "
    b"or Adam with delayed_update=True, or call optimizer.bring_pending_update() before it is saved"
)
_PREFIX = "pending_"
_VALUE = f"{_PREFIX}value"
_CHECKSUM = f"{_PREFIX}checksum"  # of the value from before the update


@dataclass(frozen=True, slots=True)
class PendingState:
    """A pending update, as a saved state has it."""

    value: torch.Tensor
    checksum: int


def with_pending(target: Target, state: dict[str, Any], transaction: Transaction) -> dict[str, Any]:
    """The state of a parameter, which says whether an update is pending, and has its value then."""
    if not isinstance(target, ResidentTarget) or not target.delay.is_pending:
        return state
    job = transaction.job
    before = delayed_values(transaction).from_before(target, job)
    return {
        _STEP: _SENTENCE,
        **{f"{_PREFIX}{name}": each for name, each in state.items()},
        _VALUE: job.leases.value(target.shard).clone(),
        _CHECKSUM: checksum_of(before),
    }


def split_pending(
    targets: Sequence[Target], states: Sequence[dict[str, Any] | None], delayed: DelayedUpdates
) -> tuple[list[dict[str, Any] | None], list[tuple[Target, PendingState | None]]]:
    """The states of parameters in torch's format, and what else `with_pending` has put there.

    Raises:
        InvalidArgument: something of that is missing, or the optimizer cannot go on with it.
    """
    pending = [
        (target, _pending(target, state)) for target, state in zip(targets, states, strict=True)
    ]
    if not delayed.is_possible and any(each is not None for _, each in pending):
        raise InvalidArgument(
            "an update is pending in this state; make the optimizer with delayed_update=True, or "
            "call bring_pending_update() before the state is saved"
        )
    return [_without(state) for state in states], pending


def _pending(target: Target, state: dict[str, Any] | None) -> PendingState | None:
    if not _is_pending(state):
        return None
    value, checksum = state.get(_VALUE), state.get(_CHECKSUM)
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(checksum, int)
        or value.shape != target.shard.shape
        or value.dtype != target.shard.dtype
    ):
        raise InvalidArgument(
            f"the state of parameter {target.shard.name!r} says that an update is pending, and has "
            f"no value of {target.shard.dtype} {list(target.shard.shape)} with it"
        )
    return PendingState(value, checksum)


def _without(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """In torch's format."""
    if not _is_pending(state):
        return state
    return {
        name.removeprefix(_PREFIX): each
        for name, each in state.items()
        if name not in {_STEP, _VALUE, _CHECKSUM}
    }


def _is_pending(state: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return state is not None and isinstance(state.get(_STEP), bytes)


def replace_pending(
    pending: Iterable[tuple[Target, PendingState | None]], transaction: Transaction
) -> None:
    """After the moments of these states: their pending updates take the place of those that
    parameters wait for."""
    job = transaction.job
    found = [(target, each) for target, each in pending if isinstance(target, ResidentTarget)]
    if not any(target.is_delayed or each is not None for target, each in found):
        return
    delayed_values(transaction).forget(job)
    with torch.no_grad():
        for target, each in found:
            target.drop_pending()
            if each is not None:
                target.load_pending(each.value, each.checksum)
    job.sync_if_needed()
