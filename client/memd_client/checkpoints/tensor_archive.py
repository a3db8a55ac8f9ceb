"""The archive that `torch.save` makes of one tensor, whose bytes are written later, in any order.

It is a zip file of records that are not compressed. The bytes of the tensor are its last record, so
their checksum comes after them: in the record's descriptor, and in the directory at the end.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd_client.checkpoints.torch_archive import ALIGNMENT, tensor_pickle

if TYPE_CHECKING:
    import torch

_FOLDER = "archive/"  # torch's name where it knows none
_UTF8_AND_DESCRIPTOR = 0x0808
_LIMIT = 0xFFFFFFFF
_LARGE = 0xFFFFFFFF  # a field of four bytes says so that eight follow elsewhere
_LARGE_ID = 1
_PADDING_ID = 0x4246  # torch's: "FB"
_EXTRA_HEAD = struct.Struct("<HH")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_LARGE_DESCRIPTOR = struct.Struct("<4sIQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LARGE_END = struct.Struct("<4sQHHIIQQQQ")
_LARGE_END_PLACE = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_DATE = 0x21  # the first that a zip file can have
_VERSION, _LARGE_VERSION = 20, 45


@dataclass(frozen=True, slots=True)
class _Record:
    """One that stands before the tensor, or the tensor itself."""

    name: bytes
    begin: int  # of its local header
    size_bytes: int
    checksum: int

    @property
    def is_large(self) -> bool:
        return self.size_bytes >= _LIMIT

    def entry(self) -> bytes:
        """In the directory."""
        size, extra = self.size_bytes, b""
        if self.is_large:
            extra = _EXTRA_HEAD.pack(_LARGE_ID, 16) + struct.pack("<QQ", size, size)
            size = _LARGE
        version = _LARGE_VERSION if self.is_large else _VERSION
        return (
            _ENTRY.pack(
                *(b"PK\x01\x02", version, version, _UTF8_AND_DESCRIPTOR, 0, 0, _DATE),
                *(self.checksum, size, size, len(self.name), len(extra), 0, 0, 0, 0, self.begin),
            )
            + self.name
            + extra
        )

    def descriptor(self) -> bytes:
        """Behind its bytes."""
        form = _LARGE_DESCRIPTOR if self.is_large else _DESCRIPTOR
        return form.pack(b"PK\x07\x08", self.checksum, self.size_bytes, self.size_bytes)


class TensorArchive:
    """The bytes before and behind those of a dense tensor in row-major order."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self._data_bytes = shape.numel() * dtype.itemsize
        self._records: list[_Record] = []
        self._prefix = b""
        for name, data in (
            ("data.pkl", tensor_pickle(dtype, shape)),
            (".format_version", b"1"),
            (".storage_alignment", str(ALIGNMENT).encode()),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            self._append(name, data)
        self._data_at = len(self._prefix)
        self._prefix += self._local_header("data/0", self._data_bytes)

    @property
    def prefix(self) -> bytes:
        """The bytes before the tensor."""
        return self._prefix

    @property
    def data_bytes(self) -> int:
        return self._data_bytes

    @property
    def size_bytes(self) -> int:
        """The whole archive's."""
        return len(self._prefix) + self._data_bytes + len(self.suffix(0))

    def suffix(self, checksum: int) -> bytes:
        """The bytes behind the tensor, whose CRC-32 is given."""
        tensor = _Record(_name("data/0"), self._data_at, self._data_bytes, checksum)
        descriptor = tensor.descriptor()
        directory = b"".join(record.entry() for record in (*self._records, tensor))
        begin = len(self._prefix) + self._data_bytes + len(descriptor)
        return descriptor + directory + self._end(begin, len(directory))

    def _end(self, begin: int, size_bytes: int) -> bytes:
        """Behind the directory, which is at `begin`."""
        count, large = len(self._records) + 1, b""
        if begin >= _LIMIT:
            large = _LARGE_END.pack(
                *(b"PK\x06\x06", _LARGE_END.size - 12, _LARGE_VERSION, _LARGE_VERSION, 0, 0),
                *(count, count, size_bytes, begin),
            ) + _LARGE_END_PLACE.pack(b"PK\x06\x07", 0, begin + size_bytes, 1)
            begin = _LARGE
        return large + _END.pack(b"PK\x05\x06", 0, 0, count, count, size_bytes, begin, 0)

    def _append(self, name: str, data: bytes) -> None:
        record = _Record(_name(name), len(self._prefix), len(data), zlib.crc32(data))
        self._records.append(record)
        self._prefix += self._local_header(name, len(data)) + data + record.descriptor()

    def _local_header(self, name: str, size_bytes: int) -> bytes:
        """Its record begins at a multiple of `ALIGNMENT`, as torch's do."""
        encoded, extra, size, version = _name(name), b"", 0, _VERSION
        if size_bytes >= _LIMIT:
            extra = _EXTRA_HEAD.pack(_LARGE_ID, 16) + bytes(16)  # the descriptor has them
            size, version = _LARGE, _LARGE_VERSION
        end = len(self._prefix) + _LOCAL.size + len(encoded) + len(extra) + _EXTRA_HEAD.size
        padding = -end % ALIGNMENT
        extra += _EXTRA_HEAD.pack(_PADDING_ID, padding) + b"Z" * padding
        return (
            _LOCAL.pack(
                *(b"PK\x03\x04", version, _UTF8_AND_DESCRIPTOR, 0, 0, _DATE, 0, size, size),
                *(len(encoded), len(extra)),
            )
            + encoded
            + extra
        )


def _name(name: str) -> bytes:
    return (_FOLDER + name).encode()
