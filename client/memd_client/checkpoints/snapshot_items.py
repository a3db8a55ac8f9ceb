"""The tensors of a snapshot as items of a file, which come in the order that the daemon has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd_client.base.checksum import RunChecksum
from memd_client.checkpoints.tensor_archive import TensorArchive
from memd_client.errors import InvalidArgument, MemdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.checkpoints.snapshot_tensor import SnapshotSource, SnapshotTensor
    from memd_client.checkpoints.whole_file import WholeFile
    from memd_proto.v1 import job_pb2


class SnapshotItem:
    """One tensor's archive, from byte `begin` of a file on."""

    def __init__(self, tensor: SnapshotTensor, begin: int) -> None:
        self._archive = TensorArchive(tensor.dtype, tensor.shape)
        self._begin = begin
        self._checksum = RunChecksum()

    @property
    def begin(self) -> int:
        return self._begin

    @property
    def size_bytes(self) -> int:
        return self._archive.size_bytes

    def write_prefix(self, file: WholeFile) -> None:
        """Writes the bytes before the tensor."""
        file.write_at(self._begin, self._archive.prefix)

    def write(self, file: WholeFile, offset: int, data: memoryview) -> None:
        """Writes bytes of the tensor, from its byte `offset` on."""
        self._checksum.add(offset, data)
        file.write_at(self._begin + len(self._archive.prefix) + offset, data)

    def write_suffix(self, file: WholeFile) -> None:
        """Writes the bytes behind the tensor, once it is there."""
        size_bytes = self._archive.data_bytes
        suffix = self._archive.suffix(self._checksum.value(0, size_bytes))
        file.write_at(self._begin + len(self._archive.prefix) + size_bytes, suffix)


class SnapshotItems:
    """All items of one snapshot, one after the other: a `SnapshotTaker`."""

    def __init__(self, file: WholeFile, tensors: Sequence[SnapshotTensor], *, begin: int) -> None:
        self._file = file
        self._tensors = tensors
        self._items: list[SnapshotItem] = []
        # For each part of a shard, by its number: the items that have it, from which byte on, and
        # how much of it. A tied parameter has several.
        self._places: dict[tuple[int, int], list[tuple[SnapshotItem, int, int]]] = {}
        for tensor in tensors:
            item = SnapshotItem(tensor, begin)
            self._items.append(item)
            begin += item.size_bytes

    @property
    def items(self) -> Sequence[SnapshotItem]:
        """In the order of the tensors."""
        return self._items

    def begin(self, shards: Sequence[job_pb2.SnapshotShard]) -> None:
        """See `SnapshotTaker`."""
        numbers = {shard.spec.name: number for number, shard in enumerate(shards)}
        for tensor, item in zip(self._tensors, self._items, strict=True):
            offset = 0
            for source in tensor.sources:
                number = numbers.get(source.shard_name)
                if number is None:
                    raise _missing(source)
                _refuse_other(source, shards[number])
                places = self._places.setdefault((number, source.part), [])
                places.append((item, offset, source.size_bytes))
                offset += source.size_bytes
            item.write_prefix(self._file)

    def take(self, run: job_pb2.SnapshotRun, data: memoryview) -> None:
        """See `SnapshotTaker`."""
        for item, begin, size_bytes in self._places.get((run.shard, run.part), ()):
            # A frozen parameter with an odd number of bytes has one more in the daemon.
            its = data[: max(size_bytes - run.offset_bytes, 0)]
            item.write(self._file, begin + run.offset_bytes, its)

    def end_piece(self) -> None:
        """See `SnapshotTaker`. Each run is in the file already."""

    def finish(self) -> None:
        """Once the snapshot was read."""
        for item in self._items:
            item.write_suffix(self._file)


def _refuse_other(source: SnapshotSource, shard: job_pb2.SnapshotShard) -> None:
    if not shard.written:
        raise _missing(source)
    if source.update_count not in (None, shard.generation):
        raise InvalidArgument(
            f"the optimizer's state of parameter {source.shard_name!r} is of {source.update_count} "
            f"updates, and the parameter of {shard.generation}; call state_dict() right before "
            "dcp.async_save"
        )


def _missing(source: SnapshotSource) -> MemdError:
    return MemdError(f"the snapshot has no value of {source.shard_name!r}")
