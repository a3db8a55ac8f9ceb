"""The state of an asynchronous save: what is in memd stays there, in a snapshot."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memd_client.connection.shard import MASTER, MOMENTS
from memd_client.errors import InvalidArgument, NotYet
from memd_client.parameters.away import ParameterBytes
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.tiles import TileBytes, entries_of
from memd_client.transaction.metadata import asks_for_metadata
from memd_client.transaction.moments import MomentTensor
from memd_client.transaction.transaction import transaction_of
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.temporary_snapshots import TemporarySnapshot
    from memd_client.parameters.parameter import StreamedParameter
    from memd_client.transaction.transaction import Transaction

_no_bytes: dict[torch.dtype, torch.Tensor] = {}
_PARTS = dict(
    zip(
        (*MOMENTS, MASTER),
        (
            job_pb2.SNAPSHOT_PART_EXP_AVG,
            job_pb2.SNAPSHOT_PART_EXP_AVG_SQ,
            job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ,
            job_pb2.SNAPSHOT_PART_MASTER,
        ),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """One part of a shard, under the daemon's name."""

    shard_name: str
    part: job_pb2.SnapshotPart
    size_bytes: int
    update_count: int | None = None  # of moments: the updates that they have had


class SnapshotTensor(torch.Tensor):
    """A tensor whose bytes are those of `sources`, one after the other, in a snapshot. Only
    `Writer` reads them."""

    _snapshot: TemporarySnapshot
    _sources: Sequence[SnapshotSource]
    _master: SnapshotTensor | None

    @staticmethod
    def of(
        snapshot: TemporarySnapshot,
        sources: Sequence[SnapshotSource],
        *,
        dtype: torch.dtype,
        shape: torch.Size,
        master: SnapshotTensor | None = None,
    ) -> SnapshotTensor:
        if dtype not in _no_bytes:
            _no_bytes[dtype] = torch.zeros((), dtype=dtype)
        tensor = torch.Tensor._make_subclass(SnapshotTensor, _no_bytes[dtype].expand(shape))
        tensor._snapshot = snapshot
        tensor._sources = sources
        tensor._master = master
        return tensor

    @property
    def snapshot(self) -> TemporarySnapshot:
        return self._snapshot

    @property
    def sources(self) -> Sequence[SnapshotSource]:
        return self._sources

    @property
    def master(self) -> SnapshotTensor | None:
        """See `master_beside`."""
        return self._master

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if asks_for_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func is torch.Tensor.detach:
            return args[0]
        raise NotYet(
            "what dcp.async_save stages stays in memd, and memd_client.checkpoint.Writer alone "
            f"reads it there: {getattr(func, '__name__', func)}; pass it as storage_writer="
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotYet(
            "a snapshot is read in the process that made it; call dcp.async_save without "
            "async_checkpointer_type=PROCESS, and with a memd_client.checkpoint.Writer"
        )


@dataclass(frozen=True, slots=True)
class _InMemd:
    """The place of a tensor's bytes: parts of shards of one session."""

    transaction: Transaction
    shards: Sequence[Shard]  # one below the other
    moment: MomentTensor | None = None

    def sources(self, names: Mapping[int, str]) -> list[SnapshotSource]:
        """By the daemon's names of shards."""
        if self.moment is None:
            return [
                SnapshotSource(names[shard.shard_id], job_pb2.SNAPSHOT_PART_VALUE, shard.size_bytes)
                for shard in self.shards
            ]
        return [
            SnapshotSource(
                names[shard.shard_id],
                _PARTS[self.moment.moment],
                4 * shard.element_count,
                self.moment.whole.update_count,
            )
            for shard in self.shards
        ]


def staged(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` as it is now, whatever happens to it later. Parameters and moments that are in memd
    stay there, in a snapshot that is dropped once nobody refers to the result. All else is copied,
    tensors to the CPU.

    Raises:
        InvalidArgument: the state has tensors of several sessions; the call is between `step()` and
            `commit()`, or within `gather()`; the optimizer has other moments by now than
            those that were read.
        CapacityError: the job's disk quota does not hold one state more.
    """
    tensors = {id(each): each for each in _tensors(state)}
    found = {key: place for key, each in tensors.items() if (place := _in_memd(each)) is not None}
    memo: dict[int, Any] = {}
    if found:
        transaction = _one_transaction(found.values())
        wholes = {each.moment.whole: None for each in found.values() if each.moment is not None}
        for whole in wholes:
            whole.refuse_outdated()
        snapshot = transaction.temporary_snapshot()
        names = {each.shard_id: each.spec.name for each in transaction.job.shards.list_all()}
        for key, place in found.items():
            memo[key] = _in_snapshot(snapshot, place, tensors[key], names)
    for key, tensor in tensors.items():
        if key not in memo and tensor.layout is torch.strided and tensor.device.type != "meta":
            memo[key] = _ordinary(tensor)
    return copy.deepcopy(dict(state), memo)


def master_beside(tensor: object) -> torch.Tensor | None:
    """The fp32 values from which the training of a bfloat16 parameter goes on, if `tensor` is its
    first moment. No state has them; a checkpoint does."""
    if isinstance(tensor, SnapshotTensor):
        return tensor.master
    if not isinstance(tensor, MomentTensor) or tensor.moment != MOMENTS[0]:
        return None
    return MomentTensor.of(tensor.whole, MASTER) if tensor.whole.has_master else None


def _in_snapshot(
    snapshot: TemporarySnapshot, place: _InMemd, tensor: torch.Tensor, names: Mapping[int, str]
) -> SnapshotTensor:
    master = None
    beside = master_beside(tensor)
    if isinstance(beside, MomentTensor):
        master = _in_snapshot(snapshot, replace(place, moment=beside), beside, names)
    sources = place.sources(names)
    return SnapshotTensor.of(
        snapshot, sources, dtype=tensor.dtype, shape=tensor.shape, master=master
    )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those in containers, as torch looks for them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _in_memd(tensor: torch.Tensor) -> _InMemd | None:
    """None: the snapshot will not have it."""
    if isinstance(tensor, MomentTensor):
        moments = tensor.whole.session_moments
        transaction = transaction_of(moments) if moments is not None else None
        if transaction is None:
            return None
        return _InMemd(transaction, tensor.whole.shard.parts, tensor)
    entries = _entries(tensor)
    if not entries:
        return None
    for entry in entries:
        if entry.residency.is_gathered:
            raise InvalidArgument(
                f"job {entry.job.name!r}: parameter {entry.shard.label!r} is gathered, and may be "
                "changed; call dcp.async_save outside of gather()"
            )
    return _InMemd(entries[0].transaction, [entry.shard for entry in entries])


def _entries(tensor: torch.Tensor) -> list[StreamedParameter]:
    """The entries of all its bytes, if it is offloaded or `detach()` of one that is."""
    if not isinstance(tensor, LazyTensor):
        return entries_of(tensor)
    source = tensor.source
    if source.has_ended or source.is_gradient or not _shows_all(tensor):
        return []
    if isinstance(source, ParameterBytes):
        return [source.entry]
    return source.tiling.entries if isinstance(source, TileBytes) else []


def _shows_all(tensor: LazyTensor) -> bool:
    return (
        tensor.shape == tensor.source.shape
        and tensor.dtype == tensor.source.dtype
        and tensor.is_contiguous()
    )


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values of now."""
    tensor = tensor.detach()
    if isinstance(tensor, MomentTensor):
        tensor = tensor.whole.passing_values()[tensor.moment]
    if isinstance(tensor, LazyTensor):
        tensor = tensor.in_memory()
    return tensor.to("cpu", copy=True)


def _one_transaction(found: Iterable[_InMemd]) -> Transaction:
    transactions = list(dict.fromkeys(each.transaction for each in found))
    if len(transactions) > 1:
        names = " and ".join(repr(each.job.name) for each in transactions)
        raise InvalidArgument(
            f"the state has tensors of several sessions, of jobs {names}; save one at a time"
        )
    transactions[0].job.settle_for("dcp.async_save()")
    return transactions[0]
