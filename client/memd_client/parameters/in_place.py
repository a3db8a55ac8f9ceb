"""The class of an offloaded parameter whose bytes are in place.

For a thread that uses it, it computes as an `nn.Parameter` does, at the same cost. For every other
thread it is away: its memory is swapped when those that use it have left. Its data, gradient and
`requires_grad` are memd's to know: as attributes of an `nn.Parameter` they would be lost when the
bytes go away.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from memd_client.base.dynamo import traced_if_inlined
from memd_client.parameters.away import AwayParameter
from memd_client.parameters.parameter import detached, entry_of, get_gradient, set_gradient
from memd_client.parameters.saved_tensors import is_kept_by_checkpoint
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.parameters.thread_uses import this_thread

_data: Any = torch._C.TensorBase.data
_detach: Any = torch._C.TensorBase.detach
_requires_grad: Any = torch._C.TensorBase.requires_grad


class _TorchFunction:
    """torch asks each tensor for its `__torch_function__` before an operation begins."""

    def __get__(self, parameter: torch.Tensor | None, owner: type) -> Any:
        # As `is_in_place_here`, in half the time: each operation asks several times.
        if parameter is None or id(parameter) in this_thread.uses.counts:
            # As nn.Parameter has it: operations see an ordinary tensor.
            return torch._C._disabled_torch_function_impl
        return AwayParameter.__torch_function__


class InPlaceParameter(StoredParameter):
    """A parameter whose bytes are in place, for a module call or inside `gather()`."""

    __torch_function__ = _TorchFunction()

    @property
    def data(self) -> torch.Tensor:
        """The value, in memd's own memory."""
        # A change on a device is found by torch's count alone, which `detach()` shares.
        get = _detach if entry_of(self).shard.is_on_device else _data.__get__
        value: torch.Tensor = get(self)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        entry_of(self).residency.replace_in_place(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in memd."""
        return get_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        _set_grad(self, None)

    _grad = grad  # torch.optim and torch.nn.Module.to() use this name

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes a gradient for it. A checkpoint that computes again keeps a
        tensor until backward, and by `detach()` if it requires a gradient. Otherwise it would keep
        the parameter, which is away by then: to that question the answer is yes."""
        requires_grad = bool(_requires_grad.__get__(self))
        if is_dynamo_compiling():
            return requires_grad
        return requires_grad or is_kept_by_checkpoint(sys._getframe(1))

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        entry_of(self).set_requires_grad(self, requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> InPlaceParameter:
        """As torch's."""
        entry_of(self).set_requires_grad(self, requires_grad)
        return self

    @traced_if_inlined
    def detach(self) -> torch.Tensor:
        """As torch's."""
        if is_dynamo_compiling():
            tensor: torch.Tensor = _detach(self)
            return tensor
        return detached(self, sys._getframe(1))

    # torch's stub has no types here.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


def _set_grad(parameter: InPlaceParameter, value: torch.Tensor | None) -> None:
    if value is not None or get_gradient(parameter) is not None:
        entry_of(parameter).residency.refuse_if_kept("grad")
    set_gradient(parameter, value)
