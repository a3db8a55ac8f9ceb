"""The hole: what a parameter has while its bytes are away.

It is a tensor of the right shape, dtype and device without memory. It carries a dispatch key that
no other tensor has, and torch's dispatcher gives every operation on such a tensor to a function
that refuses it. So nothing computes with it by any way: operations that ask `__torch_function__`
fetch the bytes first and never come here; constructors and transforms of torch.func do not ask, and
come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from memd_client.base.identity import ByIdentity
from memd_client.errors import NotResident

if TYPE_CHECKING:
    from collections.abc import Iterable

# Nobody else's: torch has it for its own tests of the dispatcher. Those for other devices would
# change a tensor's device.
_KEY = "TESTING_ONLY_GenericWrapper"
_keys: Any = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
# `parameter.data = lease` and `parameter.data = hole`.
_ALLOWED = ("_has_compatible_shallow_copy_type", "set_data")
_CPU = torch.device("cpu")
# "job, parameter" for messages.
_names: ByIdentity[torch.Tensor, str] = ByIdentity()


class _WithoutMemory(torch.Tensor):
    """torch makes a tensor without memory only of a class that has this function."""

    # torch's stub has no types here.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def make_without_memory(
    shape: Iterable[int], dtype: torch.dtype, keys: Any, device: torch.device = _CPU
) -> torch.Tensor:
    """A tensor without memory that carries the dispatch keys `keys`."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    # An ordinary tensor takes all of it but the class.
    tensor.data = torch.Tensor._make_wrapper_subclass(
        _WithoutMemory,
        torch.Size(shape),
        dtype=dtype,
        device=device,
        _extra_dispatch_keys=keys,
    )
    return tensor


def make_hole(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device = _CPU
) -> torch.Tensor:
    """For `parameter.data = hole`, which gives the parameter its key and takes its memory."""
    hole = make_without_memory(shape, dtype, _keys, device)
    # Functions that ask for the address without the dispatcher, such as to_dlpack().
    torch._C._set_throw_on_mutable_data_ptr(hole)
    return hole


def name_in_messages(parameter: torch.Tensor, name: str) -> None:
    """Refusals name `parameter` so while it has a hole."""
    _names[parameter] = name


def allowing_metadata() -> Any:
    """A context in which this thread's operations see a hole as any tensor. They may not look for
    its bytes: there are none, and a kernel that reads them ends the process."""
    return torch._C._ExcludeDispatchKeyGuard(_keys)


def _refuse(operation: Any, *args: Any, **kwargs: Any) -> NoReturn:
    names = [name for leaf in tree_leaves((args, kwargs)) if (name := _names.get(leaf))]
    raise NotResident(
        f"{names[0] if names else 'the bytes of an offloaded parameter'} are in memd, and "
        f"{operation} can't bring them: constructors such as torch.tensor() and transforms of "
        "torch.func need them in place; use it inside memd_client.gather(...), with write=True to "
        "change them"
    )


def _register() -> list[torch.library.Library]:
    """torch forgets what was registered when the result is dropped."""
    fallback = torch.library.Library("_", "IMPL", _KEY)
    fallback.fallback(_refuse)
    allowed = torch.library.Library("aten", "IMPL", _KEY)
    for name in _ALLOWED:
        allowed.impl(name, torch.library.fallthrough_kernel)
    return [fallback, allowed]


_registered = _register()
