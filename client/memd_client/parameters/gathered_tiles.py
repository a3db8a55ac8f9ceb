"""A parameter in tiles inside `gather()`: it has a copy of its value, in memory of this process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.errors import MemdError
from memd_client.parameters.hole import make_hole
from memd_client.parameters.parameter import accumulate
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.parameters.tiles import Tiling, tiling_of
from memd_client.parameters.views import is_same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

_data: Any = torch._C.TensorBase.data
_autograds: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad
# The tilings whose parameters are in place now, and whether to be written.
_gathered: ByIdentity[Tiling, bool] = ByIdentity()
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
        _tiling(self).set_requires_grad(self, requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> GatheredTiles:
        """As torch's."""
        _tiling(self).set_requires_grad(self, requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


@contextmanager
def gathered(parameter: torch.Tensor, *, write: bool) -> Iterator[None]:
    """Inside, a parameter in tiles is whole and ordinary.

    Raises:
        MemdError: `write` inside a context that reads it; or, without `write`, it was changed in a
            way that torch does not count. The value is as it was.
    """
    tiling = _tiling(parameter)
    is_written = _gathered.get(tiling)
    if is_written is not None:
        if write and not is_written:
            raise MemdError(
                f"{tiling.label} is in use for reading; leave that gather() before "
                "gather(write=True)"
            )
        yield
        return
    away = type(parameter)
    value = tiling.value().clone()
    with torch._C.DisableTorchFunctionSubclass():
        version = parameter._version
        parameter.__class__ = GatheredTiles
        _data.__set__(parameter, value)
        if parameter.requires_grad and _hooked.get(parameter) is None:
            parameter.register_post_accumulate_grad_hook(_take_gradient)
            _hooked[parameter] = True
    _gathered[tiling] = write
    try:
        yield
    finally:
        _gathered.discard(tiling)
        with torch._C.DisableTorchFunctionSubclass():
            found = _data.__get__(parameter)
            is_changed = parameter._version != version
            parameter.__class__ = away
            _data.__set__(parameter, make_hole(tiling.shard.shape, tiling.shard.dtype))
    if write or is_changed:
        tiling.replace(found)
    elif not is_same_bits(tiling.value().clone(), found):
        raise MemdError(
            f"{tiling.label} was written inside gather(), and torch does not count that, so the "
            "value is as it was; change parameters inside gather(write=True)"
        )


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
    if not _gathered.get(tiling):
        raise MemdError(
            f"{tiling.label} is gathered for reading, so its .{attribute} can't be assigned; use "
            "gather(..., write=True)"
        )
    return tiling
