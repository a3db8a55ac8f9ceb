"""A snapshot as a folder of torch's distributed checkpoint: `.metadata`, and files of items.

`dcp.load` reads it into `{"model": ..., "optimizer": {"state": ...}}`, as torch's `get_state_dict`
names parameters. Each item is an archive of `torch.save`, as `memd_client.checkpoint.Writer` writes
it.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from memd.export.contents import CODES_OF_FROZEN, planned_contents
from memd.export.file import Ending, File
from memd_client.base.checksum import RunChecksum
from memd_client.checkpoints.checkpoint_folder import METADATA_NAME
from memd_client.checkpoints.tensor_archive import TensorArchive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memd.export.contents import Contents, Tensor
    from memd_proto.v1 import job_pb2

    Path = tuple[str, ...]  # in the state
    # A tied tensor is there under each of its names, with the same bytes.
    Item = tuple[Sequence[Path], Tensor]

__all__ = ["DTYPES", "RunChecksum", "planned_files"]

# By their codes.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    **{code: getattr(torch, name) for name, code in CODES_OF_FROZEN.items()},
}


def planned_files(
    shards: Sequence[job_pb2.SnapshotShard],
    *,
    metadata: Mapping[str, str],
    file_bytes_max: int,
) -> list[File]:
    """All files of an export. What was never written, and what memd keeps for a moment, is in none.

    Raises:
        Refused: the snapshot is of a moment between the old values of a load and the new ones.
    """
    files = [File(_name(0), 0, [])]
    stored: dict[MetadataIndex, _StorageInfo] = {}
    forms: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, Path] = {}
    for its_paths, tensor in _items(planned_contents(shards)):
        dtype, shape = DTYPES[tensor.code], torch.Size(tensor.shape)
        archive = TensorArchive(dtype, shape)
        if files[-1].size_bytes and files[-1].size_bytes + archive.size_bytes > file_bytes_max:
            files.append(File(_name(len(files)), 0, []))
        file, begin = files[-1], files[-1].size_bytes
        _add(file, tensor, archive)
        first = torch.Size([0] * len(shape))
        for path in its_paths:
            name = ".".join(path)
            paths[name] = path
            forms[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape, [ChunkStorageMetadata(first, shape)]
            )
            place = _StorageInfo(file.name, begin, archive.size_bytes)
            stored[MetadataIndex(name, first, 0)] = place
    text = pickle.dumps(
        Metadata(
            state_dict_metadata=forms,
            planner_data=paths,
            storage_data=stored,
            storage_meta=StorageMeta(save_id=f"{metadata['job']}/{metadata['snapshot']}"),
            version=CURRENT_DCP_VERSION,
        )
    )
    return [*files, File(METADATA_NAME, len(text), [(0, text)])]


def _items(contents: Contents) -> Iterator[Item]:
    """Under the names that torch gives them."""
    further: dict[str, list[str]] = {}
    for name, own in contents.tied.items():
        further.setdefault(own, []).append(name)
    for tensor in contents.model:
        names = (tensor.name, *further.get(tensor.name, ()))
        yield [("model", name) for name in names], tensor
    for tensor in contents.optimizer:
        parameter, _, state = tensor.name.rpartition(".")
        yield [("optimizer", "state", parameter, state)], _as_torch_has_it(tensor)
    for tensor in contents.blobs:
        yield [("blobs", tensor.name)], tensor


def _as_torch_has_it(state: Tensor) -> Tensor:
    """The number of updates is a float there."""
    if not state.constant:
        return state
    count = float(int.from_bytes(state.constant, "little"))
    return replace(state, code="F32", constant=struct.pack("<f", count))


def _add(file: File, tensor: Tensor, archive: TensorArchive) -> None:
    """Behind what the file has."""
    file.writes.append((file.size_bytes, archive.prefix))
    begin = end = file.size_bytes + len(archive.prefix)
    if tensor.constant:
        file.writes.append((end, tensor.constant))
        end += len(tensor.constant)
    for source in tensor.sources:
        end = file.add_source(source, end)
    file.endings.append(Ending(begin, end, archive.suffix))
    file.size_bytes += archive.size_bytes


def _name(number: int) -> str:
    return f"__0_{number}.distcp"
