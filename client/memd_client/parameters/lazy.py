"""Tensors whose bytes are leased for each operation, and only for it.

`p.grad` of an offloaded parameter is one, and `detach()` of a parameter that is away. They have
shape, strides and dtype, and no memory. torch gives every operation on them to
`__torch_dispatch__`, below autograd, so any torch function computes with the bytes, in C++ too.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import cache
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memd_client.base.dynamo import untraced
from memd_client.errors import InvalidArgument, NotResident

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from contextlib import AbstractContextManager

# Functions over lists of tensors that compute with one place of the lists after the other.
_LIST_FUNCTIONS = ("_foreach_", "_fused_", "_amp_foreach_")
# A dispatch key of torch's own tests, which nobody else has. Operations fall through it, but those
# that have a kernel here and in `casts.py`.
NOTED_KEY = "TESTING_ONLY_GenericMode"
noted_keys: Any = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(NOTED_KEY))
# `nn.Parameter(tensor)`, as the caller of `tensor.detach()`.
NEW_PARAMETER = nn.Parameter.__new__.__code__
_COLLECTIVES = "c10d"  # their schemas do not say what they change
_detach: Any = torch.ops.aten.detach.default
_detach_in_place: Any = torch.ops.aten.detach_.default
_taken_over: dict[Any, Callable[..., bool]] = {}  # see `take_over`
_JOINS = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})


class Source(Protocol):
    """The bytes of one shard, the unit of leasing, for all lazy tensors that show them."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def using(self, *, writes: bool) -> AbstractContextManager[torch.Tensor]:
        """Inside, all of the bytes in memory, contiguous. No variable may keep the tensor: a
        traceback would."""
        ...

    @property
    def is_gradient(self) -> bool:
        """In torch, an assignment of it to another `grad` shares it."""
        ...

    @property
    def is_read_only(self) -> bool:
        """Changes of `memory` are noticed later, or not at all."""
        ...

    @property
    def takes_memory_writes(self) -> bool:
        """Changes of `memory` by programs that are not torch are noticed."""
        ...

    @property
    def has_ended(self) -> bool:
        """Those who show it have a copy of their own, as of its end."""
        ...

    def memory(self) -> torch.Tensor:
        """As `using`, until the result is freed: for those who ask for the memory itself."""
        ...

    def pin(self) -> None:
        """The address of the bytes must not change while somebody holds them."""
        ...


