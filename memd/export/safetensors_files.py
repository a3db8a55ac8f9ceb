"""The safetensors files of a snapshot: where each run of bytes goes.

A file is eight bytes, the header's length in little-endian order; the header, which is JSON; and
the tensors' bytes. The files of weights are those that `memd_client.save_safetensors` writes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memd.export.contents import BYTES_OF, planned_contents
from memd.export.file import File
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memd.export.contents import Tensor
    from memd_proto.v1 import job_pb2

_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # of the library of that name
_METADATA = "__metadata__"
_PLACE_OF = {code: place for place, code in enumerate(BYTES_OF)}


def planned_files(
    shards: Sequence[job_pb2.SnapshotShard],
    *,
    metadata: Mapping[str, str],
    file_bytes_max: int,
) -> list[File]:
    """All files of an export. What was never written, and what memd keeps for a moment, is in none.

    Raises:
        Refused: no such file can hold a name, a dtype, or so many; the snapshot is of a moment
            between the old values of a load and the new ones.
    """
    contents = planned_contents(shards)
    files = _set("model", contents.model, metadata, file_bytes_max)
    for name, tensors in (("optimizer", contents.optimizer), ("blobs", contents.blobs)):
        if tensors:
            files += _set(name, tensors, metadata, file_bytes_max)
    return files


def encode_header(
    tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[Tensor]]:
    """The bytes before the first tensor, as the library of that name writes them, and the tensors
    in the order of their bytes.

    Raises:
        Refused: more than a header may hold, or a name or dtype that none has.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if tensor.code not in _PLACE_OF:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"safetensors files have no dtype for the frozen parameter {tensor.name!r}; export "
                "it with --format dcp",
            )
    ordered = sorted(tensors, key=lambda each: (_PLACE_OF[each.code], each.name))
    fields: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    end = 0
    for tensor in ordered:
        if tensor.name == _METADATA:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"no tensor in a safetensors file can have the name {_METADATA!r}; rename it",
            )
        begin, end = end, end + tensor.size_bytes
        fields[tensor.name] = {
            "dtype": tensor.code,
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > _HEADER_BYTES_MAX:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            "a safetensors file cannot name so many tensors; give a smaller --max-file",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, ordered


def _set(
    name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str], file_bytes_max: int
) -> list[File]:
    """One file, or shards and their index."""
    shards = _split(tensors, file_bytes_max)
    if len(shards) == 1:
        return [_file(f"{name}.safetensors", shards[0], metadata)]
    files: list[File] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        of_shard = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(_file(of_shard, shard, metadata))
        weight_map.update({tensor.name: of_shard for tensor in shard})
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": weight_map,
    }
    text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return [*files, File(f"{name}.safetensors.index.json", len(text), [(0, text)])]


def _split(tensors: Sequence[Tensor], file_bytes_max: int) -> list[list[Tensor]]:
    """By huggingface_hub's rule, as `save_safetensors` does; a larger tensor is alone."""
    shards: list[list[Tensor]] = []
    open_shard: list[Tensor] = []
    open_bytes = 0
    for tensor in tensors:
        if tensor.size_bytes > file_bytes_max:
            shards.append([tensor])
            continue
        if open_bytes + tensor.size_bytes > file_bytes_max:
            shards.append(open_shard)
            open_shard, open_bytes = [], 0
        open_shard.append(tensor)
        open_bytes += tensor.size_bytes
    if open_shard or not shards:
        shards.append(open_shard)
    return shards


def _file(name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> File:
    prefix, ordered = encode_header(tensors, metadata)
    file = File(name, 0, [(0, prefix)])
    end = len(prefix)
    for tensor in ordered:
        if tensor.constant:
            file.writes.append((end, tensor.constant))
            end += len(tensor.constant)
        for source in tensor.sources:
            end = file.add_source(source, end)
    file.size_bytes = end
    return file
