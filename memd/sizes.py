"""Byte counts as people write them."""

from __future__ import annotations

import re

UNITS = {
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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of "64GiB", 64·2³⁰, or "1.5 TB", 1.5·10¹². ValueError says what to write instead."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in UNITS:
        wrong = "has no unit" if match is not None and not match[2] else "is not a size"
        units = ", ".join(UNITS)
        raise ValueError(f"{text!r} {wrong}; write a number and one of {units}, such as '64GiB'")
    size_bytes = int(float(match[1]) * UNITS[match[2]])
    if size_bytes == 0:
        raise ValueError(f"{text!r} must be more than nothing")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """In the largest unit of which there is at least one: "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= UNITS[unit]:
            count = size_bytes / UNITS[unit]
            return f"{count:.0f} {unit}" if count.is_integer() else f"{count:.1f} {unit}"
    return f"{size_bytes} B"


def exact_size(size_bytes: int) -> str:
    """As a setting: what `parse_size` takes back without loss, in the unit with the fewest."""
    unit = max((unit for unit in UNITS if size_bytes % UNITS[unit] == 0), key=UNITS.__getitem__)
    return f"{size_bytes // UNITS[unit]}{unit}"
