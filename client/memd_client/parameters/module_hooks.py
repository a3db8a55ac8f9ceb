"""Bringing parameters to the modules that use them, for as long as they use them.

Nothing is patched and no backward hooks are needed (docs/decisions/parameters-away.md says why):

* forward pre-hooks fetch a module's own parameters, and forward hooks release them (`always_call`:
  after an exception too);
* every module call pushes the hooks of `saved_tensors.py`, unless they are active, so that
  autograd does not keep a parameter's bytes;
* the hooks are plain functions that look parameters up. In a copy of the module, whose parameters
  memd does not know, they do nothing;
* a graph of torch.compile ends at them. A module that is compiled by itself, a *unit*, brings all
  parameters below it, and its graph goes through the hooks below it (docs/decisions/compile.md).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from memd_client.base.dynamo import (
    is_compiled,
    makes_constants,
    traced_if_inlined,
    untraced,
    untraced_itself,
)
from memd_client.base.identity import ByIdentity
from memd_client.base.interrupts import interrupts
from memd_client.base.kept_memory import keep_in_place
from memd_client.base.sizes import UPDATE_BYTES, format_size
from memd_client.base.stalls import note_module_calls
from memd_client.core.backward import note_backward
from memd_client.errors import CapacityError, NotResident, NotYet
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.parameter import bring, streamed
from memd_client.parameters.residency import release_all, residency_of_storage
from memd_client.parameters.saved_tensors import save_by_name_hooks
from memd_client.parameters.tiles import tiling_of
from memd_client.transaction.module_names import plain_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.autograd.graph import saved_tensors_hooks

    from memd_client.parameters.residency import Held, Residency
    from memd_client.parameters.saved_activations import Activations
    from memd_client.parameters.tiles import Tiling

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# torch gives each hook a number of its own, and guards on it: each block of a model would be
# compiled anew, and after eight of them torch gives up. All modules share this one, which torch
# gives to nobody else.
_HOOK_ID = RemovableHandle(OrderedDict()).id


@dataclass(frozen=True, slots=True)
class _Copy:
    """A parameter's value in a state_dict, which may be gone by now."""

    key: str
    copy: ref[torch.Tensor]
    write_count: int


# The last copy of each parameter.
_copies: ByIdentity[Residency | Tiling, _Copy] = ByIdentity()


class _Frame:
    """A module call that this thread is in. Its cost counts, since every module call has one: two
    context managers on an `ExitStack` took 20 µs."""

    __slots__ = ("_held", "_hooks", "_module")

    is_compiled = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks: saved_tensors_hooks | None = None
        self._held: Held = []

    def is_of(self, module: nn.Module) -> bool:
        return self._module is module

    def open(self) -> None:
        hooks = save_by_name_hooks(_storing_in(self._module))
        if hooks is not None:
            hooks.__enter__()
            self._hooks = hooks
        self._held = bring(self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        return own_parameters(self._module)

    def close(self) -> None:
        try:
            release_all(self._held)
        finally:
            if self._hooks is not None:
                self._hooks.__exit__()


class _CompiledFrame(_Frame):
    """A module call inside a compiled function."""

    __slots__ = ()

    is_compiled = True


class _UnitFrame(_CompiledFrame):
    """A call of a unit."""

    __slots__ = ()

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())


