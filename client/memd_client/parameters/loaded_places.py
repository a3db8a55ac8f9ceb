"""The places of what one load brings: values and moments go there, all or none."""

from __future__ import annotations

from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from memd_client.base.freed_memory import passing_bytes
from memd_client.base.overlaps import overlaps_itself
from memd_client.core.load import Load, older_daemon, refuse_company
from memd_client.errors import InvalidArgument
from memd_client.transaction.buffers import ModuleBuffers
from memd_client.transaction.loaded_moments import MomentPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.base.freed_memory import PassingBytes
    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.parameters.model_tensors import ModelTensor
    from memd_client.transaction.loaded_moments import LoadedMoments
    from memd_client.transaction.transaction import Transaction

    Fill = Callable[[torch.Tensor], None]


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
        fill: writes those of number `index` into a tensor of `size_bytes` bytes, which may be the
            job's own. If it raises, nothing has changed.
        what: the call, for messages.

    Raises:
        InvalidArgument: a parameter is in use, or of another job; a tensor of this process cannot
            be written; the job has other sessions. Nothing has changed.
        CapacityError: the job's disk quota does not hold the new state beside the old one. Nothing
            has changed.
        MemdError: nothing has changed; or the message says that this session may have old values
            and new ones, and what the job has then.
    """
    job = transaction.job
    _ = job.unordered_leases  # refuses a session without shared memory
    parts = _Parts(targets, fill)
    _refuse_unwritable(parts.targets)
    places = _Places(transaction, parts.targets, what=what)
    pieces = MomentPieces(moments)
    if not job.store.can_load_in_place:
        raise older_daemon(job.name)
    refuse_company(job.store)
    load = Load(job.store, job.steps)
    with passing_bytes() as passing:
        try:
            create = partial(transaction.snapshot, is_own=True, session_id=job.session_id)
            with load.all_or_none(create, transaction.watch):
                load.prepare(
                    places.staged_bytes,
                    pieces.pieces,
                    maxima_bytes=_maxima_bytes(moments, transaction),
                )
                transaction.moments.read_of(
                    [each.shard for each in moments],
                    besides={each.whole for each in moments if each.whole is not None},
                )
                places.fill(load, _passing(parts.fill, passing))
                load.put(pieces.pieces, _passing(pieces.fill, passing))
                load.put_zeros(pieces.zeros)
        except BaseException:
            places.forget()
            raise
        try:
            places.show(load)
            _tell(moments, transaction)
        except BaseException as error:
            clear_frames(error.__traceback__)  # a lease ends
            load.tell_unfinished(error, error, transaction.watch)
            raise
        finally:
            load.forget()


def _passing(
    fill: Callable[[int, torch.Tensor], None], passing: PassingBytes
) -> Callable[[int, torch.Tensor], None]:
    """`fill`, which counts what it has written."""

    def counted(number: int, data: torch.Tensor) -> None:
        fill(number, data)
        passing.passed(data.nbytes)

    return counted


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
            copy = torch.empty(whole.size_bytes, dtype=torch.uint8)
            self._fill(index, copy)
            self._copy = index, copy
        into.copy_(self._copy[1][first_byte : first_byte + part.size_bytes])
        if first_byte + part.size_bytes == whole.size_bytes:
            self._copy = None


class _Places:
    """The places of the values of one load: shards of the job, and tensors of this process. Such a
    tensor gets its value when the load counts, from its shard or from a blob."""

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
        self._targets = targets
        living = {id(each.parameter): each for each in self._job.shards.parameters}
        buffers = [each for each in transaction.contributors if isinstance(each, ModuleBuffers)]
        self._buffers = buffers
        self._shards: dict[int, Shard] = {}  # by number
        self._staged: dict[int, int] = {}  # by number: that of the bytes in memd
        # They show the values of parameters, once the load counts.
        self._shows: list[Callable[[], None]] = []
        for number, target in enumerate(targets):
            shard = self._shard_of(target, buffers)
            known = living.get(id(target.tensor))
            if shard is None and known is not None:
                shard = known.shard
            if shard is not None:
                self._shards[number] = shard
            elif target.size_bytes:
                self._staged[number] = len(self._staged)

    @property
    def staged_bytes(self) -> Sequence[int]:
        """The sizes of the values that the job has no shards of."""
        return [self._targets[number].size_bytes for number in self._staged]

    def fill(self, load: Load, fill: Callable[[int, torch.Tensor], None]) -> None:
        """`fill` writes the bytes of number `index`."""
        for number, target in enumerate(self._targets):
            if target.size_bytes:
                self._fill(load, number, partial(fill, number))

    def _fill(self, load: Load, number: int, fill: Fill) -> None:
        entry, shard = self._targets[number].entry, self._shards.get(number)
        if entry is not None:
            residency = entry.residency
            load.write(entry.shard, lambda: self._shows.append(residency.fill(fill)))
        elif shard is not None:
            load.overwrite(shard, fill)
        else:
            load.stage(self._staged[number], fill)

    def show(self, load: Load) -> None:
        """The load counts: this process shows its values."""
        for show in self._shows:
            show()
        for number, target in enumerate(self._targets):
            shard = self._shards.get(number)
            if target.entry is not None or not target.size_bytes:
                continue
            if shard is not None:
                value = self._job.leases.value(shard)
                for each in self._buffers:
                    each.forget(shard)
            else:
                value = load.staged(self._staged[number]).view(target.dtype).view(target.shape)
            with torch.no_grad():
                target.tensor.copy_(value)
            del value  # its lease

    def forget(self) -> None:
        """The load does not count, and the job has the old values."""
        for target in self._targets:
            entry = target.entry
            if entry is not None:
                # A device may have copied what was there meanwhile.
                self._job.unordered_leases.of(entry.shard).note_change(entry.shard)

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


def _refuse_unwritable(targets: Sequence[ModelTensor]) -> None:
    """Before anything changes: torch would refuse the copy when the load counts already."""
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
