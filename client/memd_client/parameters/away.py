"""The class of a parameter whose bytes are away.

It answers for shape, dtype and device. Any other use fetches the bytes for that call, so code that
reaches around the module hooks, such as `nn.MultiheadAttention` with its `out_proj.weight`,
computes with the value. A use that is impossible that way, such as a raw pointer or a conversion in
place, raises NotResident.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import call_user
from memd_client.errors import NotResident
from memd_client.parameters.hole import allowing_metadata
from memd_client.parameters.lazy import is_list_function, list_length, one_by_one
from memd_client.parameters.parameter import (
    detached,
    entry_of,
    fetched,
    get_gradient,
    refused_swap,
    set_gradient,
    streamed,
)
from memd_client.parameters.saved_tensors import saving_by_name
from memd_client.parameters.stored_parameter import StoredParameter
from memd_client.parameters.views import mark_shared
from memd_client.transaction.metadata import asks_for_metadata, attribute_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client.core.parameter_leases import ParameterLeases
    from memd_client.parameters.parameter import StreamedParameter

_data: Any = torch._C.TensorBase.data
_detach: Any = torch._C.TensorBase.detach
_DETACHES = (torch.Tensor.detach, torch.detach)
# Programs reshape all parameters before they join them into one vector.
_RESHAPES = frozenset(
    (
        *(torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.Tensor.ravel),
        *(torch.reshape, torch.flatten, torch.ravel),
    )
)
# They hand out or replace memory without torch noticing. After the call that memory would no longer
# be the parameter's.
_RAW_FUNCTIONS = frozenset(
    (
        *("data_ptr", "storage", "untyped_storage", "_typed_storage", "_cdata", "swap_tensors"),
        *("resize_", "resize_as_", "share_memory_", "apply_", "map_", "__reduce_ex__"),
        *("numpy", "__array__", "__dlpack__", "__cuda_array_interface__"),
    )
)
_IN_PLACE_OPERATORS = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"),
        *("__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
        *("__ilshift__", "__irshift__"),
    )
)
# The place of a norm's running mean, which its running variance follows.
_RUNNING_MEAN: dict[Any, int] = {
    functional.batch_norm: 1,
    functional.instance_norm: 1,
    torch.batch_norm: 3,
    torch.instance_norm: 3,
}


class AwayParameter(StoredParameter):
    """A parameter whose bytes are in memd. It answers questions about metadata at once; anything
    else fetches the bytes for the call.
    """

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if asks_for_metadata(func):
            return _on_the_hole(func, args, kwargs)
        attribute = attribute_of(func)
        if name == "__get__" and attribute in _GETTERS:
            return _GETTERS[attribute](args[0])
        if name == "__set__" and attribute in _SETTERS:
            return _SETTERS[attribute](args[0], args[1])
        if func is torch.Tensor.requires_grad_:
            _set_requires_grad(args[0], *args[1:], **kwargs)
            return args[0]
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if func in _DETACHES:
            return entry_of(args[0]).residency.show(ParameterBytes(args[0])).detach()
        if func in _RESHAPES and args and (lazy := _differentiable(args[0])) is not None:
            return func(lazy, *args[1:], **kwargs)
        if func is torch.Tensor.module_load:
            raise refused_swap(args[0])
        if is_list_function(name) and (count := list_length(args, kwargs)) > 1:
            return one_by_one(func, args, kwargs, count)
        if "prepack" in name:
            # An operator of quantization, whose result keeps its arguments.
            args, kwargs = tree_map(_copy_if_away, (args, kwargs))
        parameters = _offloaded_in(args, kwargs)
        if name in _RAW_FUNCTIONS or attribute in _RAW_FUNCTIONS:
            for parameter in parameters:
                _refuse_unless_gathered(parameter, attribute or name)
        with fetched(parameters), saving_by_name():
            for parameter in changed_by(func, name, args, kwargs, streamed):
                entry_of(parameter).residency.expect_change()
            return call_user(func, *args, **kwargs)

    @untraced
    def detach(self) -> torch.Tensor:
        """As torch's."""
        return detached(self, sys._getframe(1))

    # As properties, since torch.compile, which sees through `__torch_function__` here, would read
    # what the hole has.
    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in memd."""
        return get_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_gradient(self, None)

    _grad = grad  # torch.optim and torch.nn.Module.to() use this name

    @property
    def data(self) -> torch.Tensor:
        """The value of each time that it is used. What is changed through it is kept."""
        return _get_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    # torch's stub has no types here.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Never called: a parameter has no key for it. That the class has one of its own makes
        torch.compile take the parameter for an object that it does not know, end a graph where it
        is used, and call the operation, which fetches the bytes. Of another subclass it would make
        a tensor of a graph, for which it needs the bytes."""
        raise AssertionError(f"{func} came to a class that has no dispatch key")

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """torch has no `__torch_function__` for it: it would replace the hole."""
        with fetched([self]):
            return self.set_(*args, **kwargs)  # of the class that it has in place

    # torch's stub has no types here.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        with fetched([self]):
            return repr(self)  # of the class that it has while its bytes are in place

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            with fetched([self]):
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "pickling")


