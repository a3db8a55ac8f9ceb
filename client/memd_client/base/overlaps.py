"""Tensors over the same memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def refuse_overlaps(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """An update of one of them changes the other in torch; memd has bytes for each.

    Args:
        named: dense parameters on the CPU, each once.

    Raises:
        InvalidArgument: two of them share memory.
    """
    spans = sorted(
        (begin, begin + _extent_bytes(parameter), name)
        for name, parameter in named
        if (begin := parameter.data_ptr())  # a subclass may have no memory of its own
    )
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise InvalidArgument(
                f"parameters {one!r} and {other!r} share memory; let one parameter be in both "
                "places, as `b.weight = a.weight` does, or give each a clone()"
            )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a dense tensor may share memory, as after `expand()`."""
    if not tensor.numel():
        return False
    reach = 0  # from the first element to the last one of the dimensions so far
    form = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(each for each in form if each[1] > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _extent_bytes(parameter: torch.Tensor) -> int:
    """From the first element to the end of the last one."""
    form = zip(parameter.shape, parameter.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in form)
    return (last + 1) * parameter.element_size()
