"""The places of what one load brings: values and moments go there from memd, all or none."""

from __future__ import annotations

from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from memd_client.base.freed_memory import passing_bytes
from memd_client.base.overlaps import overlaps_itself
from memd_client.core.staged_values import StagedValue, StagedValues, staged_name
from memd_client.errors import InvalidArgument, MemdError, retold
from memd_client.transaction.buffers import ModuleBuffers
from memd_client.transaction.loaded_moments import MomentPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.staged_values import Taking
    from memd_client.parameters.model_tensors import ModelTensor
    from memd_client.transaction.loaded_moments import LoadedMoments
    from memd_client.transaction.transaction import Transaction


def replace_all(
    targets: Sequence[ModelTensor],
    fill: Callable[[int, torch.Tensor], None],
    *,
    moments: Sequence[LoadedMoments] = (),
    transaction: Transaction,
    what: str,
) -> None:
    """Replaces the values of `targets` and `moments` of parameters, all or none, and makes them
    durable. State_dicts that somebody holds keep the moments that they have.

    Args:
        fill: writes those of number `index` into a tensor of `stored_bytes` bytes. If it raises,
            nothing has changed.
        what: the call, for messages.

    Raises:
        InvalidArgument: a parameter is in use, or of another job; a tensor of this process cannot
            be written; the job has other sessions. Nothing has changed.
        CapacityError: the job's disk quota does not hold the new state beside the old one. Nothing
            has changed.
        MemdError: nothing has changed; or the message says that the new state may count and is not
            all in place.
    """
    parts = _Parts(targets, fill)
    targets = parts.targets
    _refuse_unwritable(targets)
    places = _Places(transaction, targets, what=what)
    stored = [index for index, target in enumerate(targets) if target.size_bytes]
    values = [
        StagedValue(
            staged_name(number), targets[index].stored_bytes, places.shard_id(targets[index])
        )
        for number, index in enumerate(stored)
    ]
    pieces = MomentPieces(moments, first_index=len(values))
    staged = StagedValues(transaction.job.store, transaction.job.steps)

    def fill_staged(number: int, data: torch.Tensor) -> None:
        if number < len(stored):
            parts.fill(stored[number], data)
        else:
            pieces.fill(number - len(stored), data)
        passing.passed(data.nbytes)

    def take(value: StagedValue, shard: Shard | None, data: torch.Tensor) -> None:
        places.take(value, shard, data, staged)

    whole = [*values, *pieces.staged]
    with passing_bytes() as passing, staged.turn(take, whole):
        staged.refuse_company()
        staged.stage(whole, fill_staged, maxima_bytes=_maxima_bytes(moments, transaction))
        places.expect(values, [targets[index] for index in stored])
        transaction.moments.read_of(
            [each.shard for each in moments],
            besides={each.whole for each in moments if each.whole is not None},
        )
        staged.refuse_company()  # who came meanwhile; who comes later waits for the turn
        _put_in_place(whole, take, staged, transaction)
        _tell(moments, transaction)


def _maxima_bytes(moments: Sequence[LoadedMoments], transaction: Transaction) -> int:
    """Disk space that the job needs for maxima which it has not."""
    parts = [part for each in moments if each.has_maximum for part in each.shard.parts]
    if not parts:
        return 0
    return transaction.job.store.maxima_bytes([part.shard_id for part in parts])


def _tell(moments: Sequence[LoadedMoments], transaction: Transaction) -> None:
    """The optimizers and the state_dict that the moments came by know them."""
    if moments:
        for optimizer in transaction.optimizers:
            optimizer.note_states(moments)
    for each in moments:
        if each.whole is not None:
            each.whole.follow(each.update_count)


def _put_in_place(
    values: Sequence[StagedValue], take: Taking, staged: StagedValues, transaction: Transaction
) -> None:
    """The values count, and go where they belong. If that breaks off, the next session may put them
    over what this one would train, so it makes no step any more."""
    count = False
    try:
        staged.commit(values)
        count = True
        staged.settle(take)
    except BaseException as error:
        clear_frames(error.__traceback__)  # a lease of the plan ends
        if not count and not staged.may_count():
            raise
        unfinished = _Unfinished(transaction.job.name)
        transaction.watch(unfinished)
        if isinstance(error, MemdError):
            raise retold(error, f"{unfinished}: {error}") from error
        if isinstance(error, Exception):
            raise MemdError(f"{unfinished}: {error!r}") from error
        error.add_note(str(unfinished))
        raise