class _ModuleCalls(local):
    """The module calls that one thread is in, the innermost last."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self._raised_count = interrupts.raised_count

    def enter(self, module: nn.Module) -> None:
        self._push(_Frame(module))

    def enter_compiled(self, module: nn.Module) -> None:
        if makes_constants():
            _refuse_constants(module)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            _refuse_transform(module)
        _refuse_on_device(module)
        _refuse_stored_activations(module)
        frames = self._frames
        is_outermost = not frames or not frames[-1].is_compiled
        is_unit = _units.has(module, is_outermost=is_outermost)
        self._push(_UnitFrame(module) if is_unit else _CompiledFrame(module))

    def leave(self, module: nn.Module) -> None:
        """Does nothing if a hook of somebody else failed before ours was called: then no frame of
        `module` is on top."""
        frames = self._frames
        if frames and frames[-1].is_of(module):
            self._close_last(frames)

    def leave_all(self) -> None:
        self._leave_inner(0)

    def _leave_interrupted(self) -> None:
        """Leaves those that an interrupt has ended: torch runs no forward hooks then. The others
        are on this thread's stack. This is called as the first hook of a module call, which is the
        innermost there and has no frame yet."""
        self._raised_count = interrupts.raised_count
        living = _modules_on_the_stack()[:-1]
        kept = position = 0
        for frame in self._frames:
            while position < len(living) and not frame.is_of(living[position]):
                position += 1
            if position == len(living):
                break
            position += 1
            kept += 1
        self._leave_inner(kept)

    def _leave_inner(self, kept: int) -> None:
        while len(self._frames) > kept:
            self._close_last(self._frames)

    def _push(self, frame: _Frame) -> None:
        frames = self._frames
        if self._raised_count != interrupts.raised_count:
            self._leave_interrupted()
        if not frames:
            note_module_calls(True)
            note_backward()
        # Before anything can fail: torch calls `_leave` after a failed pre-hook too.
        frames.append(frame)
        frame.open()

    @staticmethod
    def _close_last(frames: list[_Frame]) -> None:
        frame = frames.pop()
        if not frames:
            note_module_calls(False)
        frame.close()


class _Units:
    """The modules that were compiled by themselves. A model that was offloaded is none, as it may
    be larger than memory: compiled whole, it is one graph for each module that has parameters."""

    def __init__(self) -> None:
        self._models: WeakSet[nn.Module] = WeakSet()
        self._units: WeakSet[nn.Module] = WeakSet()

    def add_model(self, model: nn.Module) -> None:
        self._models.add(model)

    def has(self, module: nn.Module, *, is_outermost: bool) -> bool:
        """`module` is called inside a compiled function. `is_outermost`: none around it is."""
        if module in self._units:
            return True
        if not is_outermost or module in self._models:
            return False
        _refuse_small_host(module)
        for child in module.modules():
            if child is not module and _HOOK_ID in child._forward_hooks:
                _hook(child, _enter_unless_traced, _leave_unless_traced)
        self._units.add(module)
        return True


_calls = _ModuleCalls()
# Those of modules whose activations are offloaded. A copy of a module has none.
_activations: WeakKeyDictionary[nn.Module, Activations] = WeakKeyDictionary()
_units = _Units()
_CALL = nn.Module._call_impl.__code__


def _storing_in(module: nn.Module) -> Activations | None:
    """The hooks that store what autograd saves in a call of `module`."""
    if not _activations:
        return None
    found = _activations.get(module)
    return found if found is not None and found.may_store else None


def _modules_on_the_stack() -> list[nn.Module]:
    """The modules that this thread is calling, the innermost last."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


class _UncountedHooks(OrderedDict[int, Any]):
    """A module's hooks, of which memd's are not counted: `nn.TransformerEncoderLayer` leaves its
    one kernel if it or a child has any, and the others round differently. torch.compile takes
    dictionaries alone, and reads what this one says."""

    def __len__(self) -> int:
        return sum(key != _HOOK_ID for key in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)


def stream(module: nn.Module) -> None:
    """From now on a module call fetches the parameters of `module` that it needs."""
    for name, child in module.named_modules():
        if not plain_name(module, name):
            _units.add_model(child)
        # Without parameters a module needs nothing, and graphs go through it.
        if next(child.parameters(), None) is not None:
            _hook(child, _enter, _leave)
            child.register_state_dict_post_hook(_copy_out)
        # torch.jit.script() calls it, before it fails at these hooks.
        child.__prepare_scriptable__ = _refuse_scripting


