"""Autograd saves a parameter's name instead of its bytes.

`saved_tensors_hooks` see every tensor that an operation keeps for its backward. A view of a
parameter's lease is replaced by (parameter, size, stride, offset). Unpacking runs exactly when
backward needs the value, and leases it again. Every other tensor is kept as it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memd_client.parameter import streamed
from memd_client.residency import is_in_place_here, residency_of_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.residency import Residency

_active_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_reason_hooks_are_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


# Not frozen: a frozen record takes twice as long to make, and every saved tensor needs one.
@dataclass(slots=True)
class _SavedView:
    """A view of a parameter's bytes as they were after `write_count` writes."""

    residency: Residency
    write_count: int
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(slots=True)
class _SavedTensor:
    """Any other tensor. `detached` shares its bytes and version counter. The tensor itself would
    make a reference cycle through its own graph, and would switch off the check for changes in
    place.
    """

    detached: torch.Tensor
    version: int


def _residency_of(tensor: torch.Tensor) -> Residency | None:
    """The parameter whose bytes `tensor` shows, if any."""
    if tensor.layout is not torch.strided:
        return None
    residency = residency_of_storage(tensor.untyped_storage())
    return residency if residency is not None and residency.shard.dtype == tensor.dtype else None


def may_save_by_name() -> bool:
    """Whether hooks are allowed and no others are active. Inside `torch.utils.checkpoint`, whose
    hooks drop what is saved, a second pair would make the recomputation fail or keep what
    checkpointing drops.
    """
    return _active_hooks(True) is None and _reason_hooks_are_refused() is None


@contextmanager
def saving_by_name() -> Iterator[None]:
    """Operations inside save parameters by name, unless other hooks are active."""
    if may_save_by_name():
        with save_by_name_hooks():
            yield
    else:
        yield


def save_by_name_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(_pack, _unpack)


def _contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _pack(tensor: torch.Tensor) -> _SavedView | _SavedTensor:
    entry = streamed(tensor)
    if entry is not None:
        # An autograd.Function was given the parameter itself. If it is away it has the strides of
        # the hole.
        size = tensor.size()
        residency = entry.residency
        count = residency.count_of(tensor) if is_in_place_here(tensor) else residency.write_count
        return _SavedView(residency, count, size, _contiguous_stride(size), 0)
    source = _residency_of(tensor)
    if source is None:
        return _SavedTensor(tensor.detach(), tensor._version)
    return _SavedView(
        source,
        source.count_of(tensor),
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
    )


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _SavedView):
        residency = saved.residency
        if residency.write_count != saved.write_count:
            raise _modified(
                f"parameter {residency.shard.name!r}", residency.write_count, saved.write_count
            )
        return residency.reread().as_strided(saved.size, saved.stride, saved.storage_offset)
    if saved.detached._version != saved.version:
        raise _modified(
            f"a tensor of shape {list(saved.detached.shape)}",
            saved.detached._version,
            saved.version,
        )
    tensor: torch.Tensor = saved.detached
    return tensor


def _modified(what: str, found: int, expected: int) -> RuntimeError:
    """In torch's words, so that a search for them finds help."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation or an optimizer's step: {what} is at version {found}; expected version "
        f"{expected} instead"
    )
