"""Plain data, such as tracked objects return from `state_dict()`, as bytes and back without loss.

Reading executes nothing: no pickle, no import, no class of the user's. Writing refuses what is not
in the table below, and gives the path to it.

One byte names the type that follows. Counts of bytes and items are 8 bytes, little-endian.

    N T F           None, True, False
    i               int: count, two's complement
    d c             float, complex: IEEE bits
    s b a           str (UTF-8), bytes, bytearray: count, bytes
    l t z S Z       list, tuple, torch.Size, set, frozenset: count, items
    m o C           dict, OrderedDict, Counter: count, keys and values in turn
    q               deque: maxlen (int or None), count, items
    y               torch.dtype: its name, as str
    X               torch.Tensor: dtype's name, shape as tuple, count, bytes in row-major order
    A g             numpy.ndarray and numpy scalar: dtype's code, shape as tuple, count, bytes
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memd_client.errors import IntegrityError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DEPTH_MAX = 64
_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_NUMPY_DTYPE = re.compile(r"\|b1|[|<][iu][1248]|<f[248]|<c(8|16)")
_NUMEL_MAX = 1 << 48  # even if an extent is 0: numpy and torch multiply the others


def encode(value: Any, *, what: str) -> bytearray:
    """The bytes of `value`. The path in an error begins with `what`.

    Raises:
        InvalidArgument: something inside is not plain data.
    """
    out = bytearray()
    _Encoder(out, what).write(value, "", 0)
    return out


def decode(data: memoryview | bytes | bytearray) -> Any:
    """The value that `encode` turned into `data`. Tensors and arrays have their own memory.

    Raises:
        IntegrityError: `encode` did not make `data`.
    """
    decoder = _Decoder(memoryview(data).cast("B"))
    value = decoder.read(0)
    decoder.end()
    return value


class _Encoder:
    def __init__(self, out: bytearray, what: str) -> None:
        self._out = out
        self._what = what

    def write(self, value: Any, path: str, depth: int) -> None:
        if depth > _DEPTH_MAX:
            self._refuse(path, f"is nested more than {_DEPTH_MAX} deep; does it contain itself?")
        kind = type(value)
        if value is None:
            self._out += b"N"
        elif kind is bool:
            self._out += b"T" if value else b"F"
        elif kind is int:
            self._bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind is float:
            self._out += b"d" + _FLOAT.pack(value)
        elif kind is complex:
            self._out += b"c" + _COMPLEX.pack(value.real, value.imag)
        elif kind is str:
            self._bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind in _BYTES:
            self._bytes(_BYTES[kind], value)
        elif kind in _SEQUENCES:
            self._out += _SEQUENCES[kind]
            self._items(value, path, depth)
        elif kind in _MAPPINGS:
            self._mapping(_MAPPINGS[kind], value, path, depth)
        elif kind is deque:
            self._out += b"q"
            self.write(value.maxlen, path, depth + 1)
            self._items(value, path, depth)
        elif kind is torch.dtype:
            self._out += b"y"
            self.write(self._dtype_name(value, path), path, depth + 1)
        elif kind is torch.Tensor:
            self._tensor(value, path, depth)
        elif not self._numpy(value, path, depth):
            self._refuse(
                path,
                f"is a {kind.__module__}.{kind.__qualname__}; memd stores plain data and tensors: "
                "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, deque, "
                "torch.Tensor and numpy arrays",
            )

    def _bytes(self, tag: bytes, data: bytes | bytearray) -> None:
        self._out += tag + _COUNT.pack(len(data))
        self._out += data

    def _items(self, items: Any, path: str, depth: int) -> None:
        self._out += _COUNT.pack(len(items))
        for index, item in enumerate(items):
            self.write(item, f"{path}[{index}]", depth + 1)

    def _mapping(self, tag: bytes, items: Any, path: str, depth: int) -> None:
        self._out += tag + _COUNT.pack(len(items))
        for key, item in items.items():
            place = f"{path}[{key!r:.60}]"
            self.write(key, f"{place} (the key)", depth + 1)
            self.write(item, place, depth + 1)

    def _dtype_name(self, dtype: torch.dtype, path: str) -> str:
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            self._refuse(path, f"is of {dtype}, which memd does not store")
        return name

    def _tensor(self, tensor: torch.Tensor, path: str, depth: int) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            self._refuse(
                path,
                f"is a tensor of {tensor.layout} on {tensor.device}; return a dense one on the CPU",
            )
        self._out += b"X"
        self.write(self._dtype_name(tensor.dtype, path), path, depth + 1)
        self.write(tuple(tensor.shape), path, depth + 1)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8)
        if tensor.dtype is torch.bool:  # True may be any byte but 0; the decoder accepts 1
            data = data.ne(0).view(torch.uint8)
        self._bytes(b"", data.numpy().tobytes())

    def _numpy(self, value: Any, path: str, depth: int) -> bool:
        """Writes a numpy value; False if it is none. Does not import numpy: an array would have."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        if type(value) is not numpy.ndarray and not (
            isinstance(value, numpy.generic) and type(value) is value.dtype.type
        ):
            return False
        dtype = value.dtype.newbyteorder("<")
        if not _NUMPY_DTYPE.fullmatch(dtype.str):
            self._refuse(path, f"is of numpy's dtype {value.dtype}, which memd does not store")
        self._out += b"A" if type(value) is numpy.ndarray else b"g"
        self.write(dtype.str, path, depth + 1)
        self.write(tuple(value.shape), path, depth + 1)
        self._bytes(b"", value.astype(dtype).tobytes())
        return True

    def _refuse(self, path: str, why: str) -> NoReturn:
        raise InvalidArgument(f"{self._what}{path} {why}")


