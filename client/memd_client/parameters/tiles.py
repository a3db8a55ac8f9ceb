"""A parameter whose value is in memd as several shards, one for each range of its rows.

Each tile is an offloaded parameter of its own that no module has, and is leased, updated and
streamed as any other. The whole is the parameter that modules and optimizers have. Its value and
its gradient are lazy tensors: an operation on one copies the tiles together, one after the other,
and what it changes goes back to them. See docs/decisions/tiled-linears.md.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from memd_client.base.dynamo import untraced
from memd_client.base.freed_memory import PassingBytes
from memd_client.base.identity import ByIdentity
from memd_client.base.interrupts import call_user
from memd_client.connection.shard import Shard
from memd_client.errors import InvalidArgument, MemdError, NotResident
from memd_client.parameters import changes_of_ranks
from memd_client.parameters.away import changed_by
from memd_client.parameters.hole import allowing_metadata, make_hole, name_in_messages
from memd_client.parameters.lazy import LazyTensor, is_list_function, list_length, one_by_one
from memd_client.parameters.parameter import (
    entry_of,
    get_gradient,
    is_zeroing,
    refused_swap,
    set_gradient,
    streamed,
)
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.transaction.metadata import asks_for_metadata, attribute_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from memd_client.parameters.parameter import StreamedParameter
    from memd_client.transaction.transaction import Transaction

_data: Any = torch._C.TensorBase.data
_requires_grad: Any = torch._C.TensorBase.requires_grad
_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
# torch's words.
_CHANGED_LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
# Numbers of wholes, which this process alone knows; those of empty parameters are small.
_WHOLE_ID = -(1 << 40)


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledShard(Shard):
    """A parameter as a whole, which the daemon knows by its tiles."""

    tiles: tuple[Shard, ...]

    @property
    def parts(self) -> tuple[Shard, ...]:
        """The shards that the daemon has of it."""
        return self.tiles


def tile_name(name: str, first: int, end: int) -> str:
    """The daemon's name of rows `first` to `end` of a parameter: tiles of another height are other
    parameters."""
    return f"{name}[{first}:{end}]"


class Tiling:
    """The tiles of one parameter, in the order of its rows. It lives as long as the parameter. Any
    thread may call."""

    def __init__(self, parameter: nn.Parameter, name: str, tiles: Sequence[nn.Parameter]) -> None:
        """`tiles` are offloaded. From now on they have the value of `parameter`."""
        self._tiles = list(tiles)
        shards = tuple(entry.shard for entry in self.entries)
        self._shard = TiledShard(
            shard_id=_WHOLE_ID - shards[0].shard_id,
            name=name,
            kind=shards[0].kind,
            dtype=parameter.dtype,
            shape=parameter.shape,
            tiles=shards,
        )
        self._shown: weakref.ref[LazyTensor] | None = None
        self._gradient: weakref.ref[LazyTensor] | None = None
        # The tensor that was assigned to `grad`, and its version then.
        self._assigned: tuple[weakref.ref[torch.Tensor], int] | None = None
        name_in_messages(
            parameter,
            f"job {self.transaction.job.name!r}: the bytes of parameter {name!r}, which is tiled,",
        )
        with torch._C.DisableTorchFunctionSubclass():
            parameter.__class__ = TiledParameter
            _data.__set__(parameter, make_hole(parameter.shape, parameter.dtype))
        self._is_hooked = False
        self._hook_if_trainable()
        _tilings[parameter] = self

    @property
    def shard(self) -> TiledShard:
        """The whole."""
        return self._shard

    @property
    def tiles(self) -> Sequence[nn.Parameter]:
        return self._tiles

    @property
    def entries(self) -> list[StreamedParameter]:
        """Those of the tiles."""
        return [entry_of(tile) for tile in self._tiles]

    @property
    def transaction(self) -> Transaction:
        """The transaction of its session."""
        return entry_of(self._tiles[0]).transaction

    @property
    def label(self) -> str:
        """For messages."""
        return f"job {self.transaction.job.name!r}: parameter {self._shard.name!r}"

    def rows(self) -> Iterator[tuple[int, int]]:
        """The first row of each tile, and the row behind its last."""
        return self._shard.part_rows()

    def value(self) -> LazyTensor:
        """All of it, as `detach()` of an offloaded parameter: it is read when it is used."""
        shown = self._shown() if self._shown is not None else None
        if shown is None:
            lazies = [tile.detach() for tile in self._tiles]
            shown = LazyTensor.over(TileBytes(self, lazies, is_gradient=False))
            self._shown = weakref.ref(shown)
        return shown

    def copied(self) -> torch.Tensor:
        """All of it, in memory of this process. `value().clone()` would copy the copy."""
        return self.value().in_memory().data  # of version 0, as a clone

    def gradient(self, *, is_zeroing: bool = False) -> LazyTensor | None:
        """`parameter.grad`. `is_zeroing`: `zero_grad(set_to_none=False)` of a module asks."""
        self.refuse_changed_assigned()
        slots = [entry.gradient for entry in self.entries]
        if is_zeroing and any(slot.would_repeat or slot.are_zeros_due for slot in slots):
            for slot in slots:
                slot.set_to_zero()
            return None
        lazies = [get_gradient(tile) for tile in self._tiles]
        if any(lazy is None for lazy in lazies):
            return None
        shown = self._gradient() if self._gradient is not None else None
        if shown is not None:
            source = shown.source
            assert isinstance(source, TileBytes)
            if source.shows(lazies):
                return shown
        shown = LazyTensor.over(TileBytes(self, lazies, is_gradient=True))
        self._gradient = weakref.ref(shown)
        return shown

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """`parameter.grad = value`. The tiles have copies.

        Raises:
            InvalidArgument: `value` is of another form, or another parameter's gradient.
        """
        if value is None:
            self._assigned = None
            for tile in self._tiles:
                set_gradient(tile, None)
            return
        held = self._gradient() if self._gradient is not None else None
        if held is not None and value is held:
            return  # as `p.grad += x` assigns it
        with self.changing(changes_of_ranks.ASSIGNMENT):
            self._refuse_gradient(value)
        for tile, (first, end) in zip(self._tiles, self.rows(), strict=True):
            set_gradient(tile, value.detach()[first:end].clone())
        self._assigned = weakref.ref(value), value._version

    def _refuse_gradient(self, value: torch.Tensor) -> None:
        if isinstance(value, LazyTensor):
            raise InvalidArgument(
                f"{self.label} is tiled, and its grad cannot share the bytes of another "
                "parameter's in memd; assign a clone()"
            )
        if value.shape != self._shard.shape or value.dtype != self._shard.dtype:
            raise InvalidArgument(
                f"the gradient of {self._shard.name!r} has another shape or dtype than the "
                f"parameter: {list(value.shape)} {value.dtype}, {list(self._shard.shape)} "
                f"{self._shard.dtype}"
            )

    def changing(self, what: str) -> AbstractContextManager[None]:
        """Inside, its gradient changes by `what`: see `changes_of_ranks.changing_tiles`."""
        entry = entry_of(self._tiles[0])
        return changes_of_ranks.changing_tiles(entry.gradient, entry.job, what)

    def refuse_changed_assigned(self) -> None:
        """In torch `p.grad = g` makes them one tensor, and here the tiles have copies.

        Raises:
            MemdError: `g` has changed since.
        """
        held = self._assigned[0]() if self._assigned is not None else None
        if held is None or self._assigned is None:
            self._assigned = None
        elif held._version != self._assigned[1]:
            raise MemdError(
                f"{self.label} is tiled, so memd has a copy of the tensor that was assigned to its "
                "grad, and that tensor has changed since; assign it again, or change p.grad"
            )

    def change_assigned(self, change: Callable[[torch.Tensor], object]) -> None:
        """The gradient has changed so, and in torch it is the tensor that was assigned. Ask
        `refuse_changed_assigned` before the gradient changes."""
        held = self._assigned[0]() if self._assigned is not None else None
        if held is not None:
            with torch.no_grad():
                change(held)
            self._assigned = weakref.ref(held), held._version

    def forget_assigned(self) -> None:
        """The gradient ends."""
        self._assigned = None

    def replace(self, value: torch.Tensor) -> None:
        """`parameter.data = value`. The tiles have copies."""
        self.refuse_other_form(value)
        if isinstance(value, LazyTensor) and value.is_view_of(self.value()):
            if value.is_contiguous() and not value.storage_offset():
                return
            value = value.clone()
        # `value().copy_()` would bring the old value first.
        passing = PassingBytes()
        with torch.no_grad():
            for tile, (first, end) in zip(self._tiles, self.rows(), strict=True):
                tile.detach().copy_(value[first:end])
                passing.passed(tile.nbytes)
        shown = self._shown() if self._shown is not None else None
        if shown is not None:
            shown.note_change()

    def refuse_other_form(self, value: torch.Tensor) -> None:
        """
        Raises:
            NotResident: the parameter cannot become `value` in memd.
        """
        if value.shape != self._shard.shape or value.dtype != self._shard.dtype:
            raise NotResident(
                f"{self.label} is in memd as {self._shard.dtype} {list(self._shard.shape)} and "
                f"cannot become {value.dtype} {list(value.shape)} there; convert before offload()"
            )

    def set_requires_grad(self, parameter: torch.Tensor, requires_grad: bool) -> None:
        """For `parameter.requires_grad = requires_grad`."""
        for tile in self._tiles:
            tile.requires_grad_(requires_grad)
        self._hook_if_trainable()
        with torch._C.DisableTorchFunctionSubclass():
            _requires_grad.__set__(parameter, requires_grad)

    def _hook_if_trainable(self) -> None:
        """torch accepts hooks only for tensors that require a gradient."""
        if self._tiles[0].requires_grad and not self._is_hooked:
            for tile in self._tiles:
                tile.register_post_accumulate_grad_hook(_return_gradient)
            self._is_hooked = True

    def lend(self, is_lent: bool, /) -> None:
        """Whether the value is in one piece elsewhere, which may be written back: nothing else
        changes the tiles then."""
        for entry in self.entries:
            entry.residency.lend(is_lent)

    @property
    def write_count(self) -> int:
        """Names the value by the number of its changes."""
        return sum(entry.residency.write_count for entry in self.entries)

    def whole(self) -> torch.Tensor:
        """A copy in this process, with a gradient that reaches the tiles."""
        # torch declares no types for `apply`.
        copied: torch.Tensor = _Whole.apply(self, *self._tiles)  # type: ignore[no-untyped-call]
        return copied


# glibc keeps freed gradients of up to 32 MiB, and finds no use for them: what an aligned tensor
# leaves is a little too small for the next of its size. They would come to all gradients.
_passing = PassingBytes()


@untraced
def _return_gradient(tile: torch.Tensor) -> None:
    """Post-accumulate hook, after `take_gradient`: the gradient is in memd, and not here."""
    _passing.passed(tile.nbytes)


_tilings: ByIdentity[torch.Tensor, Tiling] = ByIdentity()

# The tiling of a parameter; None for every other tensor.
tiling_of = _tilings.get


def is_in_memd(parameter: torch.Tensor) -> bool:
    """Whether it is offloaded, as one shard or as several."""
    return streamed(parameter) is not None or tiling_of(parameter) is not None


def entries_of(parameter: torch.Tensor) -> list[StreamedParameter]:
    """The entries of a parameter: one, or one for each tile. Empty if it is not offloaded."""
    tiling = tiling_of(parameter)
    if tiling is not None:
        return tiling.entries
    entry = streamed(parameter)
    return [] if entry is None else [entry]


class TileBytes:
    """The bytes of a whole, a copy for each use; what a use changes goes to the tiles."""

    def __init__(self, tiling: Tiling, lazies: Sequence[Any], *, is_gradient: bool) -> None:
        """`lazies` show the tiles."""
        self._tiling = tiling
        self._lazies = list(lazies)
        self._is_gradient = is_gradient

    @property
    def tiling(self) -> Tiling:
        return self._tiling

    def shows(self, lazies: Sequence[Any]) -> bool:
        """Whether these are its tiles'."""
        return all(one is other for one, other in zip(self._lazies, lazies, strict=True))

    @property
    def name(self) -> str:
        what = "the gradient of" if self._is_gradient else "parameter"
        return f"{what} {self._tiling.shard.name!r}"

    @property
    def shape(self) -> torch.Size:
        return self._tiling.shard.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tiling.shard.dtype

    @property
    def device(self) -> torch.device:
        return self._tiling.shard.device

    @property
    def is_gradient(self) -> bool:
        """See `lazy.Source`."""
        return self._is_gradient

    @property
    def is_read_only(self) -> bool:
        return True

    @property
    def takes_memory_writes(self) -> bool:
        """See `lazy.Source`."""
        return False  # `memory` is a copy

    @property
    def has_ended(self) -> bool:
        """See `lazy.Source`."""
        return any(lazy.has_ended for lazy in self._lazies)

    @contextmanager
    def using(self, *, writes: bool) -> Iterator[torch.Tensor]:
        """See `lazy.Source`."""
        if writes and self._is_gradient and not self.has_ended:
            with self._tiling.changing(changes_of_ranks.OPERATION):
                self._tiling.refuse_changed_assigned()
                whole = self.memory()
                yield whole
        else:
            whole = self.memory()
            yield whole
        if writes:
            for lazy, (first, end) in zip(self._lazies, self._tiling.rows(), strict=True):
                lazy.copy_(whole[first:end])
            if self._is_gradient and not self.has_ended:
                self._tiling.change_assigned(lambda assigned: assigned.copy_(whole))

    def memory(self) -> torch.Tensor:
        """See `lazy.Source`."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for lazy, (first, end) in zip(self._lazies, self._tiling.rows(), strict=True):
            whole[first:end].copy_(lazy)
        return whole

    def pin(self) -> None:
        """See `lazy.Source`."""
        raise InvalidArgument(
            f"{self.name} is in memd in tiles and has no address of its own; take that of a clone()"
        )


class _Whole(torch.autograd.Function):
    """A copy of the tiles, one below the other."""

    @staticmethod
    def forward(ctx: Any, tiling: Tiling, *tiles: torch.Tensor) -> torch.Tensor:
        del tiles
        ctx.heights = [end - first for first, end in tiling.rows()]
        return tiling.copied()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *gradient.split(ctx.heights)


class TiledParameter(StoredParameter):
    """A parameter whose tiles are in memd. It answers questions about metadata at once; anything
    else gets a copy of the value for the call, and changes of that go to the tiles."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS or func is torch.autograd.grad:
            _refuse_hook(func, args, kwargs)
        if asks_for_metadata(func):
            with torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
                return func(*args, **kwargs)
        name, attribute = getattr(func, "__name__", ""), attribute_of(func)
        if name == "__get__" and attribute in ("grad", "_grad"):
            return _tiling(args[0]).gradient()
        if name == "__set__" and attribute in _SETTERS:
            return _SETTERS[attribute](args[0], args[1])
        if func is torch.Tensor.requires_grad_:
            _set_requires_grad(args[0], *args[1:], **kwargs)
            return args[0]
        if func is torch.Tensor.module_load:
            raise refused_swap(_tiling(args[0]).tiles[0])
        if is_list_function(name) and (count := list_length(args, kwargs)) > 1:
            return one_by_one(func, args, kwargs, count)
        is_detached = (
            name == "detach"
            or attribute == "data"
            or getattr(func, "__module__", "")
            == nn.init.__name__  # without gradients, once it is called
            or not torch.is_grad_enabled()
        )
        if not is_detached:
            _refuse_changed_leaf(func, name, args, kwargs)
        shown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the whole, what shows it

        def show(leaf: Any) -> Any:
            tiling = tiling_of(leaf)
            if tiling is None:
                return leaf
            if id(leaf) not in shown:
                is_plain = is_detached or not leaf.requires_grad
                shown[id(leaf)] = leaf, tiling.value() if is_plain else tiling.whole()
            return shown[id(leaf)][1]

        args, kwargs = tree_map(show, args), tree_map(show, kwargs)
        result = call_user(func, *args, **kwargs)
        if any(not isinstance(each, LazyTensor) and each._version for _, each in shown.values()):
            raise RuntimeError(_CHANGED_LEAF)
        wholes = {id(each): whole for whole, each in shown.values()}
        return tree_map(lambda leaf: wholes.get(id(leaf), leaf), result)

    @untraced
    def detach(self) -> torch.Tensor:
        """As torch's."""
        return _tiling(self).value().detach()

    # As properties, for the reason that `AwayParameter` has.
    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in memd, as one tensor."""
        return _tiling(self).gradient(is_zeroing=is_zeroing(sys._getframe(1)))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _tiling(self).set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        _tiling(self).set_gradient(None)

    _grad = grad  # torch.optim and torch.nn.Module.to() use this name

    @property
    def data(self) -> torch.Tensor:
        """The value of each time that it is used. What is changed through it is kept."""
        return _tiling(self).value().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    # torch's stub has no types here.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's arguments have no types
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Never called: see `AwayParameter`."""
        raise AssertionError(f"{func} came to a class that has no dispatch key")

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """torch has no `__torch_function__` for it."""
        raise NotResident(f"{_tiling(self).label} is tiled and has no memory of its own to replace")

    # torch's stub has no types here.
    def __repr__(  # type: ignore[override] # as torch's tensors take it, and declare it not
        self, *, tensor_contents: Any = None
    ) -> str:
        del tensor_contents
        shown = _tiling(self).copied().requires_grad_(self.requires_grad)
        return f"Parameter containing:\n{shown!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_tiling(self).copied(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotResident(
            f"{_tiling(self).label} is in memd, and pickling needs its bytes; save "
            "model.state_dict()"
        )