class _Parts:
    """The targets of one load, of which each has one place. A parameter in tiles has several, which
    are filled one after the other from a copy of the whole in this process."""

    def __init__(
        self, wholes: Sequence[ModelTensor], fill: Callable[[int, torch.Tensor], None]
    ) -> None:
        """
        Args:
            fill: writes the bytes of a whole.
        """
        self._wholes = wholes
        self._fill = fill
        self._targets: list[ModelTensor] = []
        self._sources: list[tuple[int, int]] = []  # the whole, and the first byte there
        self._copy: tuple[int, torch.Tensor] | None = None
        for index, whole in enumerate(wholes):
            first_byte = 0
            for part in whole.parts:
                self._targets.append(part)
                self._sources.append((index, first_byte))
                first_byte += part.size_bytes

    @property
    def targets(self) -> Sequence[ModelTensor]:
        return self._targets

    def fill(self, number: int, into: torch.Tensor) -> None:
        """Writes the bytes of target `number`."""
        index, first_byte = self._sources[number]
        whole, part = self._wholes[index], self._targets[number]
        if part is whole:
            self._fill(index, into)
            return
        if self._copy is None or self._copy[0] != index:
            self._copy = None  # before the next is made
            copy = torch.empty(whole.stored_bytes, dtype=torch.uint8)
            self._fill(index, copy)
            self._copy = index, copy
        into.copy_(self._copy[1][first_byte : first_byte + part.size_bytes])
        if first_byte + part.size_bytes == whole.size_bytes:
            self._copy = None


class _Places:
    """The places of the values of one load: shards of the job, and tensors of this process."""

    def __init__(
        self, transaction: Transaction, targets: Sequence[ModelTensor], *, what: str
    ) -> None:
        """
        Args:
            what: the call, for messages.

        Raises:
            InvalidArgument, MemdError: a parameter belongs to another job, or is in use.
        """
        self._job: Job = transaction.job
        self._what = what
        living = {id(each.parameter): each for each in self._job.shards.parameters}
        buffers = [each for each in transaction.contributors if isinstance(each, ModuleBuffers)]
        self._buffers = buffers
        self._shards: dict[int, Shard] = {}  # by id of the tensor, which `targets` refer to
        self._by_shard: dict[int, ModelTensor] = {}
        self._by_name: dict[str, ModelTensor] = {}  # of the staged value
        for target in targets:
            shard = self._shard_of(target, buffers)
            known = living.get(id(target.tensor))
            if shard is None and known is not None:
                shard = known.shard
            if shard is not None:
                self._shards[id(target.tensor)] = shard
                self._by_shard[shard.shard_id] = target

    def shard_id(self, target: ModelTensor) -> int | None:
        shard = self._shards.get(id(target.tensor))
        return shard.shard_id if shard is not None else None

    def expect(self, values: Sequence[StagedValue], targets: Sequence[ModelTensor]) -> None:
        """Tensors of this process alone are found by the staged value that is theirs."""
        self._by_name = {value.name: target for value, target in zip(values, targets, strict=True)}

    def take(
        self, value: StagedValue, shard: Shard | None, data: torch.Tensor, staged: StagedValues
    ) -> None:
        """Puts `data` in its place. Another load may have staged it, in another process."""
        if shard is None:
            target = self._by_name.get(value.name)
        else:
            target = self._by_shard.get(shard.shard_id)
        entry = target.entry if target is not None else None
        if shard is not None and entry is None:
            staged.overwrite(shard, data)
            for each in self._buffers:
                each.forget(shard)
        if target is None:
            return
        new = data[: target.size_bytes].view(target.dtype).view(target.shape)
        if entry is not None:
            entry.residency.write(new)
        else:
            with torch.no_grad():
                target.tensor.copy_(new)

    def _shard_of(self, target: ModelTensor, buffers: Sequence[ModuleBuffers]) -> Shard | None:
        entry = target.entry
        if entry is None:
            found = (each.shard_of(target.tensor) for each in buffers)
            return next(filter(None, found), None)
        if entry.job is not self._job:
            raise InvalidArgument(
                f"parameter {entry.shard.label!r} belongs to job {entry.job.name!r} and another "
                f"session; load with the session that it was offloaded to, not job "
                f"{self._job.name!r}"
            )
        entry.residency.refuse_if_in_use(self._what)
        return entry.shard


class _Unfinished:
    """A load whose values may count, and are not all in place in this process."""

    def __init__(self, job: str) -> None:
        self._job = job

    def __str__(self) -> str:
        return (
            f"job {self._job!r}: a load broke off when its values were in memd, and not all in "
            "place; close this session and connect again, which finishes or forgets them"
        )

    def refuse_replaced(self) -> None:
        """Before a step, which would use some old values and some new ones."""
        raise MemdError(str(self))


def _refuse_unwritable(targets: Sequence[ModelTensor]) -> None:
    """Before anything is staged: torch would refuse the copy when the values count already."""
    for target in targets:
        tensor = target.tensor
        if target.entry is not None:
            continue
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidArgument(
                f"{target.name!r} was made in torch.inference_mode() and cannot be written outside "
                "of it; give the model a clone()"
            )
        if overlaps_itself(tensor):
            raise InvalidArgument(
                f"elements of {target.name!r} share memory, as those of expand() do, so it cannot "
                "be written; give the model a clone()"
            )
