"""Parameters that are away: their bytes are in memd, and come only while somebody uses them.

A parameter that is away is an `AwayParameter` over a *hole*: one NaN, expanded with stride 0 to the
full shape. Shape, dtype and device stay right (autograd checks them when it accumulates). Any other
use fetches the bytes for that call, so that code which reaches around the module hooks, such as
`nn.MultiheadAttention` with its `out_proj.weight`, computes with the value. What cannot be had so
(a raw pointer, a conversion in place) raises NotResident. Nothing ever computes with the hole.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from itertools import groupby
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from memd_client import saved_tensors as saved
from memd_client.errors import MemdError, NotResident
from memd_client.gradients import GradientSlot
from memd_client.leases import MODE_READ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memd_client.early import EarlyUpdates
    from memd_client.session import Session
    from memd_client.shard import Shard

# Answered by the hole: nothing of the bytes is in the answer.
_METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_signed,
        torch.Tensor.get_device,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.__hash__,
        torch.Tensor.__len__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
_METADATA_ATTRIBUTES = frozenset(
    (
        *("shape", "dtype", "device", "layout", "names", "ndim", "itemsize", "nbytes", "name"),
        *("requires_grad", "is_leaf", "grad_fn", "_grad_fn", "output_nr", "retains_grad", "_base"),
        *("grad_dtype", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia"),
        *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla"),
        *("is_xpu", "_has_symbolic_sizes_strides", "_python_dispatch"),
    )
)
# They hand out or replace memory behind torch's back; after the call the memory would not be the
# parameter's any more.
_RAW_FUNCTIONS = frozenset(
    (
        *("data_ptr", "storage", "untyped_storage", "_typed_storage", "_cdata", "swap_tensors"),
        *("resize_", "resize_as_", "share_memory_", "apply_", "map_", "__reduce_ex__"),
        *("numpy", "__array__", "__dlpack__", "__cuda_array_interface__"),
    )
)

_holes: dict[torch.dtype, torch.Tensor] = {}


def streamed(parameter: torch.Tensor) -> StreamedParameter | None:
    """The entry of an offloaded parameter; None for every other tensor."""
    entry: StreamedParameter | None = saved.parameters.get(parameter)
    return entry


def _hole(shard: Shard) -> torch.Tensor:
    hole = _holes.get(shard.dtype)
    if hole is None:
        hole = _holes[shard.dtype] = torch.full((), float("nan"), dtype=shard.dtype)
    return hole.expand(shard.shape)


class StreamedParameter:
    """One offloaded parameter, the unit of leasing. Away while nobody uses it, resident (an
    ordinary `nn.Parameter` over a lease) while somebody does. `fetch`, `fetch_resident`,
    `fetch_together` and `release` are the only functions that move it; any thread may call them,
    and `fetch` and `fetch_together` wait for the daemon.
    """

    def __init__(
        self, parameter: nn.Parameter, *, shard: Shard, update_count: int, session: Session
    ) -> None:
        self.shard = shard
        self.session = session
        self.gradient = GradientSlot(shard)
        self.update_count = update_count  # Adam's t
        # Of the optimizer that has it, where its updates begin during backward.
        self.early: weakref.ref[EarlyUpdates] | None = None
        self._parameter = weakref.ref(parameter)
        self._lock = RLock()
        self._user_count = 0
        self._writing = False
        self._write_count = 0
        # `_write_count` before the update that a step is to make, and after it.
        self._updated_from, self._updated_count = 0, 0
        self._undone_count = 0  # changes after `_write_count` that came to nothing
        self._version = parameter._version
        self._hole = _hole(shard)
        self._hooked = False
        self._put_away(parameter)
        saved.parameters[parameter] = self
        session.entries.add(self)
        self.hook_if_trainable(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        """None where the module was dropped."""
        return self._parameter()

    @property
    def write_count(self) -> int:
        """Names the value by the changes so far, by whomever; those in place that memd does not
        have yet included. The name of an update that came to nothing goes to no other value: what
        autograd saved under it would pass for a later one."""
        parameter = self._parameter()
        if not self._user_count or parameter is None or parameter._version == self._version:
            return self._write_count
        return self._write_count + self._undone_count + parameter._version - self._version

    def fetch(self, parameter: torch.Tensor, *, mode: int = MODE_READ) -> None:
        """The parameter's bytes are in place until `release`."""
        with self._lock:
            if not self._join_users(mode):
                self.refuse_if_changed(parameter)
                leases = self.session.leases_of(self.shard)
                self._put_in_place(parameter, leases.value(self.shard, mode), mode)
            self._user_count += 1

    def fetch_resident(self, parameter: torch.Tensor) -> bool:
        """As `fetch` for reading, where that takes no request; else nothing has changed."""
        with self._lock:
            if not self._join_users(MODE_READ):
                self.refuse_if_changed(parameter)
                lease = self.session.leases_of(self.shard).resident(self.shard)
                if lease is None:
                    return False
                self._put_in_place(parameter, lease, MODE_READ)
            self._user_count += 1
            return True

    @staticmethod
    def fetch_together(
        wanted: Sequence[tuple[StreamedParameter, torch.Tensor]], *, mode: int
    ) -> None:
        """As `fetch` of each, all or none; those of one session wait for the daemon all at once."""
        held: list[tuple[StreamedParameter, torch.Tensor]] = []
        absent: list[tuple[StreamedParameter, torch.Tensor]] = []
        try:
            with ExitStack() as locks:
                for entry, parameter in sorted(wanted, key=lambda each: each[0].lock_order):
                    with ExitStack() as lock:
                        lock.enter_context(entry._lock)
                        if entry._join_users(mode):
                            entry._user_count += 1
                            held.append((entry, parameter))
                        else:  # nobody else brings it meanwhile
                            absent.append((entry, parameter))
                            locks.push(lock.pop_all())
                found: list[torch.Tensor] = []
                for _, group in groupby(absent, key=lambda each: id(each[0].session)):
                    leases = None
                    shards = []
                    for entry, parameter in group:
                        entry.refuse_if_changed(parameter)
                        leases = entry.session.leases_of(entry.shard)
                        shards.append(entry.shard)
                    assert leases is not None
                    found += leases.values(shards, mode)
                for (entry, parameter), lease in zip(absent, found, strict=True):
                    entry._put_in_place(parameter, lease, mode)
                    entry._user_count += 1
                    held.append((entry, parameter))
        except BaseException:
            let_go(held)
            raise

    @property
    def lock_order(self) -> tuple[int, int]:
        """Who takes several locks of parameters at a time takes them in this order; the gradient's
        after that of its parameter."""
        return id(self.session), self.shard.shard_id

    def _join_users(self, mode: int) -> bool:
        """Whether there are any, and the bytes in place serve `mode`."""
        if self._user_count and mode != MODE_READ and not self._writing:
            raise MemdError(
                f"job {self.session.job!r}: parameter {self.shard.name!r} is in use for "
                "reading; leave that module call or gather() before gather(write=True)"
            )
        return self._user_count > 0

    def release(self, parameter: torch.Tensor) -> None:
        """Gives back one `fetch`. After the last one the bytes are away, and what was changed in
        place is in memd.
        """
        with self._lock:
            self._user_count -= 1
            if self._user_count > 0:
                return
            change_count = parameter._version - self._version
            # memd takes what changed under a writing lease when it ends; of a change under a lease
            # for reading it knows nothing, so that one is written again.
            copied = change_count > 0 and not self._writing
            changed = parameter.detach().clone() if copied else None
            if self._writing or change_count:
                # Through `.data`, changes under a writing lease are not counted.
                self._note_changes(max(change_count, 1))
                self.session.mark_written()
            self._put_away(parameter)
            if changed is not None:
                self.session.leases_of(self.shard).write(self.shard, changed)

    def refuse_if_resident(self, what: str) -> None:
        """`what` changes the value in memd, which users of the bytes in place would not see."""
        with self._lock:
            if self._user_count:
                raise MemdError(
                    f"job {self.session.job!r}: parameter {self.shard.name!r} is in use; leave "
                    f"gather() and module calls before {what}"
                )

    def write(self, value: torch.Tensor) -> None:
        """Replaces the value; durable with the next step or when the session is closed."""
        with self._lock:
            self.session.leases_of(self.shard).write(self.shard, value)
            self._note_changes(1)
            self.session.mark_written()

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed other threads neither bring the value nor touch the gradient.
        These locks come after the turn of `steps.Steps` and before the lock of that."""
        held.enter_context(self._lock)
        self.gradient.hold_still(held)

    def begin_update(self) -> None:
        """A step has the gradient and will change the value."""
        self.gradient.forget()
        self._updated_from = self._write_count
        self._note_changes(1)
        self._updated_count = self._write_count

    def undo_update(self) -> None:
        """That step came to nothing: the value is the one before it."""
        self.gradient.take_back()
        if self._write_count == self._updated_count:
            self._undone_count = self._write_count - self._updated_from
            self._write_count = self._updated_from

    def reread(self) -> torch.Tensor:
        """The bytes for backward: those in place, or a lease that lives as long as autograd holds
        it.
        """
        with self._lock:
            parameter = self._parameter()
            if self._user_count and parameter is not None:
                return parameter.detach()
            leases = self.session.leases_of(self.shard)
            if not leases.step.settle_answered() and not leases.step.is_open:
                leases.gradient_order.expect_backward(self.shard.shard_id)
            lease = leases.value(self.shard, MODE_READ)
            saved.remember(lease, self)
            return lease

    def hook_if_trainable(self, parameter: torch.Tensor) -> None:
        """Gradients go to memd from now on. torch takes hooks only of tensors that require a
        gradient.
        """
        if parameter.requires_grad and not self._hooked:
            parameter.register_post_accumulate_grad_hook(_take_gradient)
            self._hooked = True

    def _note_changes(self, count: int) -> None:
        self._write_count += self._undone_count + count
        self._undone_count = 0

    def refuse_if_changed(self, parameter: torch.Tensor) -> None:
        """Before the bytes are brought."""
        with torch._C.DisableTorchFunctionSubclass():
            version, self._version = self._version, parameter._version
        if self._version != version:
            raise MemdError(
                f"job {self.session.job!r}: parameter {self.shard.name!r} was changed through "
                "a tensor that shares its bytes (detach() or a view) after the bytes went "
                "away, and the change is lost; change parameters inside gather(write=True)"
            )

    def _put_in_place(self, parameter: torch.Tensor, lease: torch.Tensor, mode: int) -> None:
        saved.remember(lease, self)
        with torch._C.DisableTorchFunctionSubclass():
            # The class changes while the bytes are in place, so that no thread sees an ordinary
            # parameter over the hole.
            parameter.data = lease
        parameter.__class__ = nn.Parameter
        self._writing = mode != MODE_READ

    def _put_away(self, parameter: torch.Tensor) -> None:
        self._writing = False
        self._version = parameter._version
        parameter.__class__ = AwayParameter
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = self._hole


def _take_gradient(parameter: torch.Tensor) -> None:
    """Post-accumulate hook: autograd has just set or added to `grad`, which holds only what came
    since the last call.
    """
    entry = streamed(parameter)
    if entry is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    early = entry.early() if entry.early is not None else None
    if early is not None and entry.gradient.present:
        early.refuse_second(entry.session, entry.shard)
    leases = entry.session.gradient_leases_of(entry.shard)
    entry.gradient.accumulate(gradient, leases)
    if early is not None:
        early.gradient_is_final(entry.session, entry.shard, leases)


def bring(
    parameters: Iterable[torch.Tensor], *, mode: int = MODE_READ
) -> list[tuple[StreamedParameter, torch.Tensor]]:
    """The bytes of those that are offloaded are in place until `let_go` of what this returns; the
    others are let be. All or none. Those that are not in memory are asked for before the first of
    them is waited for."""
    held: list[tuple[StreamedParameter, torch.Tensor]] = []
    missing: list[tuple[StreamedParameter, torch.Tensor]] = []
    try:
        for parameter in parameters:
            entry = streamed(parameter)
            if entry is None:
                continue
            is_there = mode == MODE_READ and entry.fetch_resident(parameter)
            (held if is_there else missing).append((entry, parameter))
        if missing:
            StreamedParameter.fetch_together(missing, mode=mode)
            held += missing
    except BaseException:
        let_go(held)
        raise
    return held


def let_go(held: list[tuple[StreamedParameter, torch.Tensor]]) -> None:
    """Of all, in the reverse order, also where one of them raises."""
    try:
        while held:
            entry, parameter = held.pop()
            entry.release(parameter)
    except BaseException:
        with ExitStack() as rest:
            for entry, parameter in held:
                rest.callback(entry.release, parameter)
        raise


@contextmanager
def fetched(parameters: Iterable[torch.Tensor], *, mode: int = MODE_READ) -> Iterator[None]:
    """Their bytes are in place inside: see `bring`."""
    held = bring(parameters, mode=mode)
    try:
        yield
    finally:
        let_go(held)


class AwayParameter(nn.Parameter):
    """A parameter whose bytes are elsewhere. Metadata is answered at once; anything else fetches
    the bytes for the call.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # `parameter.shape` arrives as the __get__ of an attribute named shape.
        attribute = (
            getattr(getattr(func, "__self__", None), "__name__", "")
            if name in {"__get__", "__set__"}
            else ""
        )
        if func in _METADATA_FUNCTIONS or (name == "__get__" and attribute in _METADATA_ATTRIBUTES):
            return _on_the_hole(func, args, kwargs)
        if name == "__get__" and attribute in _GETTERS:
            return _GETTERS[attribute](args[0])
        if name == "__set__" and attribute in _SETTERS:
            return _SETTERS[attribute](args[0], args[1])
        if func is torch.Tensor.requires_grad_:
            _set_requires_grad(args[0], *args[1:], **kwargs)
            return args[0]
        if func is torch.autograd.grad:
            return func(*tree_map(_edge_if_away, args), **tree_map(_edge_if_away, kwargs))
        if name in _RAW_FUNCTIONS or attribute in _RAW_FUNCTIONS:
            _refuse(_away_in(args, kwargs)[0], attribute or name)
        with fetched(_away_in(args, kwargs)), saved.saving_by_name():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with bytes of its own."""
        if id(self) not in memo:
            with fetched([self]):
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "pickling")


def _away_in(args: Any, kwargs: Any) -> list[AwayParameter]:
    unique = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is AwayParameter}
    return list(unique.values())


def _on_the_hole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _edge_if_away(leaf: Any) -> Any:
    """Where the gradient of a parameter arrives in the graph: all that torch.autograd.grad needs of
    it. Fetching every parameter that it was given would bring the whole model at once.
    """
    if type(leaf) is not AwayParameter:
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(leaf)


def _entry(parameter: AwayParameter) -> StreamedParameter:
    entry = streamed(parameter)
    if entry is None:
        raise MemdError("an AwayParameter that memd does not know; was it made by hand?")
    return entry


def _refuse(parameter: AwayParameter, what: str) -> NoReturn:
    entry = _entry(parameter)
    raise NotResident(
        f"job {entry.session.job!r}: the bytes of parameter {entry.shard.name!r} are in memd, and "
        f"{what} needs them in place; use it inside memd_client.gather(...), with write=True to "
        "change them, or save model.state_dict()"
    )


def _get_data(parameter: AwayParameter) -> NoReturn:
    # What `.data` returns may be written to without torch or memd noticing.
    _refuse(parameter, ".data")


def _set_data(parameter: AwayParameter, value: torch.Tensor) -> None:
    """`module.to()` and its like assign what the conversion returned, which is the parameter itself
    where nothing changed.
    """
    if value is parameter:
        return
    entry = _entry(parameter)
    if (
        value.shape != entry.shard.shape
        or value.dtype != entry.shard.dtype
        or value.device.type != "cpu"
    ):
        raise NotResident(
            f"job {entry.session.job!r}: parameter {entry.shard.name!r} is in memd as "
            f"{entry.shard.dtype} {list(entry.shard.shape)} and cannot become {value.dtype} "
            f"{list(value.shape)} on {value.device} there; convert before offload(), or "
            "copy.deepcopy the module and convert the copy"
        )
    entry.write(value.detach())


def _get_grad(parameter: AwayParameter) -> torch.Tensor | None:
    entry = _entry(parameter)
    if not entry.gradient.present:
        return None
    return entry.gradient.tensor(entry.session.leases_of(entry.shard))


def _set_grad(parameter: AwayParameter, value: torch.Tensor | None) -> None:
    entry = _entry(parameter)
    if value is None:
        entry.gradient.forget()
    else:
        entry.gradient.replace(value, entry.session.leases_of(entry.shard))


def _set_requires_grad(parameter: AwayParameter, requires_grad: bool = True) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad = requires_grad
    _entry(parameter).hook_if_trainable(parameter)


_GETTERS: dict[str, Callable[[AwayParameter], Any]] = {
    "data": _get_data,
    "grad": _get_grad,
    "_grad": _get_grad,
}
_SETTERS: dict[str, Callable[[AwayParameter, Any], None]] = {
    "data": _set_data,
    "grad": _set_grad,
    "_grad": _set_grad,
    "requires_grad": _set_requires_grad,
}
