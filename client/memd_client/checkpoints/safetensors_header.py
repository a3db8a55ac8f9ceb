"""The header of a safetensors file: the names, dtypes, shapes and places of its tensors.

A file is eight bytes, the header's length in little-endian order; the header, which is JSON; and
the tensors' bytes, in row-major order. What is read here may come from anyone: nothing is taken
from a header before it was checked, and it is no longer than the library of that name allows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memd_client.base.sizes import format_size
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_COUNT_MAX = (1 << 63) - 1  # torch's
_RANK_MAX = 64  # torch's operations take no more
# In the order in which files have their tensors: wide elements first, so that all are aligned.
_CODES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}
_PLACE_OF = {dtype: place for place, dtype in enumerate(_CODE_OF)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `begin` and `end` are bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors of a file, in the order of their bytes, which they fill without a hole."""

    tensors: tuple[StoredTensor, ...]
    data_begin: int  # in the file

    @property
    def file_bytes(self) -> int:
        return self.data_begin + (self.tensors[-1].end if self.tensors else 0)


def header_length(prefix: bytes, file_bytes: int, path: object) -> int:
    """The length that the first eight bytes of a file of `file_bytes` give.

    Raises:
        InvalidArgument: no header of that length can be there.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES:
        raise InvalidArgument(
            f"{path} is no safetensors file: it ends within the length of its header, after "
            f"{len(prefix)} of {LENGTH_BYTES} bytes"
        )
    if length > HEADER_BYTES_MAX:
        raise InvalidArgument(
            f"{path} is no safetensors file, or is damaged: its first bytes give a header of "
            f"{length} bytes, and {HEADER_BYTES_MAX} are allowed"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise InvalidArgument(
            f"{path} is truncated, or no safetensors file: its header ends at byte "
            f"{LENGTH_BYTES + length}, and the file at {file_bytes}"
        )
    return length


def parse_header(text: bytes, file_bytes: int, path: object) -> Header:
    """The header `text` of a file of `file_bytes`; errors mention `path`.

    Raises:
        InvalidArgument: it is not JSON of this form; a name is there twice; a dtype is unknown; a
            shape does not have the bytes of its tensor; tensors overlap, or leave a hole; the file
            is shorter or longer than its tensors.
    """
    entries = _json_object(text, path)
    _refuse_metadata(entries.pop(_METADATA, {}), path)
    tensors = sorted(
        (_stored_tensor(name, fields, path) for name, fields in entries.items()),
        key=lambda each: (each.begin, each.end),
    )
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            what = "overlaps the one before it" if tensor.begin < end else "leaves a hole before it"
            raise _damaged(path, f"tensor {tensor.name!r} {what}: {tensor.begin}, not {end}")
        end = tensor.end
    header = Header(tuple(tensors), LENGTH_BYTES + len(text))
    if header.file_bytes != file_bytes:
        what = "is truncated" if header.file_bytes > file_bytes else "goes on after its tensors"
        raise InvalidArgument(
            f"{path} {what}: its header says {header.file_bytes} bytes, and it has {file_bytes}"
        )
    return header


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, torch.Size]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The bytes before the first tensor, with the header's length, as the library of that name
    writes them, and the places that they give.

    Raises:
        InvalidArgument: a dtype or name that such files do not have; metadata that is no strings;
            more than a header may hold.
    """
    tensors = list(tensors)
    _refuse_unwritable([name for name, *_ in tensors], metadata)
    ordered = sorted(tensors, key=lambda each: (_place_of(each[1], each[0]), each[0]))
    fields: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    stored, end = [], 0
    for name, dtype, shape in ordered:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        stored.append(StoredTensor(name, dtype, shape, begin, end))
        fields[name] = {"dtype": _CODE_OF[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidArgument(
            "a safetensors file cannot name so many tensors; save a folder, with max_shard_bytes: "
            f"the header would have {format_size(len(text))}"
        )
    prefix = len(text).to_bytes(LENGTH_BYTES, "little")
    return prefix + text, Header(tuple(stored), LENGTH_BYTES + len(text))


def _refuse_unwritable(names: Iterable[str], metadata: object) -> None:
    """Before a header is made that nobody could read, this module included."""
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(
            f"metadata is a dict of strings, and no {type(metadata).__name__}: {metadata!r}"
        )
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(
                "metadata has strings as keys and values; write others as strings, such as with "
                f"json.dumps(): {key!r}: {value!r}"
            )
    for name in names:
        if name == _METADATA:
            raise InvalidArgument(
                f"no tensor in a safetensors file can have the name {name!r}, which is that of the "
                "metadata; rename it"
            )
    for text in (*names, *metadata.keys(), *metadata.values()):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{text!r} cannot be written to a safetensors file: it is no Unicode text, which "
                "has no lone surrogates"
            ) from error


def _place_of(dtype: torch.dtype, name: str) -> int:
    place = _PLACE_OF.get(dtype)
    if place is None:
        raise InvalidArgument(f"memd writes no {dtype} to safetensors files: {name!r}")
    return place


def _json_object(text: bytes, path: object) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise _damaged(path, f"it names {twice!r} twice")
        return found

    try:
        entries = json.loads(text.decode(), object_pairs_hook=unique)
    except InvalidArgument:
        raise
    # Nested too deeply, or a number of more digits than Python converts: a ValueError.
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _damaged(path, f"it is a JSON {type(entries).__name__}, not an object")
    return entries


def _refuse_metadata(metadata: object, path: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, f"{_METADATA} is no object of strings")


def _stored_tensor(name: str, fields: object, path: object) -> StoredTensor:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise _damaged(path, f"tensor {name!r} has other fields than {sorted(_FIELDS)}")
    dtype = _CODES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise _damaged(
            path, f"tensor {name!r} has a dtype that memd does not read: {fields['dtype']!r}"
        )
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name!r} has a shape or offsets that are no counts")
    if len(shape) > _RANK_MAX:
        raise _damaged(path, f"tensor {name!r} has {len(shape)} dimensions")
    begin, end = offsets
    size_bytes = math.prod(shape) * dtype.itemsize
    if begin > end or end - begin != size_bytes:
        raise _damaged(
            path,
            f"tensor {name!r} lies at [{begin}, {end}], and {_CODE_OF[dtype]} {shape} takes "
            f"{size_bytes} bytes",
        )
    return StoredTensor(name, dtype, torch.Size(shape), begin, end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each <= _COUNT_MAX for each in value
    )


def _damaged(path: object, what: str) -> InvalidArgument:
    return InvalidArgument(f"the header of {path} is damaged or hostile: {what}")
