"""Byte counts as people write them."""

from __future__ import annotations

import re

from memd_client.errors import InvalidArgument

_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
TILE_ELEMENTS = 256 << 10
# An update needs two tiles of 12 bytes an element: one is computed while the other is moved.
UPDATE_BYTES = 2 * TILE_ELEMENTS * 12
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(size: int | str, *, name: str) -> int:
    """`size` in bytes: an int, or a string with a unit: B, KiB to TiB of 1024, kB to TB of 1000.
    Errors mention `name`.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidArgument(f"{name} is bytes as an int, or a string such as '1GiB': {size!r}")
    if isinstance(size, int):
        size_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in _UNITS:
            raise InvalidArgument(
                f"{name} needs a number and one of the units {', '.join(_UNITS)}, such as '1GiB': "
                f"{size!r}"
            )
        size_bytes = int(float(match[1]) * _UNITS[match[2]])
    if size_bytes <= 0:
        raise InvalidArgument(f"{name} must be greater than 0: {size!r}")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """`size_bytes` for messages, in the largest unit that gives at least 1, with one decimal if it
    is not whole.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            count = size_bytes / _UNITS[unit]
            return f"{count:.0f} {unit}" if count.is_integer() else f"{count:.1f} {unit}"
    return f"{size_bytes} B"
