"""What autograd saves of a parameter: its name instead of its bytes.

`saved_tensors_hooks` see every tensor that an operation keeps for its backward. A view of a
parameter's lease is replaced by (source, size, stride, offset); unpacking runs exactly when
backward needs the value, and leases it again. Everything else is kept as it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from memd_client.identity import ByIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.shard import Shard

_active_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_reason_hooks_are_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class Source(Protocol):
    """A parameter whose bytes can be leased again."""

    @property
    def shard(self) -> Shard: ...
    @property
    def write_count(self) -> int: ...
    def reread(self) -> torch.Tensor: ...


# The storage of every lease that is alive → whose bytes it is. torch keeps a storage's Python
# object for as long as the storage lives, so that views which outlive the module call that made
# them are still recognised.
_sources: ByIdentity[torch.UntypedStorage, Source] = ByIdentity()
# Every parameter whose bytes are leased, away or not. The values are of `away`.
parameters: ByIdentity[torch.Tensor, Any] = ByIdentity()


# Not frozen: that takes twice as long to make, of every tensor that is saved.
@dataclass(slots=True)
class _SavedView:
    """A view of a parameter's bytes as they were after `write_count` writes."""

    source: Source
    write_count: int
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(slots=True)
class _SavedTensor:
    """Any other tensor. `detached` shares its bytes and its version counter: keeping the tensor
    itself would be a reference cycle through its own graph, and would switch off the check for
    changes in place.
    """

    detached: torch.Tensor
    version: int


def remember(lease: torch.Tensor, source: Source) -> None:
    """From now on, views of `lease` are saved by name."""
    _sources[lease.untyped_storage()] = source


def _source_of(tensor: torch.Tensor) -> Source | None:
    """Whose bytes `tensor` shows, if a parameter's."""
    if tensor.layout is not torch.strided:
        return None
    source = _sources.get(tensor.untyped_storage())
    return source if source is not None and source.shard.dtype == tensor.dtype else None


def may_save_by_name() -> bool:
    """Whether nobody else's hooks are active, and hooks are allowed. Inside
    `torch.utils.checkpoint`, whose own hooks drop what is saved, a second pair would make the
    recomputation fail or keep what checkpointing drops.
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
    whole: Source | None = parameters.get(tensor)
    if whole is not None:
        # It may be away, with the strides of the hole: an autograd.Function was given it.
        size = tensor.size()
        return _SavedView(whole, whole.write_count, size, _contiguous_stride(size), 0)
    source = _source_of(tensor)
    if source is None:
        return _SavedTensor(tensor.detach(), tensor._version)
    return _SavedView(
        source, source.write_count, tensor.size(), tensor.stride(), int(tensor.storage_offset())
    )


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _SavedView):
        source = saved.source
        if source.write_count != saved.write_count:
            raise _modified(
                f"parameter {source.shard.name!r}", source.write_count, saved.write_count
            )
        return source.reread().as_strided(saved.size, saved.stride, saved.storage_offset)
    if saved.detached._version != saved.version:
        raise _modified(
            f"a tensor of shape {list(saved.detached.shape)}",
            saved.detached._version,
            saved.version,
        )
    tensor: torch.Tensor = saved.detached
    return tensor


def _modified(what: str, found: int, expected: int) -> RuntimeError:
    """In torch's words, for those who search for them."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation or an optimizer's step: {what} is at version {found}; expected version "
        f"{expected} instead"
    )
