"""The tensors of a snapshot that an export has, whatever the format of its files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Place = tuple[int, int]  # a shard's number, and its part

# By the names of safetensors, in the order in which files of it have their tensors: wide elements
# first, so that all are aligned.
BYTES_OF = {
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
        return math.prod(self.shape) * BYTES_OF[self.code]


@dataclass(frozen=True, slots=True)
class Source:
    place: Place
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Parameters and buffers under the names of `state_dict()`; states of the optimizer under that
    of the parameter, a dot and a word without one; and blobs."""

    model: Sequence[Tensor]
    optimizer: Sequence[Tensor]
    blobs: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter under its name in the model: a shard, or the tiles of one."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[int, ...]
    first: job_pb2.SnapshotShard  # which the others are like


def planned_contents(shards: Sequence[job_pb2.SnapshotShard]) -> Contents:
    """Without what was never written and what memd keeps for a moment.

    Raises:
        Refused: the snapshot is of a moment between the old values of a load and the new ones.
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
    return Contents(models, states, others)


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
        Source((number, part), math.prod(shard.spec.shape) * BYTES_OF[code])
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