_BYTES: dict[type, bytes] = {bytes: b"b", bytearray: b"a"}
_SEQUENCES: dict[type, bytes] = {
    list: b"l",
    tuple: b"t",
    torch.Size: b"z",
    set: b"S",
    frozenset: b"Z",
}
_MAPPINGS: dict[type, bytes] = {dict: b"m", OrderedDict: b"o", Counter: b"C"}


class _Decoder:
    """Never reads past the end, and allocates no more than the data can fill."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def end(self) -> None:
        if self._at != len(self._data):
            raise self._broken("something follows its end")

    def read(self, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise self._broken("it is nested too deep")
        tag = bytes(self._take(1))
        reader = _READERS.get(tag)
        if reader is None:
            raise self._broken(f"{tag!r} means nothing")
        return reader(self, depth + 1)

    def take_count(self, item_bytes: int) -> int:
        """A count of items, which take at least `item_bytes` each."""
        (count,) = _COUNT.unpack(self._take(_COUNT.size))
        if count * item_bytes > len(self._data) - self._at:
            raise self._broken(f"{count} items are more than there are")
        return int(count)

    def take_bytes(self) -> memoryview:
        return self._take(self.take_count(1))

    def take_items(self, depth: int) -> Iterable[Any]:
        return [self.read(depth) for _ in range(self.take_count(1))]

    def take_int(self) -> int:
        return int.from_bytes(self.take_bytes(), "little", signed=True)

    def take_float(self) -> float:
        return float(_FLOAT.unpack(self._take(_FLOAT.size))[0])

    def take_complex(self) -> complex:
        return complex(*_COMPLEX.unpack(self._take(_COMPLEX.size)))

    def take_text(self) -> str:
        try:
            return str(self.take_bytes(), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._broken("a text is not UTF-8") from error

    def take_unordered(self, kind: Callable[[Iterable[Any]], Any], depth: int) -> Any:
        items = self.take_items(depth)
        return kind(self._hashable(item) for item in items)

    def take_mapping(self, kind: Callable[[], Any], depth: int) -> Any:
        made = kind()
        for _ in range(self.take_count(2)):
            key = self._hashable(self.read(depth))
            if key in made:
                raise self._broken("a key is there twice")
            made[key] = self.read(depth)
        return made

    def take_deque(self, depth: int) -> deque[Any]:
        maxlen = self.read(depth)
        if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen <= sys.maxsize):
            raise self._broken("a deque has no such maxlen")
        return deque(self.take_items(depth), maxlen)

    def take_size(self, depth: int) -> torch.Size:
        items = self.take_items(depth)
        if not all(type(item) is int and -(1 << 63) <= item < 1 << 63 for item in items):
            raise self._broken("a torch.Size holds something else than numbers")
        return torch.Size(items)

    def take_dtype(self, depth: int) -> torch.dtype:
        name = self.read(depth)
        if type(name) is not str or name not in _DTYPES:
            raise self._broken("no dtype has this name")
        return _DTYPES[name]

    def take_tensor(self, depth: int) -> torch.Tensor:
        dtype = self.take_dtype(depth)
        shape = self._shape(depth)
        data = bytearray(self._elements(shape, dtype.itemsize))
        if dtype is torch.bool and any(byte > 1 for byte in set(data)):
            raise self._broken("a bool is neither 0 nor 1")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    def take_array(self, depth: int) -> Any:
        import numpy as np  # only if an array was stored

        code = self.read(depth)
        if type(code) is not str or not _NUMPY_DTYPE.fullmatch(code):
            raise self._broken("no numpy dtype has this code")
        dtype = np.dtype(code)
        shape = self._shape(depth)
        return np.frombuffer(bytearray(self._elements(shape, dtype.itemsize)), dtype).reshape(shape)

    def take_scalar(self, depth: int) -> Any:
        array = self.take_array(depth)
        if array.shape != ():
            raise self._broken("a scalar has a shape")
        return array[()]

    def _shape(self, depth: int) -> tuple[int, ...]:
        shape = self.read(depth)
        if type(shape) is not tuple or len(shape) > _DEPTH_MAX:
            raise self._broken("a shape is no tuple, or too long")
        if not all(type(extent) is int and 0 <= extent < _NUMEL_MAX for extent in shape):
            raise self._broken("a shape holds something else than sizes")
        if math.prod(max(extent, 1) for extent in shape) >= _NUMEL_MAX:
            raise self._broken("a shape is too large")
        return shape

    def _elements(self, shape: tuple[int, ...], item_bytes: int) -> memoryview:
        data = self.take_bytes()
        if len(data) != math.prod(shape) * item_bytes:
            raise self._broken("a tensor has more or fewer bytes than its shape says")
        return data

    def _hashable(self, item: Any) -> Any:
        try:
            hash(item)
        except TypeError as error:
            raise self._broken(f"a {type(item).__name__} is a key") from error
        return item

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise self._broken("it ends too early")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _broken(self, why: str) -> IntegrityError:
        return IntegrityError(f"not what memd stored, at byte {self._at}: {why}")


_READERS: dict[bytes, Callable[[_Decoder, int], Any]] = {
    b"N": lambda _, __: None,
    b"T": lambda _, __: True,
    b"F": lambda _, __: False,
    b"i": lambda decoder, _: decoder.take_int(),
    b"d": lambda decoder, _: decoder.take_float(),
    b"c": lambda decoder, _: decoder.take_complex(),
    b"s": lambda decoder, _: decoder.take_text(),
    b"b": lambda decoder, _: bytes(decoder.take_bytes()),
    b"a": lambda decoder, _: bytearray(decoder.take_bytes()),
    b"l": lambda decoder, depth: list(decoder.take_items(depth)),
    b"t": lambda decoder, depth: tuple(decoder.take_items(depth)),
    b"z": _Decoder.take_size,
    b"S": lambda decoder, depth: decoder.take_unordered(set, depth),
    b"Z": lambda decoder, depth: decoder.take_unordered(frozenset, depth),
    b"m": lambda decoder, depth: decoder.take_mapping(dict, depth),
    b"o": lambda decoder, depth: decoder.take_mapping(OrderedDict, depth),
    b"C": lambda decoder, depth: decoder.take_mapping(Counter, depth),
    b"q": _Decoder.take_deque,
    b"y": _Decoder.take_dtype,
    b"X": _Decoder.take_tensor,
    b"A": _Decoder.take_array,
    b"g": _Decoder.take_scalar,
}
