"""The safetensors files of a snapshot: which tensors they have, and where each run of bytes goes.

A file is eight bytes, the header's length in little-endian order; the header, which is JSON; and
the tensors' bytes. The files of weights are those that `memd_client.save_safetensors` writes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Place = tuple[int, int]  # a shard's number, and its part

_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # of the library of that name
_METADATA = "__metadata__"
# In the order in which files have their tensors: wide elements first, so that all are aligned.
_BYTES_OF = {
    "I64": 8,
    "F64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_PLACE_OF = {code: place for place, code in enumerate(_BYTES_OF)}
_CODES = {
    types_pb2.D_TYPE_FLOAT32: "F32",
    types_pb2.D_TYPE_BFLOAT16: "BF16",
    types_pb2.D_TYPE_FLOAT16: "F16",
    types_pb2.D_TYPE_FLOAT64: "F64",
    types_pb2.D_TYPE_INT8: "I8",
    types_pb2.D_TYPE_INT16: "I16",
    types_pb2.D_TYPE_INT32: "I32",
    types_pb2.D_TYPE_INT64: "I64",
    types_pb2.D_TYPE_UINT8: "U8",
    types_pb2.D_TYPE_BOOL: "BOOL",
}
# Names that the client gives to what a commit stores beside parameters, buffers and blobs.
_TRACKED_PREFIX = "memd.tracked."
_STAGED_SUFFIX = "@staged"  # of the next commit
_SCRATCH_PREFIXES = ("@load/", "@offload/", "@init/")
_LOAD_PLAN = "@load/plan"
_TILE = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)  # rows of a tiled parameter


@dataclass(frozen=True, slots=True)
class Tensor:
    """Its bytes are those of `sources`, one after the other, or `constant`."""

    name: str
    code: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    constant: bytes = b""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES_OF[self.code]


@dataclass(frozen=True, slots=True)
class Source:
    place: Place
    size_bytes: int


@dataclass(slots=True)
class File:
    """`begins` has where each source's bytes begin; `writes` is known from the start."""

    name: str
    size_bytes: int
    writes: list[tuple[int, bytes]]
    begins: dict[Place, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter under its name in the model: a shard, or the tiles of one."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[int, ...]
    first: job_pb2.SnapshotShard  # which the others are like


def planned_files(
    shards: Sequence[job_pb2.SnapshotShard],
    *,
    metadata: Mapping[str, str],
    file_bytes_max: int,
) -> list[File]:
    """All files of an export. What was never written, and what memd keeps for a moment, is in none.

    Raises:
        Refused: no such file can hold a name, or so many; the snapshot is of a moment between the
            old values of a load and the new ones.
    """
    if any(shard.spec.name == _LOAD_PLAN and shard.written for shard in shards):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            "this snapshot was made while a load moved its values: connect a session, which "
            "finishes the load, make another snapshot and export that",
        )
    written = [each for each in enumerate(shards) if each[1].written and not _is_scratch(each[1])]
    parameters = list(_parameters(written))
    models = [_weights(parameter, shards) for parameter in parameters]
    models += [_bytes(number, shard) for number, shard in written if _is_buffer(shard)]
    states = [
        tensor
        for parameter in parameters
        if parameter.first.has_moments
        for tensor in _states(parameter, shards)
    ]
    others = [
        _bytes(number, shard)
        for number, shard in written
        if shard.spec.kind != types_pb2.SHARD_KIND_PARAMETER and not _is_buffer(shard)
    ]
    files = _set("model", models, metadata, file_bytes_max)
    for name, tensors in (("optimizer", states), ("blobs", others)):
        if tensors:
            files += _set(name, tensors, metadata, file_bytes_max)
    return files


def encode_header(
    tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[Tensor]]:
    """The bytes before the first tensor, as the library of that name writes them, and the tensors
    in the order of their bytes.

    Raises:
        Refused: more than a header may hold, or a name that none has.
    """
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


def _is_scratch(shard: job_pb2.SnapshotShard) -> bool:
    name, kind = shard.spec.name, shard.spec.kind
    if kind == types_pb2.SHARD_KIND_BUFFER:
        return name.endswith(_STAGED_SUFFIX)
    return kind == types_pb2.SHARD_KIND_BLOB and name.startswith(_SCRATCH_PREFIXES)


