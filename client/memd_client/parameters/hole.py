"""The hole: what a parameter has while its bytes are away. The cover: what it has while they are
there, and are not to be used.

A hole is a tensor of the right shape, dtype and device without memory. It carries a dispatch key
that no other tensor has, and torch's dispatcher gives every operation on such a tensor to a
function that refuses it. So nothing computes with it by any way: operations that ask
`__torch_function__` fetch the bytes first and never come here; constructors and transforms of
torch.func do not ask, and come here. A cover has the key too, and lies over memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memd_client.base.identity import ByIdentity
from memd_client.errors import NotResident

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Nobody else's: torch has it for its own tests of the dispatcher. Those for other devices would
# change a tensor's device.
_KEY = "TESTING_ONLY_GenericWrapper"
_key: Any = torch._C._dispatch_key_parse(_KEY)
_keys: Any = torch._C.DispatchKeySet(_key)
# `parameter.data = lease`, `parameter.data = hole`, and the same with a cover.
_ALLOWED = ("_has_compatible_shallow_copy_type", "set_data")
_CPU = torch.device("cpu")
# "job, parameter" for messages.
_names: ByIdentity[torch.Tensor, str] = ByIdentity()
# A use of covered memory calls it first; by address. A cover that is never taken off is forgotten
# when another one lies there.
_covered: dict[int, Callable[[], None]] = {}
# Covered tensors take key and memory from these, by dtype and device. Between two covers each lies
# over memory of no bytes. Making one takes 20 µs.
_covers: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.UntypedStorage]] = {}


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


def cover(tensor: torch.Tensor, memory: torch.Tensor, refuse: Callable[[], None]) -> None:
    """Until `uncover`, each operation on `tensor` by whatever way calls `refuse` first, which
    raises or lets it go on. `memory` is what `tensor.data` was, for who may use it meanwhile.
    Functions that take the address alone see it as before."""
    key = memory.dtype, memory.device
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
        # Another thread makes one of its own meanwhile.
        try:
            lying, empty = _covers.pop(key)
        except KeyError:
            lying, empty = _make_cover(memory)
        storage, place = memory.untyped_storage(), memory.storage_offset()
        try:
            lying.set_(storage, place, memory.size(), memory.stride())
            _covered[memory.data_ptr()] = refuse
            tensor.data = lying
        finally:
            lying.set_(empty, 0, (0,), (1,))
            _covers[key] = lying, empty


def _make_cover(memory: torch.Tensor) -> tuple[torch.Tensor, torch.UntypedStorage]:
    with torch.inference_mode(mode=False):
        lying = make_without_memory((0,), memory.dtype, _keys, memory.device)
        return lying, memory.new_empty(0).untyped_storage()


def uncover(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Ends `cover`; does nothing to a tensor that lies over `memory` without one."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
        _covered.pop(memory.data_ptr(), None)
        tensor.data = memory


def name_in_messages(parameter: torch.Tensor, name: str) -> None:
    """Refusals name `parameter` so while it has a hole."""
    _names[parameter] = name


def allowing_metadata() -> Any:
    """A context in which this thread's operations see a hole as any tensor. They may not look for
    its bytes: there are none, and a kernel that reads them ends the process."""
    return torch._C._ExcludeDispatchKeyGuard(_keys)


def _refuse(operation: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _is_keyed(leaf)]
    addresses = [_address_of(leaf) for leaf in leaves]
    for address in addresses:
        refuse = _covered.get(address)  # another thread may uncover it meanwhile
        if refuse is not None:
            refuse()
    # They may be used. What lay under a cover once may have its key for ever: a transform's wrapper
    # of it, or a view.
    if all(addresses):
        with allowing_metadata():
            return operation(*args, **kwargs)
    names = [name for leaf in leaves if (name := _names.get(leaf))]
    raise NotResident(
        f"{names[0] if names else 'the bytes of an offloaded parameter'} are in memd, and "
        f"{operation} can't bring them: constructors such as torch.tensor() and transforms of "
        "torch.func need them in place; use it inside memd_client.gather(...), with write=True to "
        "change them"
    )


def _is_keyed(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and torch._C._dispatch_keys(leaf).has(_key)


def _address_of(tensor: torch.Tensor) -> int:
    """0 for a hole."""
    if torch._is_functional_tensor(tensor):
        tensor = torch._from_functional_tensor(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.data_ptr()
        except RuntimeError:
            return 0


def _register() -> list[torch.library.Library]:
    """torch forgets what was registered when the result is dropped."""
    fallback = torch.library.Library("_", "IMPL", _KEY)
    fallback.fallback(_refuse)
    allowed = torch.library.Library("aten", "IMPL", _KEY)
    for name in _ALLOWED:
        allowed.impl(name, torch.library.fallthrough_kernel)
    return [fallback, allowed]


_registered = _register()