class LazyTensor(torch.Tensor):
    """A strided view of a source's bytes. It computes as a `torch.Tensor` does, and its views are
    lazy too. It holds no lease; `numpy()` and its like, which show the memory itself, do.
    """

    _source: Source
    # The lazy tensor that this is a view of. It shares its version with its views, by which
    # autograd notices changes.
    _root: LazyTensor | None
    # Functions see an ordinary tensor, and their operations come to `__torch_dispatch__`. torch's
    # stub has it as a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def over(
        source: Source, form: torch.Tensor | None = None, root: LazyTensor | None = None
    ) -> LazyTensor:
        """All bytes of `source`, or the view of them that `form`, a tensor on meta, has."""
        if torch.is_inference_mode_enabled():
            # A gradient is no inference tensor, and a view of it is none, wherever it is taken.
            with torch.inference_mode(False):
                return LazyTensor.over(source, form, root)
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            source.shape if form is None else form.size(),
            strides=None if form is None else form.stride(),
            storage_offset=None if form is None else form.storage_offset(),
            dtype=source.dtype if form is None else form.dtype,
            device=source.device,
            _extra_dispatch_keys=noted_keys,
        )
        lazy._source = source
        lazy._root = root
        # Functions that ask for the address without the dispatcher would get null.
        torch._C._set_throw_on_mutable_data_ptr(lazy)
        return lazy

    def note_change(self) -> None:
        """The bytes change by other means than this tensor: autograd must refuse to use what it
        has saved of it and its views."""
        increment_version(self)

    @property
    def source(self) -> Source:
        """The bytes that it shows."""
        return self._source

    @property
    def has_ended(self) -> bool:
        """Its memory is nobody else's: see `Source`."""
        return self._source.has_ended

    def is_view_of(self, other: LazyTensor) -> bool:
        """Whether both show the same bytes."""
        return self._source is other._source

    def shown_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view that this is, of `whole`: contiguous, in its source's shape and dtype."""
        return _shown(self, whole)

    def refuse_sharing(self) -> NoReturn:
        """Another tensor can't have the same memory."""
        _refuse([self], "sharing it by .data = ...")

    # torch's stub has no types here.
    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _detach_in_place:
            return args[0]
        if func is _detach:
            return _view_of(args[0], _form(args[0]))
        if func.is_view:
            return _view(func, args, kwargs)
        compute = _taken_over.get(func)
        if compute is not None and compute(*args, **kwargs):
            return None
        name = func.overloadpacket.__name__
        if torch.Tag.inplace_view in func.tags:
            _refuse(args, f"{name}()")
        if is_list_function(name) and (count := list_length(args, kwargs)) > 1:
            return one_by_one(func, args, kwargs, count)
        if func in _JOINS:
            # Their leases together may be more than there is room for.
            args = tree_map(lambda leaf: leaf.clone() if _is_lazy(leaf) else leaf, args)
            return func(*args, **kwargs)
        return _compute(func, args, kwargs)

    def detach(self) -> torch.Tensor:
        """As torch's. `nn.Parameter(lazy)` calls it too, for a parameter over the same bytes.

        Raises:
            NotResident: that is the caller. The parameter would have no memory of its own.
        """
        if sys._getframe(1).f_code is NEW_PARAMETER:
            raise NotResident(
                f"{self._source.name} is in memd, and nn.Parameter(...) would share its bytes; use "
                "nn.Parameter(p.detach().clone()), and register parametrizations such as "
                "weight_norm before offload()"
            )
        return super().detach()

    @property
    def data(self) -> torch.Tensor:
        """As `detach()`."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            _refuse([self], "another shape or dtype in .data")
        with torch.no_grad():
            self.detach().copy_(value)

    def in_memory(self) -> torch.Tensor:
        """An ordinary tensor over the bytes themselves, which keeps their lease while it lives."""
        return _shown(self, self._source.memory())

    # torch's stubs have other types for some of these.
    def numpy(self, *, force: bool = False) -> Any:
        """Over the bytes themselves, as torch's."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return self._protected(self.in_memory().numpy(force=force))

    def __array__(self, dtype: Any = None) -> Any:
        return self._protected(self.in_memory().__array__(dtype))

    def _protected(self, array: Any) -> Any:
        if not self._source.takes_memory_writes:
            array.flags.writeable = False
        return array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.in_memory().__dlpack__(**arguments)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory itself, as torch's."""
        return self.in_memory().untyped_storage()

    def _typed_storage(self) -> torch.TypedStorage:
        storage: torch.TypedStorage = self.in_memory()._typed_storage()
        return storage

    def data_ptr(self) -> int:
        """Valid until the bytes end, as a gradient does at `step()`, if you hold this tensor."""
        self._source.pin()
        return self.in_memory().data_ptr()

    def tolist(self) -> Any:
        """As torch's."""
        return self.clone().tolist()

    def apply_(self, function: Callable[[Any], Any]) -> torch.Tensor:
        """As torch's."""
        self.copy_(self.clone().apply_(function))
        return self

    def map_(self, other: torch.Tensor, function: Callable[[Any, Any], Any]) -> torch.Tensor:
        """As torch's."""
        self.copy_(self.clone().map_(other.clone(), function))
        return self

    def share_memory_(self) -> NoReturn:
        """Other processes can't see a lease."""
        _refuse([self], "share_memory_()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return repr(self.detach().clone().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor with bytes of its own."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        copy: torch.Tensor = memo[id(self)]
        return copy


def take_over(func: Any, compute: Callable[..., bool]) -> None:
    """From now on `compute` has the operation `func`, which returns nothing, on lazy tensors: it
    gets the arguments. Where it returns False, the operation goes on as any other."""
    _taken_over[func] = compute


def is_list_function(name: str) -> bool:
    """Whether torch's function of this name takes lists of tensors and computes with one place of
    them after the other."""
    return name.startswith(_LIST_FUNCTIONS)


def list_length(args: Iterable[Any], kwargs: dict[str, Any]) -> int:
    """The length of the lists among the arguments, of which some may be empty; 0 if they differ,
    which is torch's to refuse."""
    given = (*args, *kwargs.values())
    lengths = {len(each) for each in given if isinstance(each, list | tuple) and each}
    return lengths.pop() if len(lengths) == 1 else 0


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
    """A list function over one place of its lists, of length `count`, after the other. The bits
    are the same, and the leases of one place are enough."""

    def at(index: int, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return value[index : index + 1]
        if (
            isinstance(value, torch.Tensor)
            and value.ndim == 1
            and "_foreach_addc" in str(getattr(func, "__name__", ""))
        ):
            return value[index : index + 1]  # the scalars of all places in one tensor
        return value

    results = [
        func(*(at(index, arg) for arg in args), **{key: at(index, kwargs[key]) for key in kwargs})
        for index in range(count)
    ]
    if not isinstance(results[0], list | tuple):
        return results[0]
    return type(results[0])(each for result in results for each in result)


def _is_lazy(leaf: Any) -> bool:
    return isinstance(leaf, LazyTensor)


def _form(lazy: LazyTensor) -> torch.Tensor:
    """A tensor on meta: `lazy` without its bytes."""
    whole = torch.empty(lazy._source.shape, dtype=lazy._source.dtype, device="meta")
    return _shown(lazy, whole)


def _shown(lazy: LazyTensor, whole: torch.Tensor) -> torch.Tensor:
    """The view of `whole`, all bytes of its source, that `lazy` is."""
    size, stride, offset = lazy.size(), lazy.stride(), lazy.storage_offset()
    if lazy.dtype != whole.dtype:
        whole = whole.detach().view(-1).view(lazy.dtype)
    elif size == whole.shape and stride == whole.stride() and not offset:
        return whole
    return whole.as_strided(size, stride, int(whole.storage_offset()) + int(offset))


def _view_of(lazy: LazyTensor, form: torch.Tensor) -> LazyTensor:
    return LazyTensor.over(lazy._source, form, lazy if lazy._root is None else lazy._root)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view takes no bytes."""

    def over(form: Any) -> Any:
        if not isinstance(form, torch.Tensor):
            return form
        if form.is_conj() or form.is_neg():
            _refuse(args, "a view of its conjugate")
        return _view_of(args[0], form)

    forms = func(*tree_map(lambda leaf: _form(leaf) if _is_lazy(leaf) else leaf, args), **kwargs)
    return tree_map(over, forms)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other operation, over leases that end with it."""
    leaves, structure = tree_flatten((args, kwargs))
    lazies = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
    written = {id(lazy._source) for lazy in _written_by(func, args, kwargs)}
    shown: dict[int, torch.Tensor] = {}
    with ExitStack() as held:
        try:
            _bring(lazies, written, shown, held)
            leaves = [shown.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, structure)
            # If two are the same view, the first is the one that is changed.
            return _returned(
                func(*args, **kwargs), {id(shown[id(lazy)]): lazy for lazy in reversed(lazies)}
            )
        except BaseException as error:
            # Frames of the operation refer to the leases for as long as somebody keeps the error.
            clear_frames(error.__traceback__)
            raise
        finally:
            # Before `held` is closed: a source that writes a change back needs no second slot then.
            shown.clear()
            leaves.clear()
            args, kwargs = (), {}


def _bring(
    lazies: list[LazyTensor],
    written: Collection[int],
    shown: dict[int, torch.Tensor],
    held: ExitStack,
) -> None:
    """Puts an ordinary tensor for each of `lazies` into `shown`, until `held` is closed. Those of
    one source share its lease."""
    whole: dict[int, torch.Tensor] = {}
    for lazy in lazies:
        source = lazy._source
        if id(source) not in whole:
            whole[id(source)] = held.enter_context(source.using(writes=id(source) in written))
        if id(lazy) not in shown:
            shown[id(lazy)] = _shown(lazy, whole[id(source)])


def _returned(result: Any, lazies: dict[int, LazyTensor]) -> Any:
    """An operation in place returns the tensor that was changed."""
    if isinstance(result, torch.Tensor):
        return lazies.get(id(result), result)
    return tree_map(lambda leaf: lazies.get(id(leaf), leaf), result)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LazyTensor]:
    changed = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _written_arguments(func)
    ]
    lazies = [leaf for leaf in tree_leaves(changed) if isinstance(leaf, LazyTensor)]
    if func.namespace == _COLLECTIVES:
        # A collective writes after its call: a value that is copied back by then misses that, and
        # is refused as written in silence.
        return [lazy for lazy in lazies if not lazy._source.is_read_only]
    return lazies


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if func.namespace == _COLLECTIVES
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _refuse(args: Iterable[Any], what: str) -> NoReturn:
    lazy = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, LazyTensor))
    raise InvalidArgument(
        f"{lazy._source.name} is in memd, and {what} is not possible there; use a clone()"
    )


def _refuse_sharing(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """The kernel of the check before `tensor.data = value`, which would make a tensor without
    memory of `tensor`. torch's kernels read its address unchecked, and end the process. A gradient
    that `module.cpu()` has converted to itself shares nothing."""
    if isinstance(value, LazyTensor) and value is not tensor:
        value.refuse_sharing()
    with torch._C._ExcludeDispatchKeyGuard(noted_keys):
        is_compatible: bool = torch._has_compatible_shallow_copy_type(tensor, value)
    return is_compatible


def _register() -> list[torch.library.Library]:
    """torch forgets what was registered when the result is dropped."""
    fallback = torch.library.Library("_", "IMPL", NOTED_KEY)
    fallback.fallback(torch.library.fallthrough_kernel)
    kernel = torch.library.Library("aten", "IMPL", NOTED_KEY)
    kernel.impl("_has_compatible_shallow_copy_type", _refuse_sharing)
    return [fallback, kernel]


_registered = _register()
