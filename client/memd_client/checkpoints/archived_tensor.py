"""Finds the bytes of a tensor in an archive of `torch.save`.

`torch.load` reads them into memory of its own. A load into memd reads them where they go.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    import io

# A record's local header: the lengths of its name and of what follows that come last.
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1
_FIRST = "data/0"


class PackedArchiveError(Exception):
    """Compressed records may be larger than any memory. torch writes none."""


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A dense tensor in row-major order."""

    form: torch.Tensor  # without bytes
    # Its storage, in the archive.
    begin: int

    def run_begin(self, part: torch.Tensor) -> int | None:
        """The first byte of `part`, a view of `form`, in the archive; None: its elements do not lie
        one after the other."""
        if not part.is_contiguous():
            return None
        return self.begin + int(part.storage_offset()) * part.dtype.itemsize


def find_tensor(archive: io.RawIOBase | io.BytesIO, size_bytes: int) -> ArchivedTensor | None:
    """Looks at an archive of `size_bytes`. None: it has something else than one dense tensor in
    row-major order, or another order of bytes, so that `torch.load` has to read it. Nothing that it
    names is called, and no memory is taken for what it claims to have.

    Raises:
        PackedArchiveError: a record is compressed.
        Exception: whatever zipfile and torch raise if it is damaged.
    """
    records = refuse_packed(archive)
    data = [each for each in records if _name(each).startswith("data/")]
    if len(data) != 1 or data[0].flag_bits & _ENCRYPTED or not _is_native(archive, records):
        return None
    (record,) = data
    if _name(record) != _FIRST:
        return None  # torch expects the first storage under its own name
    begin = _data_begin(archive, record)
    if begin is None or begin + record.file_size > size_bytes:
        return None
    archive.seek(0)
    form = torch.load(cast("IO[bytes]", archive), map_location="meta", weights_only=True)
    if type(form) not in (torch.Tensor, nn.Parameter) or not form.is_meta:
        return None
    form = form.detach()
    if form.layout is not torch.strided or form.is_neg() or form.is_conj():
        return None
    end_bytes = (form.storage_offset() + form.numel()) * form.dtype.itemsize
    is_whole = form.untyped_storage().nbytes() == record.file_size and end_bytes <= record.file_size
    return ArchivedTensor(form, begin) if is_whole and form.is_contiguous() else None


def refuse_packed(archive: io.RawIOBase | io.BytesIO) -> list[zipfile.ZipInfo]:
    """All records of an archive.

    Raises:
        PackedArchiveError: one is compressed.
        Exception: whatever zipfile raises if it is damaged.
    """
    with zipfile.ZipFile(cast("IO[bytes]", archive)) as opened:
        records = opened.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in records):
        raise PackedArchiveError
    return records


def _name(record: zipfile.ZipInfo) -> str:
    """Without the folder that all records of an archive lie in."""
    return record.filename.partition("/")[2]


def _is_native(archive: io.RawIOBase | io.BytesIO, records: list[zipfile.ZipInfo]) -> bool:
    """Whether the bytes of elements are in the order of this machine, as of most archives."""
    wanted = sys.byteorder.encode()
    for record in records:
        if _name(record) != "byteorder":
            continue
        begin = _data_begin(archive, record)
        if begin is None or record.file_size != len(wanted):
            return False
        if _read(archive, begin, record.file_size) != wanted:
            return False
    return True


def _data_begin(archive: io.RawIOBase | io.BytesIO, record: zipfile.ZipInfo) -> int | None:
    """Behind its local header; None if there is none."""
    if record.header_offset < 0:
        return None
    head = _read(archive, record.header_offset, _LOCAL.size)
    if len(head) < _LOCAL.size:
        return None
    signature, name_bytes, extra_bytes = _LOCAL.unpack(head)
    if signature != _LOCAL_SIGNATURE:
        return None
    begin: int = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
    return begin


def _read(archive: io.RawIOBase | io.BytesIO, begin: int, count: int) -> bytes:
    archive.seek(begin)
    return archive.read(count) or b""
