"""Autograd saves a parameter's name instead of its bytes.

`saved_tensors_hooks` see every tensor that an operation keeps for its backward. A view of a
parameter's lease is replaced by (parameter, size, stride, offset). Unpacking runs exactly when
backward needs the value, and leases it again. A view of a cast, which autocast makes, is replaced
by the cast's recipe (`casts.py`) in the same way. Every other tensor is kept as it is.

Hooks of the user, such as `save_on_cpu`, get a lazy tensor in the parameter's place: what they keep
holds no lease.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from memd_client.base.dynamo import untraced
from memd_client.errors import InvalidArgument
from memd_client.parameters.casts import cast_of_storage
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.parameter import streamed
from memd_client.parameters.residency import residency_of_storage
from memd_client.parameters.thread_uses import is_in_place_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from memd_client.parameters.casts import Cast
    from memd_client.parameters.residency import Residency

_active_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_reason_hooks_are_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


# Not frozen: a frozen record takes twice as long to make, and every saved tensor needs one.
@dataclass(slots=True)
class SavedView:
    """A view of a parameter's bytes as they were after `write_count` writes."""

    residency: Residency
    write_count: int
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(slots=True)
class SavedCast:
    """A view of a cast of a parameter."""

    cast: Cast
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(slots=True)
class SavedTensor:
    """Any other tensor. `detached` shares its bytes and version counter. The tensor itself would
    make a reference cycle through its own graph, and would switch off the check for changes in
    place.
    """

    detached: torch.Tensor
    version: int


class StoringHooks:
    """A pair of hooks that keeps parameters by name, and does more with other tensors. Subclasses
    have both; no ABC, since every hook is checked by isinstance(), which takes longer there."""

    def pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def unpack(self, packed: Any) -> torch.Tensor:
        raise NotImplementedError


def _residency_of(tensor: torch.Tensor) -> Residency | None:
    """The parameter whose bytes `tensor` shows, if any."""
    if tensor.layout is not torch.strided or type(tensor) is LazyTensor:
        return None
    residency = residency_of_storage(tensor.untyped_storage())
    return residency if residency is not None and residency.shard.dtype == tensor.dtype else None


def cast_of(tensor: torch.Tensor) -> Cast | None:
    if tensor.layout is not torch.strided:
        return None
    cast = cast_of_storage(tensor.untyped_storage())
    return cast if cast is not None and cast.dtype == tensor.dtype else None


def save_by_name_hooks(storing: StoringHooks | None = None) -> saved_tensors_hooks | None:
    """Hooks for operations with offloaded parameters; None where none are needed or allowed. Those
    of the user, and of `torch.utils.checkpoint`, which drop what is saved, get what memd's would
    save otherwise.

    Args:
        storing: the pair that stores other tensors too, unless the program has one of its own.
    """
    active: Any = _active_hooks(True)
    if _reason_hooks_are_refused() is not None:
        return None
    if active is None or (active[0] is _pack and storing is not None):
        if storing is not None:
            return saved_tensors_hooks(storing.pack, storing.unpack)
        return saved_tensors_hooks(_pack, unpack_by_name)
    pack, unpack = active
    if pack is _pack or _is_of_memd(pack):
        return None
    within = _Within(pack, unpack)
    return saved_tensors_hooks(within.pack, within.unpack)


def is_kept_by_checkpoint(caller: FrameType) -> bool:
    """Whether `caller` is the function of `torch.utils.checkpoint` that keeps what operations save
    now, and asks about a tensor of those."""
    active: Any = _active_hooks(True)
    return (
        active is not None
        and _is_of_checkpoint(active[0])
        # torch keeps some of them out of graphs by a function around them.
        and getattr(inspect.unwrap(active[0]), "__code__", None) is caller.f_code
    )


def _is_of_memd(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), StoringHooks)


def _is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == checkpoint.__name__  # C functions may have none


@contextmanager
def saving_by_name() -> Iterator[None]:
    """Operations inside save parameters by name, where that is allowed."""
    hooks = save_by_name_hooks()
    if hooks is None:
        yield
    else:
        with hooks:
            yield