def _is_buffer(shard: job_pb2.SnapshotShard) -> bool:
    """A module's, and not what `session.track()` stores."""
    is_tracked = shard.spec.name.startswith(_TRACKED_PREFIX)
    return shard.spec.kind == types_pb2.SHARD_KIND_BUFFER and not is_tracked


def _parameters(written: Sequence[tuple[int, job_pb2.SnapshotShard]]) -> Iterator[_Parameter]:
    """In the catalogue's order; tiles of one parameter where the first of them is."""
    parameters = {
        number: shard
        for number, shard in written
        if shard.spec.kind == types_pb2.SHARD_KIND_PARAMETER
    }
    names = {shard.spec.name for shard in parameters.values()}
    tiled: dict[str, list[tuple[int, int, int]]] = {}
    for number, shard in parameters.items():
        if found := _TILE.fullmatch(shard.spec.name):
            rows = (int(found[2]), int(found[3]), number)
            tiled.setdefault(found[1], []).append(rows)
    joined: dict[int, _Parameter] = {}
    inside: set[int] = set()
    for name, tiles in tiled.items():
        if name not in names and (whole := _joined(name, sorted(tiles), parameters)):
            joined[whole.shards[0]] = whole
            inside.update(whole.shards)
    for number, shard in parameters.items():
        if number in joined:
            yield joined[number]
        elif number not in inside:
            yield _Parameter(shard.spec.name, tuple(shard.spec.shape), (number,), shard)


def _joined(
    name: str,
    tiles: Sequence[tuple[int, int, int]],
    shards: Mapping[int, job_pb2.SnapshotShard],
) -> _Parameter | None:
    """The parameter that the tiles make together; None if they make none."""
    first = shards[tiles[0][2]]
    row = first.spec.shape[1:]
    end = 0
    for begin, tile_end, number in tiles:
        shard = shards[number]
        is_alike = (
            begin == end
            and list(shard.spec.shape) == [tile_end - begin, *row]
            and shard.spec.dtype == first.spec.dtype
            and shard.spec.keeps_maximum == first.spec.keeps_maximum
            and shard.generation == first.generation
            and shard.has_moments == first.has_moments
        )
        if not is_alike:
            return None
        end = tile_end
    if len(tiles) < 2:
        return None
    return _Parameter(name, (end, *row), tuple(number for *_, number in tiles), first)


def _tensor(
    name: str,
    code: str,
    shape: tuple[int, ...],
    part: int,
    shards: Mapping[int, job_pb2.SnapshotShard],
) -> Tensor:
    sources = tuple(
        Source((number, part), math.prod(shard.spec.shape) * _BYTES_OF[code])
        for number, shard in shards.items()
    )
    return Tensor(name, code, shape, sources)


def _bytes(number: int, shard: job_pb2.SnapshotShard) -> Tensor:
    """A blob or buffer."""
    spec = shard.spec
    part = job_pb2.SNAPSHOT_PART_VALUE
    return _tensor(spec.name, _CODES[spec.dtype], tuple(spec.shape), part, {number: shard})


def _weights(parameter: _Parameter, shards: Sequence[job_pb2.SnapshotShard]) -> Tensor:
    code = _CODES[parameter.first.spec.dtype]
    of = {number: shards[number] for number in parameter.shards}
    return _tensor(parameter.name, code, parameter.shape, job_pb2.SNAPSHOT_PART_VALUE, of)


def _states(parameter: _Parameter, shards: Sequence[job_pb2.SnapshotShard]) -> Iterator[Tensor]:
    """The names of torch's state behind the parameter's. No two parameters share one: what is added
    has no dot."""
    of = {number: shards[number] for number in parameter.shards}
    parts = [
        ("exp_avg", job_pb2.SNAPSHOT_PART_EXP_AVG),
        ("exp_avg_sq", job_pb2.SNAPSHOT_PART_EXP_AVG_SQ),
    ]
    if parameter.first.spec.keeps_maximum:
        parts.append(("max_exp_avg_sq", job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ))
    if parameter.first.spec.dtype == types_pb2.D_TYPE_BFLOAT16:
        parts.append(("master", job_pb2.SNAPSHOT_PART_MASTER))
    for name, part in parts:
        yield _tensor(f"{parameter.name}.{name}", "F32", parameter.shape, part, of)
    step = parameter.first.generation.to_bytes(8, "little")
    yield Tensor(f"{parameter.name}.step", "I64", (), constant=step)


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
            file.begins[source.place] = end
            end += source.size_bytes
    file.size_bytes = end
    return file
