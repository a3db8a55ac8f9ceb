"""The tensors of a snapshot that an export has, whatever the format of its files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
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
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# Dtypes of torch that no such file has.
BYTES_OF_OTHERS = {"C128": 16, "F4_E2M1FN_X2": 1}
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
# By torch's names: dtypes of frozen parameters that the job has as their bytes.
CODES_OF_FROZEN = {
    "float16": "F16",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4_E2M1FN_X2",
}
# Names that the client gives to what a commit stores beside parameters, buffers and blobs.
_OWN_PREFIXES = ("memd.tracked.", "memd.delayed.")
_STAGED_SUFFIX = "@staged"  # of the next commit
_SCRATCH_PREFIXES = ("@load/", "@offload/", "@init/")
_LOAD_PLAN = "@load/plan"
# An empty blob whose name ends with two names of a tensor, a further one and that of the job.
_TIED_PREFIX = "@tied/"
_TILE = re.compile(r"(.+)\[(\d{1,19}):(\d{1,19})\]", re.DOTALL)  # rows of a tiled parameter
# The dtype and shape of a frozen parameter behind its name, where the job has its bytes.
_FROZEN = re.compile(r"(.+):(\w+)\[((?:\d{1,19}(?:,\d{1,19})*)?)\]", re.DOTALL)


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
        return _size_bytes(self.code, self.shape)


@dataclass(frozen=True, slots=True)
class Source:
    """The first bytes of that place: the job may have one more, as it has an even number."""

    place: Place
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Parameters and buffers under the names of `state_dict()`; states of the optimizer under that
    of the parameter, a dot and a word without one; and blobs."""

    model: Sequence[Tensor]
    optimizer: Sequence[Tensor]
    blobs: Sequence[Tensor]
    # Further names that the model has for tensors of `model`, and theirs.
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter under its name in the model: a shard, or the tiles of one."""

    name: str
    code: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]  # of each shard its number and elements
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
    parameters = _parameters(written)
    models = [_weights(parameter) for parameter in parameters]
    models += [_bytes(number, shard) for number, shard in written if _is_buffer(shard)]
    states = [
        tensor
        for parameter in parameters
        if parameter.first.has_moments
        for tensor in _states(parameter)
    ]
    further = {number: names for number, shard in written if (names := _tied_names(shard))}
    others = [
        _bytes(number, shard)
        for number, shard in written
        if shard.spec.kind != types_pb2.SHARD_KIND_PARAMETER
        and not _is_buffer(shard)
        and number not in further
    ]
    stored = {each.name for each in models}
    tied = {each: name for each, name in further.values() if name in stored and each not in stored}
    return Contents(models, states, others, tied)


def _tied_names(shard: job_pb2.SnapshotShard) -> tuple[str, str] | None:
    """A further name of a tensor, and its own; None: the shard says none."""
    spec = shard.spec
    if spec.kind != types_pb2.SHARD_KIND_BLOB or not spec.name.startswith(_TIED_PREFIX):
        return None
    try:
        further, name = json.loads(spec.name.removeprefix(_TIED_PREFIX))
    except (TypeError, ValueError, RecursionError):
        return None
    return str(further), str(name)


def _is_scratch(shard: job_pb2.SnapshotShard) -> bool:
    name, kind = shard.spec.name, shard.spec.kind
    if kind == types_pb2.SHARD_KIND_BUFFER:
        return name.endswith(_STAGED_SUFFIX)
    return kind == types_pb2.SHARD_KIND_BLOB and name.startswith(_SCRATCH_PREFIXES)


def _is_buffer(shard: job_pb2.SnapshotShard) -> bool:
    """A module's, and not what `session.track()` or `delayed_update` stores."""
    is_own = shard.spec.name.startswith(_OWN_PREFIXES)
    return shard.spec.kind == types_pb2.SHARD_KIND_BUFFER and not is_own


def _parameters(written: Sequence[tuple[int, job_pb2.SnapshotShard]]) -> list[_Parameter]:
    """In the catalogue's order; tiles of one parameter where the first of them is."""
    stored = {
        number: _stored(number, shard)
        for number, shard in written
        if shard.spec.kind == types_pb2.SHARD_KIND_PARAMETER
    }
    frozen = {number: plain for number, each in stored.items() if (plain := _frozen(each))}
    # One that was stored again in another dtype has two.
    names = Counter(each.name for each in (*stored.values(), *frozen.values()))
    alone = {number: plain for number, plain in frozen.items() if names[plain.name] == 1}
    return list(_whole(stored | alone))