def _tiling(parameter: torch.Tensor) -> Tiling:
    tiling = tiling_of(parameter)
    if tiling is None:
        raise MemdError(f"memd does not know this {type(parameter).__name__}; was it made by hand?")
    return tiling


def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if value is not parameter:
        _tiling(parameter).replace(value)


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    _tiling(parameter).set_gradient(value)


def _set_requires_grad(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    _tiling(parameter).set_requires_grad(parameter, requires_grad)


_SETTERS: dict[str, Callable[[torch.Tensor, Any], None]] = {
    "data": _set_data,
    "grad": _set_gradient,
    "_grad": _set_gradient,
    "requires_grad": _set_requires_grad,
}


def _refuse_hook(func: Any, args: Any, kwargs: Any) -> None:
    tiling = next(filter(None, map(tiling_of, tree_leaves((args, kwargs)))))
    raise InvalidArgument(
        f"{tiling.label} is tiled: gradients arrive at its tiles, and {func.__name__} of the whole "
        "would see none; call backward() and use p.grad, or leave the layer out of tile_linears()"
    )


def _refuse_changed_leaf(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """As torch, which would not see that a copy is changed."""
    for leaf in changed_by(func, name, args, kwargs, tiling_of):
        if leaf.requires_grad:
            raise RuntimeError(_CHANGED_LEAF)
