"""A parameter in tiles inside `gather()`: it has a copy of its value, in memory of this process."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.errors import MemdError
from memd_client.parameters.hole import make_hole
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.parameter import accumulate
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.parameters.tiles import Tiling, tiling_of
from memd_client.parameters.views import is_same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

_data: Any = torch._C.TensorBase.data
_autograds: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad
# Parameters that hand the gradients that arrive at themselves to their tiles.
_hooked: ByIdentity[torch.Tensor, bool] = ByIdentity()


class GatheredTiles(StoredParameter):
    """A parameter in tiles, inside `gather()`."""

    # torch declares it as a class method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The copy."""
        value: torch.Tensor = _data.__get__(self)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        tiling = _written(self, "data")
        tiling.refuse_other_form(value)
        _data.__set__(self, value.detach())

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in memd, as one tensor."""
        return _tiling(self).gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _written(self, "grad").set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        _written(self, "grad").set_gradient(None)

    _grad = grad

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes a gradient for it."""
        return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        _set_requires_grad(self, requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> GatheredTiles:
        """As torch's."""
        _set_requires_grad(self, requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


@contextmanager
def gathered(parameter: torch.Tensor, *, write: bool) -> Iterator[None]:
    """Inside, a parameter in tiles is whole and ordinary, for all threads. Any may be inside.

    Raises:
        MemdError: `write` inside a context that reads it; or, without `write`, it was changed in a
            way that torch does not count. The value is as it was.
    """
    tiling = _tiling(parameter)
    with _lock:
        place = _places.get(tiling)
        if place is None:
            place = _places[tiling] = _Place()
    place.enter(parameter, write=write)
    try:
        yield
    except BaseException:
        place.leave(parameter, refuses=False)
        raise
    place.leave(parameter, refuses=True)


class _Place:
    """The copy of one parameter's value, while somebody is inside `gather()`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._user_count = 0
        self._is_written = False
        self._version = 0
        self._away: type[torch.Tensor] = torch.Tensor

    def enter(self, parameter: torch.Tensor, *, write: bool) -> None:
        """Brings the copy with the first who comes.

        Raises:
            MemdError: `write`, and it is there for reading.
        """
        tiling = _tiling(parameter)
        with self._lock:
            if not self._user_count:
                self._bring(parameter, tiling)
                self._is_written = write
            elif write and not self._is_written:
                raise MemdError(
                    f"{tiling.label} is in use for reading; leave that gather() before "
                    "gather(write=True)"
                )
            self._user_count += 1

    def leave(self, parameter: torch.Tensor, *, refuses: bool) -> None:
        """The last who goes gives the tiles what has changed.

        Args:
            refuses: raises for a change that torch does not count.

        Raises:
            MemdError: there was one. The value is as it was.
        """
        with self._lock:
            self._user_count -= 1
            if not self._user_count:
                self._give_back(parameter, _tiling(parameter), refuses=refuses)

    @property
    def is_written(self) -> bool:
        return self._user_count > 0 and self._is_written

    def _bring(self, parameter: torch.Tensor, tiling: Tiling) -> None:
        value = tiling.copied()
        tiling.lend(True)
        self._away = type(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            self._version = parameter._version
            parameter.__class__ = GatheredTiles
            _data.__set__(parameter, value)
        _hook_if_trainable(parameter)

    def _give_back(self, parameter: torch.Tensor, tiling: Tiling, *, refuses: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            found = _data.__get__(parameter)
            is_changed = parameter._version != self._version
            parameter.__class__ = self._away
            _data.__set__(parameter, make_hole(tiling.shard.shape, tiling.shard.dtype))
        tiling.lend(False)
        if self._is_written or is_changed:
            tiling.replace(found)
        elif refuses and not all(
            _has_bits(tile, found[first:end])
            for tile, (first, end) in zip(tiling.tiles, tiling.rows(), strict=True)
        ):
            raise MemdError(
                f"{tiling.label} was written inside gather(), and torch does not count that, so "
                "the value is as it was; change parameters inside gather(write=True)"
            )


def _has_bits(tile: torch.Tensor, value: torch.Tensor) -> bool:
    lazy = tile.detach()
    assert isinstance(lazy, LazyTensor)
    with lazy.source.using(writes=False) as shown:
        return is_same_bits(shown, value)


_places: ByIdentity[Tiling, _Place] = ByIdentity()
_lock = Lock()  # of _places


def _set_requires_grad(parameter: torch.Tensor, requires_grad: bool) -> None:
    _tiling(parameter).set_requires_grad(parameter, requires_grad)
    _hook_if_trainable(parameter)


def _hook_if_trainable(parameter: torch.Tensor) -> None:
    """torch accepts hooks only for tensors that require a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.requires_grad and _hooked.get(parameter) is None:
            parameter.register_post_accumulate_grad_hook(_take_gradient)
            _hooked[parameter] = True


@untraced
def _take_gradient(parameter: torch.Tensor) -> None:
    """Post-accumulate hook: autograd has computed with the whole."""
    tiling = _tiling(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _autograds.__get__(parameter)
        _autograds.__set__(parameter, None)
    for entry, (first, end) in zip(tiling.entries, tiling.rows(), strict=True):
        accumulate(entry, gradient[first:end])


def _tiling(parameter: torch.Tensor) -> Tiling:
    tiling = tiling_of(parameter)
    assert tiling is not None
    return tiling


def _written(parameter: torch.Tensor, attribute: str) -> Tiling:
    tiling = _tiling(parameter)
    place = _places.get(tiling)
    if place is None or not place.is_written:
        raise MemdError(
            f"{tiling.label} is gathered for reading, so its .{attribute} can't be assigned; use "
            "gather(..., write=True)"
        )
    return tiling
