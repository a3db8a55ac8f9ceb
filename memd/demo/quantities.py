"""Sizes and counts as people write them, both ways."""

import re
from typing import Any

import click

_BYTES_OF_UNIT = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_COUNT_OF_SUFFIX = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_bytes(text: str) -> int:
    """Bytes of "512MiB" or "1.5 GiB". A number without a unit is refused: ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _BYTES_OF_UNIT:
        units = ", ".join(_BYTES_OF_UNIT)
        raise ValueError(f"{text!r} is not a size: write a number with its unit ({units})")
    size_bytes = int(float(match[1]) * _BYTES_OF_UNIT[match[2]])
    if size_bytes == 0:
        raise ValueError(f"{text!r} is not a size: it must be at least 1B")
    return size_bytes


def parse_count(text: str) -> int:
    """Number of parameters of "30M", "1.5B" or "124000000"; anything else is a ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMB]?)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of parameters: write 5M, 1.5B or 124000000")
    return int(float(match[1]) * _COUNT_OF_SUFFIX.get(match[2], 1))


def format_bytes(size_bytes: float) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _BYTES_OF_UNIT[unit]:
            return f"{size_bytes / _BYTES_OF_UNIT[unit]:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(count: float) -> str:
    for suffix in ("B", "M", "K"):
        if count >= _COUNT_OF_SUFFIX[suffix]:
            return f"{count / _COUNT_OF_SUFFIX[suffix]:.1f}{suffix}"
    return f"{count:.0f}"


class SizeParameter(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class CountParameter(click.ParamType[int]):
    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_count(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FractionParameter(click.ParamType[float]):
    """ "1/4" or "0.25", above 0 and at most 1."""

    name = "fraction"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?))?\s*", value)
        denominator = float(match[2] or 1) if match else 0.0
        if match is None or denominator == 0 or not 0 < float(match[1]) / denominator <= 1:
            self.fail(f"{value!r} is not a fraction: write 1/4 or 0.25, at most 1", param, ctx)
        return float(match[1]) / denominator