class _Within(StoringHooks):
    """memd's hooks within the user's, or a checkpoint's: what is computed again keeps no parameter
    until its backward."""

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> None:
        self._pack = pack
        self._unpack = unpack

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        view = saved_view(tensor)
        return self._pack(tensor if view is None else SavedBytes.shown(view))

    @untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._unpack(packed)
        # Backward gets the memory itself, as from memd's own hooks.
        return tensor.in_memory() if isinstance(tensor, LazyTensor) else tensor


class SavedBytes:
    """A parameter's bytes as they were after `write_count` writes."""

    def __init__(self, residency: Residency, write_count: int) -> None:
        self._residency = residency
        self._write_count = write_count

    @staticmethod
    def shown(view: SavedView) -> LazyTensor:
        source = SavedBytes(view.residency, view.write_count)
        form = torch.empty(source.shape, dtype=source.dtype, device="meta")
        form = form.as_strided(view.size, view.stride, view.storage_offset)
        return LazyTensor.over(source, form)

    @property
    def name(self) -> str:
        return f"what autograd saved of parameter {self._residency.shard.label!r}"

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._residency.shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._residency.shard.dtype

    @property
    def device(self) -> torch.device:
        return self._residency.shard.device

    @property
    def is_gradient(self) -> bool:
        """See `lazy.Source`."""
        return False

    @property
    def is_read_only(self) -> bool:
        return True

    @property
    def takes_memory_writes(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        """See `lazy.Source`."""
        return False

    @contextmanager
    def using(self, *, writes: bool) -> Iterator[torch.Tensor]:
        """See `lazy.Source`."""
        if writes:
            raise InvalidArgument(f"{self.name} cannot be changed in place; change a clone()")
        yield self.memory()

    def memory(self) -> torch.Tensor:
        """See `lazy.Source`."""
        _refuse_modified(self._residency, self._write_count)
        return self._residency.reread()

    def pin(self) -> None:
        """See `lazy.Source`."""
        raise InvalidArgument(f"{self.name} has no address of its own; take that of a clone()")


def _contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def saved_view(tensor: torch.Tensor) -> SavedView | None:
    """None if `tensor` shows no parameter's bytes."""
    entry = streamed(tensor)
    if entry is not None:
        # An autograd.Function was given the parameter itself. If it is away it has the strides of
        # the hole.
        size = tensor.size()
        residency = entry.residency
        count = residency.count_of(tensor) if is_in_place_here(tensor) else residency.write_count
        return SavedView(residency, count, size, _contiguous_stride(size), 0)
    source = _residency_of(tensor)
    if source is None:
        return None
    return SavedView(
        source,
        source.count_of(tensor),
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
    )


@untraced
def _pack(tensor: torch.Tensor) -> SavedView | SavedCast | SavedTensor:
    view = saved_view(tensor)
    if view is not None:
        return view
    cast = cast_of(tensor)
    if cast is not None and cast.may_be_saved(tensor):
        return SavedCast(cast, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return SavedTensor(tensor.detach(), tensor._version)


@untraced
def unpack_by_name(saved: Any) -> torch.Tensor:
    if isinstance(saved, SavedView):
        residency = saved.residency
        _refuse_modified(residency, saved.write_count)
        return residency.reread().as_strided(saved.size, saved.stride, saved.storage_offset)
    if isinstance(saved, SavedCast):
        cast = saved.cast
        if not cast.is_current:
            raise _modified(
                f"parameter {cast.source.shard.label!r}", cast.source.write_count, cast.write_count
            )
        return cast.remake().as_strided(saved.size, saved.stride, saved.storage_offset)
    refuse_modified_tensor(saved.detached.shape, saved.detached._version, saved.version)
    tensor: torch.Tensor = saved.detached
    return tensor


def _refuse_modified(residency: Residency, write_count: int) -> None:
    if residency.write_count != write_count:
        raise _modified(f"parameter {residency.shard.label!r}", residency.write_count, write_count)


def refuse_modified_tensor(shape: Sequence[int], found: int, expected: int) -> None:
    """Raises if a saved tensor that is no parameter was changed in place since."""
    if found != expected:
        raise _modified(f"a tensor of shape {list(shape)}", found, expected)


def _modified(what: str, found: int, expected: int) -> RuntimeError:
    """In torch's words, so that a search for them finds help."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation or an optimizer's step: {what} is at version {found}; expected version "
        f"{expected} instead"
    )