def store_activations(module: nn.Module, activations: Activations) -> None:
    """From now on what autograd saves in calls of `module`, or of a part of it that has parameters,
    is stored by `activations`. Its parameters are offloaded."""
    for child in module.modules():
        for buffer in child.buffers(recurse=False):
            keep_in_place(buffer)
        if _HOOK_ID in child._forward_hooks:
            _activations[child] = activations


def _hide_hooks(layer: nn.TransformerEncoderLayer) -> None:
    """Not with hooks of users: torch counts those, and their handles refer to the dictionary."""
    for child in layer.modules():
        for name in _HOOKS:
            hooks = child.__dict__[name]
            if type(hooks) is OrderedDict and all(key == _HOOK_ID for key in hooks):
                child.__dict__[name] = _UncountedHooks(hooks)


def _hook(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """First and last, so that other hooks see the parameters in place. As torch's
    `register_forward_pre_hook(prepend=True)` and `register_forward_hook(always_call=True)`, which
    take no number."""
    before: Any = module._forward_pre_hooks
    before[_HOOK_ID] = enter
    before.move_to_end(_HOOK_ID, last=False)
    module._forward_hooks[_HOOK_ID] = leave
    module._forward_hooks_always_called[_HOOK_ID] = True


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a call of `module` itself uses.

    `nn.MultiheadAttention` passes its child's parameters to one kernel without calling the child,
    and so does `nn.TransformerEncoderLayer` in evaluation. `nn.TransformerEncoder` asks the
    parameters of its first layer whether it may drop what is padded. If they were fetched one by
    one, torch would choose another kernel, which rounds differently.
    """
    if isinstance(module, nn.MultiheadAttention):
        return list(module.parameters())
    if not module.training:
        if isinstance(module, nn.TransformerEncoderLayer):
            _hide_hooks(module)  # a user may have removed the last of theirs
            return list(module.parameters())
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            return list(module.layers[0].parameters())
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def end_interrupted_calls() -> None:
    """Releases what module calls of this thread still hold that a BaseException has ended, such as
    SystemExit: torch runs forward hooks after an Exception only. The caller must not be inside a
    module call."""
    _calls.leave_all()


def _refuse_constants(module: nn.Module) -> None:
    entry = next(filter(None, map(streamed, module.parameters())), None)
    if entry is not None:
        raise NotResident(
            f"job {entry.job.name!r}: inductor's freezing makes constants of parameters, and would "
            f"keep the bytes of {entry.shard.label!r} and its like in memory; set "
            "torch._inductor.config.freezing to False"
        )


def _refuse_on_device(module: nn.Module) -> None:
    entry = next(filter(None, map(streamed, module.parameters())), None)
    if entry is not None and entry.shard.is_on_device:
        raise NotYet(
            f"job {entry.job.name!r}: torch.compile over parameters on a device, such as "
            f"{entry.shard.label!r}, comes in a later version; call the module without it"
        )


def _refuse_stored_activations(module: nn.Module) -> None:
    activations = _activations.get(module) if _activations else None
    if activations is not None:
        raise NotYet(
            f"job {activations.job.name!r}: torch.compile with offloaded activations comes in a "
            f"later version; call this {type(module).__name__} without it, or offload it without "
            "activations="
        )


def _refuse_transform(module: nn.Module) -> NoReturn:
    """torch begins no graph inside a transform, and fails with an internal error. Hooks of memd end
    graphs in copies of the module too, and with parameters that `functional_call` puts there."""
    entry = next(filter(None, map(streamed, module.parameters())), None)
    job = f"job {entry.job.name!r}: " if entry is not None else ""
    raise NotResident(
        f"{job}a graph of torch.compile ends where memd brings the parameters of this "
        f"{type(module).__name__}, and none can begin inside a transform of torch.func; call the "
        "function without torch.compile"
    )


def _refuse_small_host(unit: nn.Module) -> None:
    parameters = [each for each in unit.parameters() if streamed(each) is not None]
    entry = streamed(parameters[0]) if parameters else None
    if entry is None:
        return
    # As for the largest module in `offload`: values and gradients, and what an update needs.
    needed_bytes = 2 * sum(p.numel() * p.element_size() for p in parameters) + UPDATE_BYTES
    if needed_bytes > entry.job.host_bytes:
        raise CapacityError(
            f"job {entry.job.name!r}: all of a module that is compiled is in memory at once, and "
            f"host_bytes is below what this {type(unit).__name__} needs, which has parameter "
            f"{entry.shard.label!r}: compile smaller modules, or the whole model, or connect with "
            f"more: {format_size(entry.job.host_bytes)} < {format_size(needed_bytes)}"
        )


@untraced_itself
def _enter(module: nn.Module, inputs: Any) -> None:
    del inputs
    if is_compiled():
        _enter_compiled(module)
    else:
        _calls.enter(module)


@untraced
def _enter_compiled(module: nn.Module) -> None:
    _calls.enter_compiled(module)


@untraced
def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    del inputs, output
    _calls.leave(module)


def _refuse_scripting() -> NoReturn:
    """As functions that hooks are, it is in copies of the module too."""
    raise NotResident(
        "torch.jit.script can't compile an offloaded module, nor its copies, since it compiles "
        "hooks too; build the module again and load state_dict() into that, or use "
        "torch.jit.trace(copy.deepcopy(module), inputs)"
    )


# Below a unit, which has brought the parameters, graphs go on.


@traced_if_inlined
def _enter_unless_traced(module: nn.Module, inputs: Any) -> None:
    if not is_dynamo_compiling():
        _enter(module, inputs)


@traced_if_inlined
def _leave_unless_traced(module: nn.Module, inputs: Any, output: Any) -> None:
    if not is_dynamo_compiling():
        _leave(module, inputs, output)


@untraced
def _copy_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts copies into a state_dict, one module at a time. It is kept and saved, and leases would
    hold the whole model in memory.
    """
    del metadata
    for name, parameter in module._parameters.items():
        key = prefix + name
        value = state.get(key)
        if parameter is None or value is parameter or value is None:
            continue
        entry, tiling = streamed(parameter), tiling_of(parameter)
        if entry is not None and entry.shard.is_on_device:
            # Host memory: all of them together may be more than the device has room for.
            source = entry.residency
            is_lazy = isinstance(value, LazyTensor)
            if is_lazy or residency_of_storage(value.untyped_storage()) is source:
                there = entry.value_on_host() if is_lazy else value.cpu()
                state[key] = _copied(state, key, there, source, source.write_count)
        elif entry is not None:
            # One lease for all that follows.
            value = value.in_memory() if isinstance(value, LazyTensor) else value
            state[key] = _copy_in(state, key, value, entry.residency)
        elif tiling is not None and isinstance(value, LazyTensor):
            state[key] = _copied(state, key, value, tiling, tiling.write_count)


def _copy_in(
    state: dict[str, Any], key: str, value: torch.Tensor, residency: Residency
) -> torch.Tensor:
    """The copy of `value` for `state[key]`. If `state` has one of a tied parameter, it is over the
    same memory, as in torch: programs that save it look for that.
    """
    # Somebody else's hook may have put another value.
    if residency_of_storage(value.untyped_storage()) is not residency:
        return value.clone()
    return _copied(state, key, value, residency, residency.count_of(value))


def _copied(
    state: dict[str, Any],
    key: str,
    value: torch.Tensor,
    source: Residency | Tiling,
    write_count: int,
) -> torch.Tensor:
    last = _copies.get(source)
    if last is not None and last.write_count == write_count:
        tied = last.copy()
        is_there = tied is state.get(last.key)
        if tied is not None and is_there and _has_form_of(tied, value):
            return tied.detach()
    copy = value.clone()
    _copies[source] = _Copy(key, ref(copy), write_count)
    return copy


def _has_form_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
