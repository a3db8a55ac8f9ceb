"""Counts and fractions as people write them, and all of the demo's quantities as arguments."""

import re
from typing import TYPE_CHECKING, Any

import click

from memd.sizes import parse_size

if TYPE_CHECKING:
    IntegerParameter = click.ParamType[int]
    NumberParameter = click.ParamType[float]
else:  # in click 8.1 the class has no parameter
    IntegerParameter = NumberParameter = click.ParamType

_COUNT_OF_SUFFIX = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_count(text: str) -> int:
    """Number of parameters of "30M", "1.5B" or "124000000"; anything else is a ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMB]?)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of parameters: write 5M, 1.5B or 124000000")
    return int(float(match[1]) * _COUNT_OF_SUFFIX.get(match[2], 1))


def format_count(count: float) -> str:
    for suffix in ("B", "M", "K"):
        if count >= _COUNT_OF_SUFFIX[suffix]:
            return f"{count / _COUNT_OF_SUFFIX[suffix]:.1f}{suffix}"
    return f"{count:.0f}"


class SizeParameter(IntegerParameter):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class CountParameter(IntegerParameter):
    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_count(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FractionParameter(NumberParameter):
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