def _stored(number: int, shard: job_pb2.SnapshotShard) -> _Parameter:
    """As the job has it."""
    spec = shard.spec
    parts = ((number, math.prod(spec.shape)),)
    return _Parameter(spec.name, _CODES[spec.dtype], tuple(spec.shape), parts, shard)


def _frozen(stored: _Parameter) -> _Parameter | None:
    """A parameter of a dtype that is not trained, of which the job has the bytes, as elements of
    bfloat16; None if it is another one."""
    found = _FROZEN.fullmatch(stored.name)
    if found is None or found[2] not in CODES_OF_FROZEN or stored.first.has_moments:
        return None
    code = CODES_OF_FROZEN[found[2]]
    shape = tuple(int(each) for each in found[3].split(",") if each)
    half_count = -(-_size_bytes(code, shape) // BYTES_OF["BF16"])
    if stored.code != "BF16" or stored.shape != (half_count,):
        return None
    ((number, _),) = stored.parts
    return _Parameter(found[1], code, shape, ((number, math.prod(shape)),), stored.first)


def _whole(parameters: Mapping[int, _Parameter]) -> Iterator[_Parameter]:
    """With tiles joined."""
    names = {each.name for each in parameters.values()}
    tiled: dict[str, list[tuple[int, int, int]]] = {}
    for number, each in parameters.items():
        if found := _TILE.fullmatch(each.name):
            rows = (int(found[2]), int(found[3]), number)
            tiled.setdefault(found[1], []).append(rows)
    joined: dict[int, _Parameter] = {}
    inside: set[int] = set()
    for name, tiles in tiled.items():
        if name not in names and (whole := _joined(name, sorted(tiles), parameters)):
            numbers = [number for number, _ in whole.parts]
            joined[numbers[0]] = whole
            inside.update(numbers)
    for number, each in parameters.items():
        if number in joined:
            yield joined[number]
        elif number not in inside:
            yield each


def _joined(
    name: str,
    tiles: Sequence[tuple[int, int, int]],
    parameters: Mapping[int, _Parameter],
) -> _Parameter | None:
    """The parameter that the tiles make together; None if they make none."""
    first = parameters[tiles[0][2]]
    row = first.shape[1:]
    end = 0
    for begin, tile_end, number in tiles:
        tile = parameters[number]
        is_alike = (
            begin == end
            and tile.shape == (tile_end - begin, *row)
            and tile.code == first.code
            and tile.first.spec.keeps_maximum == first.first.spec.keeps_maximum
            and tile.first.generation == first.first.generation
            and tile.first.has_moments == first.first.has_moments
        )
        if not is_alike:
            return None
        end = tile_end
    if len(tiles) < 2:
        return None
    parts = tuple(part for *_, number in tiles for part in parameters[number].parts)
    return _Parameter(name, first.code, (end, *row), parts, first.first)


def _size_bytes(code: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * (BYTES_OF | BYTES_OF_OTHERS)[code]


def _tensor(
    name: str, code: str, shape: tuple[int, ...], part: int, parts: Sequence[tuple[int, int]]
) -> Tensor:
    sources = tuple(
        Source((number, part), _size_bytes(code, [element_count]))
        for number, element_count in parts
    )
    return Tensor(name, code, shape, sources)


def _bytes(number: int, shard: job_pb2.SnapshotShard) -> Tensor:
    """A blob or buffer."""
    return _weights(_stored(number, shard))


def _weights(parameter: _Parameter) -> Tensor:
    part = job_pb2.SNAPSHOT_PART_VALUE
    return _tensor(parameter.name, parameter.code, parameter.shape, part, parameter.parts)


def _states(parameter: _Parameter) -> Iterator[Tensor]:
    """The names of torch's state behind the parameter's. No two parameters share one: what is added
    has no dot."""
    states = [
        ("exp_avg", job_pb2.SNAPSHOT_PART_EXP_AVG),
        ("exp_avg_sq", job_pb2.SNAPSHOT_PART_EXP_AVG_SQ),
    ]
    if parameter.first.spec.keeps_maximum:
        states.append(("max_exp_avg_sq", job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ))
    if parameter.first.spec.dtype == types_pb2.D_TYPE_BFLOAT16:
        states.append(("master", job_pb2.SNAPSHOT_PART_MASTER))
    for name, part in states:
        yield _tensor(f"{parameter.name}.{name}", "F32", parameter.shape, part, parameter.parts)
    step = parameter.first.generation.to_bytes(8, "little")
    yield Tensor(f"{parameter.name}.step", "I64", (), constant=step)