class ParameterBytes:
    """The bytes that `detach()` of a parameter that is away shows: its value at each use, which may
    be changed through it. Any thread may call.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._entry = entry_of(parameter)
        self._copy: torch.Tensor | None = None

    def keep_copy(self, value: torch.Tensor) -> None:
        """See `residency.OwnBytes`."""
        self._copy = value

    @property
    def entry(self) -> StreamedParameter:
        return self._entry

    @property
    def name(self) -> str:
        return f"job {self._entry.job.name!r}: parameter {self._entry.shard.label!r}"

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._entry.shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._entry.shard.dtype

    @property
    def device(self) -> torch.device:
        return self._entry.shard.device

    @property
    def is_gradient(self) -> bool:
        """See `lazy.Source`."""
        return False

    @property
    def is_read_only(self) -> bool:
        return self._copy is None

    @property
    def _leases(self) -> ParameterLeases:
        return self._entry.job.unordered_leases.of(self._entry.shard)

    @property
    def takes_memory_writes(self) -> bool:
        """See `lazy.Source`."""
        return self._copy is not None or self._leases.read_privately

    @property
    def has_ended(self) -> bool:
        """See `lazy.Source`."""
        return self._copy is not None

    @contextmanager
    def using(self, *, writes: bool) -> Iterator[torch.Tensor]:
        """See `lazy.Source`."""
        if self._copy is not None:
            yield self._copy
            return
        with fetched([self._parameter]):
            if writes:
                self._entry.residency.expect_change()
            yield _detach(self._parameter)

    def memory(self) -> torch.Tensor:
        """See `lazy.Source`."""
        if self._copy is not None:
            return self._copy
        with fetched([self._parameter]):
            memory: torch.Tensor = _detach(self._parameter)
            mark_shared(memory.untyped_storage())
        return memory

    def pin(self) -> None:
        """A change through an address would go unnoticed."""
        if self._copy is None:
            _refuse(self._parameter, "data_ptr")


class _Shown(torch.autograd.Function):
    """The lazy tensor of a parameter's bytes, through which gradients reach the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        del ctx
        return entry_of(parameter).residency.show(ParameterBytes(parameter)).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient


