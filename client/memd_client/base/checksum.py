"""CRC-32 of bytes that are not there all at once, as zip files have it."""

from __future__ import annotations

import zlib
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bits in reverse, as zlib has them
_ONE = 1 << 31
_ALL = 0xFFFFFFFF


class RunChecksum:
    """CRC-32 of bytes that come in runs, in any order and each once. All others are zero."""

    def __init__(self) -> None:
        # By their first byte; runs that follow each other are one.
        self._runs: dict[int, tuple[int, int]] = {}  # length and checksum
        self._last = 0

    def add(self, begin: int, data: bytes | memoryview) -> None:
        """The bytes from `begin` on."""
        self.add_run(begin, memoryview(data).nbytes, zlib.crc32(data))

    def add_run(self, begin: int, length: int, checksum: int) -> None:
        """So many bytes from `begin` on, which have this checksum."""
        before, found = self._runs.get(self._last, (0, 0))
        if begin == self._last + before:
            self._runs[self._last] = before + length, _join(found, checksum, length)
        else:
            self._runs[begin] = length, checksum
            self._last = begin

    def value(self, begin: int, end: int) -> int:
        """That of the bytes from `begin` to `end`. No run lies on both sides of one of these."""
        at, checksum = begin, 0
        for first in sorted(first for first in self._runs if begin <= first < end):
            length, found = self._runs[first]
            if first < at:
                raise ValueError(f"runs overlap: one ends at {at}, the next begins at {first}")
            checksum = _join(checksum, _zeros(first - at), first - at)
            checksum = _join(checksum, found, length)
            at = first + length
        if at > end:
            raise ValueError(f"a run ends at {at}, behind {end}")
        return _join(checksum, _zeros(end - at), end - at)


def _join(first: int, second: int, second_bytes: int) -> int:
    """The checksum of bytes one after the other, by theirs."""
    return _product(_shift(second_bytes), first) ^ second


def _zeros(count: int) -> int:
    """The checksum of `count` zeros."""
    return _product(_shift(count), _ALL) ^ _ALL


@lru_cache(maxsize=1024)
def _shift(count: int) -> int:
    """x to the power of the bits of `count` bytes."""
    power, square = _ONE, _ONE >> 8  # x to the power of 8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(one: int, other: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    result, bit = 0, _ONE
    while one:
        if one & bit:
            result ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
    return result
