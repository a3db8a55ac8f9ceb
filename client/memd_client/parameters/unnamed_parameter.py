"""The class of an unnamed parameter whose bytes are away: see `unnamed.py`.

It answers for shape, dtype and device. Any other use brings the bytes home, where the parameter is
an `nn.Parameter` again, and goes on with that.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import call_user
from memd_client.parameters.hole import allowing_metadata
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.parameters.unnamed import unnamed
from memd_client.transaction.metadata import asks_for_metadata, attribute_of

_detach: Any = torch._C.TensorBase.detach
_requires_grad: Any = torch._C.TensorBase.requires_grad
_NEW_PARAMETER = nn.Parameter.__new__.__code__


class UnnamedParameter(StoredParameter):
    """A parameter that `init` has built, while its bytes are in memd. It has no gradient."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = attribute_of(func)
        if asks_for_metadata(func) or (name == "__get__" and attribute in ("grad", "_grad")):
            with torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
                return func(*args, **kwargs)
        if func is torch.Tensor.requires_grad_:
            return _set_requires_grad(*args, **kwargs)
        if name == "__set__" and attribute == "requires_grad":
            _set_requires_grad(*args)
            return None
        _bring(*tree_leaves((args, kwargs)))
        return call_user(func, *args, **kwargs)

    # torch has no `__torch_function__` for these, or asks it too late.

    @untraced
    def detach(self) -> torch.Tensor:
        """As torch's."""
        _bring(self)
        value: torch.Tensor = _detach(self)
        if sys._getframe(1).f_code is _NEW_PARAMETER:
            value.__class__ = nn.Parameter  # it compares their classes
        return value

    @untraced
    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's."""
        _bring(self)
        return self.set_(*args, **kwargs)

    # torch's stub has no types here.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        _bring(self)
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """As torch's."""
        _bring(self)
        copy: nn.Parameter = self.__deepcopy__(memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As torch's."""
        _bring(self)
        return self.__reduce_ex__(protocol)


def _bring(*leaves: object) -> None:
    """All that are away come home; from here on each is an `nn.Parameter`."""
    records = [record for leaf in leaves if (record := unnamed(leaf)) is not None]
    for store in {id(record.store): record.store for record in records}.values():
        store.bring(leaves)


def _set_requires_grad(parameter: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        _requires_grad.__set__(parameter, requires_grad)
    return parameter
