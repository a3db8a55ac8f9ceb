"""Plain data, there and back: exactly, and nothing else."""

from __future__ import annotations

import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import memd_client
from memd_client.base.plain import decode, encode

Point = namedtuple("Point", "x y")  # what is refused


class Colour(enum.IntEnum):
    RED = 1


def there_and_back(value: Any) -> Any:
    return decode(encode(value, what="x"))


def same(one: Any, other: Any) -> bool:
    """Types, order and bits too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        one, other = one.resolve_conj(), other.resolve_conj()
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy())
            == bytes(other.contiguous().reshape(-1).view(torch.uint8).numpy())
        )
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bool(one.tobytes() == other.tobytes())
        )
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(left, right) for left, right in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


NAN_WITH_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_DEAD_BEEF))[0]
VALUES: dict[str, Any] = {
    "nothing": None,
    "truth": [True, False],
    "integers": [0, 1, -1, 127, 128, -128, -129, 1 << 63, -(1 << 63), 1 << 200, -(1 << 200)],
    "floats": [0.0, -0.0, 5e-324, math.inf, -math.inf, math.nan, NAN_WITH_PAYLOAD, 0.1],
    "complex": [1 - 2j, complex(math.nan, -0.0)],
    "texts": ["", "ä𝄞", "\ud800", "\0"],
    "bytes": [b"", b"\0\xff", bytearray(b"x")],
    "sequences": [[], (), ([],), torch.Size([2, 0])],
    "sets": [set(), {1, "a"}, frozenset((1, (2, 3)))],
    "mappings": [
        {},
        {1: 2, None: 3, (1, "b"): [4], b"k": 5, 1.5: 6},
        OrderedDict(b=1, a=2),
        Counter("aab"),
    ],
    "deques": [deque(), deque([1, 2], maxlen=3)],
    "dtypes": [torch.bfloat16, torch.bool],
    "tensors": [
        torch.tensor(1.5),
        torch.arange(6).reshape(2, 3).T,
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.tensor([math.nan, -0.0], dtype=torch.float16),
    ],
    "arrays": [
        np.arange(6).reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 2), np.uint8),
        np.array([1 + 2j], np.complex64),
    ],
    "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.uint8(7)],
    "random states": [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()],
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_plain_comes_back_exactly(name: str) -> None:
    value = VALUES[name]
    assert same(there_and_back(value), value)


def test_a_bool_of_any_byte_is_false_or_true() -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    back = there_and_back({"mask": odd, "whole": odd.reshape(2, 2), "one": odd[3]})
    assert back["mask"].view(torch.uint8).tolist() == [0, 1, 1, 1]
    assert back["whole"].tolist() == [[False, True], [True, True]]
    assert back["one"].item() is True


def test_what_comes_back_has_memory_of_its_own() -> None:
    data = encode({"t": torch.zeros(3), "a": np.zeros(3)}, what="x")
    back = decode(data)
    data[:] = b"\xff" * len(data)
    back["t"] += 1
    back["a"] += 1
    assert back["t"].tolist() == back["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (print, "builtin_function"),
        (object(), "object"),
        (Point(1, 2), "Point"),
        (Colour.RED, "Colour"),
        (defaultdict(list), "defaultdict"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(1, device="meta"), "meta"),
        (np.array([None]), "dtype object"),
        (np.array(["2020"], "datetime64[Y]"), "dtype datetime64"),
        (range(3), "range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_plain_is_refused_with_the_path(value: Any, what: str) -> None:
    with pytest.raises(
        memd_client.InvalidArgument, match=rf"the state\['a'\]\[1\]\[2\] is .*{what}"
    ):
        encode({"a": [0, {2: value}]}, what="the state")


def test_keys_are_plain_too() -> None:
    with pytest.raises(memd_client.InvalidArgument, match=r"\(the key\) is a .*Colour"):
        encode({Colour.RED: 1}, what="x")


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(memd_client.InvalidArgument, match="contain itself"):
        encode(value, what="x")


def refused_or_plain(data: bytes) -> bool:
    """Whether it was refused; whatever else happens is an error."""
    try:
        encode(decode(data), what="x")
    except memd_client.IntegrityError:
        return True
    return False


def test_random_bytes_are_refused() -> None:
    generator = random.Random(1)
    tags = b"NTFidcsbaltzSZmoCqyXAg"
    for _ in range(4000):
        data = bytearray(generator.randbytes(generator.randrange(60)))
        for index in range(len(data)):
            if generator.random() < 0.5:
                data[index] = generator.choice(tags + b"\0\0\0\0\1\2")
        refused_or_plain(bytes(data))
    assert refused_or_plain(b"")
    assert refused_or_plain(b"NN")


@pytest.mark.parametrize("name", VALUES)
def test_mutations_are_refused_or_plain(name: str) -> None:
    generator = random.Random(name)
    whole = bytes(encode(VALUES[name], what="x"))[:4000]
    assert refused_or_plain(whole[:-1])
    assert refused_or_plain(whole + b"N")
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.choice(
                [0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)]
            )
        refused += refused_or_plain(bytes(data))
    assert refused


def test_lies_about_sizes_allocate_nothing() -> None:
    huge = struct.pack("<Q", 1 << 60)
    name = b"s" + struct.pack("<Q", 7) + b"float32"
    extent = b"i" + struct.pack("<Q", 8) + struct.pack("<q", 1 << 40)
    shape = b"t" + struct.pack("<Q", 1) + extent
    for data in (
        b"l" + huge,
        b"b" + huge,
        b"m" + huge + b"NN",
        b"X" + name + shape + huge,
        b"X" + name + b"t" + struct.pack("<Q", 2) + 2 * extent + struct.pack("<Q", 0),
        b"X" + name + shape + struct.pack("<Q", 4) + b"1234",
        b"q" + extent.replace(b"\0\1", b"\0\xff") + struct.pack("<Q", 0) + b"x",
        b"l" + struct.pack("<Q", 1) + (b"l" + struct.pack("<Q", 1)) * 100 + b"N",
    ):
        assert refused_or_plain(data)