def _differentiable(parameter: Any) -> torch.Tensor | None:
    """As `detach()`, with a gradient. None if it is no parameter, or while a transform of
    torch.func or forward differentiation would have to see through it."""
    if (
        streamed(parameter) is None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return None
    shown: torch.Tensor = _Shown.apply(parameter)  # type: ignore[no-untyped-call]
    return shown


def _offloaded_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Those included that are in place, which another thread may be about to put away."""
    leaves = tree_leaves((args, kwargs))
    return list({id(leaf): leaf for leaf in leaves if streamed(leaf) is not None}.values())


def _copy_if_away(leaf: Any) -> Any:
    return leaf if streamed(leaf) is None else leaf.detach().clone()


def changed_by(
    func: Any, name: str, args: Any, kwargs: Any, known: Callable[[Any], object]
) -> list[torch.Tensor]:
    """The parameters that `func`, which has this name, changes in place, among those that `known`
    knows. torch counts most changes, but not those of fused kernels and running statistics, nor
    those in inference mode."""
    changed = [kwargs["out"]] if "out" in kwargs else []
    if name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        changed += args[:1]
    if func in _RUNNING_MEAN:
        changed += _changed_statistics(func, args, kwargs)
    return [leaf for leaf in tree_leaves(changed) if known(leaf) is not None]


def _changed_statistics(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The running statistics of a norm, if it uses those of its input and changes them."""
    first = _RUNNING_MEAN[func]
    given = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    if len(args) > 5:
        is_training = args[5]
    elif func is functional.instance_norm:
        is_training = kwargs.get("use_input_stats", True)
    else:
        is_training = kwargs.get("training", False)
    return given if is_training else []


def _on_the_hole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
        return func(*args, **kwargs)


def _grad(
    outputs: Any, inputs: Any, *, grad_outputs: Any, materialize_grads: bool, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with the arguments that it gives `__torch_function__`."""
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        tree_map(_edge_if_away, outputs),
        tree_map(_edge_if_away, inputs),
        grad_outputs=tree_map(_shown_if_away, grad_outputs),
        **kwargs,
    )
    if not materialize_grads:
        return found
    # torch makes no zeros for an edge.
    return tuple(
        torch.zeros_like(tensor, requires_grad=kwargs["create_graph"])
        if gradient is None
        else gradient
        for gradient, tensor in zip(found, inputs, strict=True)
    )


def _shown_if_away(leaf: Any) -> Any:
    return leaf if streamed(leaf) is None else _Shown.apply(leaf)  # type: ignore[no-untyped-call]


def _edge_if_away(leaf: Any) -> Any:
    """The graph edge at which the parameter's gradient arrives, which is all that
    torch.autograd.grad needs. Fetching its arguments would bring the whole model at once.
    """
    if streamed(leaf) is None:
        return leaf
    with torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
        return get_gradient_edge(leaf)


def _refuse_unless_gathered(parameter: torch.Tensor, what: str) -> None:
    """Another thread may have it in place for all threads."""
    if not entry_of(parameter).residency.is_gathered:
        _refuse(parameter, what)


def _refuse(parameter: torch.Tensor, what: str) -> NoReturn:
    entry = entry_of(parameter)
    sentence = (
        f"job {entry.job.name!r}: the bytes of parameter {entry.shard.label!r} are in memd, and "
        f"{what} needs them in place; use p.detach().clone() for a copy, memd_client.gather(...) "
        "with write=True to change them, or save model.state_dict()"
    )
    if TracingContext.try_get() is not None:
        # torch.compile ends the graph here, and runs the program up to its own use of the bytes.
        raise sys.modules["torch._dynamo.exc"].Unsupported(sentence)
    raise NotResident(sentence)


@untraced
def _get_data(parameter: torch.Tensor) -> torch.Tensor:
    """Inside `gather()` the memory itself, also if another thread has it there; otherwise as
    `detach()`."""
    residency = entry_of(parameter).residency
    if not residency.is_gathered:
        return residency.show(ParameterBytes(parameter)).detach()
    with torch._C.DisableTorchFunctionSubclass():
        # See `InPlaceParameter.data`.
        get = _detach if residency.shard.is_on_device else _data.__get__
        value: torch.Tensor = get(parameter)
        return value


@untraced
def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """`module.to()` and its like assign the result of the conversion, which is the parameter itself
    if nothing changed.
    """
    if value is not parameter:
        entry_of(parameter).residency.replace(parameter, value)


def _set_requires_grad(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    entry_of(parameter).set_requires_grad(parameter, requires_grad)


_GETTERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": _get_data,
    "grad": get_gradient,
    "_grad": get_gradient,
}
_SETTERS: dict[str, Callable[[torch.Tensor, Any], None]] = {
    "data": _set_data,
    "grad": set_gradient,
    "_grad": set_gradient,
    "requires_grad": _set_requires_grad,
}
