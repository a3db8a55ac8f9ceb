"""Bringing parameters to the modules that use them, for as long as they use them.

Nothing is patched and no backward hooks are needed (docs/decisions/parameters-away.md says why):

* forward pre-hooks fetch a module's own parameters, and forward hooks release them (`always_call`:
  after an exception too);
* every module call pushes the hooks of `saved_tensors.py`, unless they are active, so that
  autograd does not keep a parameter's bytes;
* the hooks are plain functions that look parameters up. In a copy of the module, whose parameters
  memd does not know, they do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from torch import nn

from memd_client.errors import NotResident
from memd_client.identity import ByIdentity
from memd_client.interrupts import interrupts
from memd_client.lazy import LazyTensor
from memd_client.parameter import bring, streamed
from memd_client.residency import release_all, residency_of_storage
from memd_client.saved_tensors import save_by_name_hooks
from memd_client.stalls import note_module_calls

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import ItemsView, Iterator
    from types import FrameType

    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from memd_client.residency import Held, Residency


@dataclass(frozen=True, slots=True)
class _Copy:
    """A parameter's value in a state_dict, which may be gone by now."""

    key: str
    copy: ref[torch.Tensor]
    write_count: int


# The last copy of each parameter.
_copies: ByIdentity[Residency, _Copy] = ByIdentity()


class _Frame:
    """A module call that this thread is in. Its cost counts, since every module call has one: two
    context managers on an `ExitStack` took 20 µs."""

    __slots__ = ("_held", "_hooks", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks: saved_tensors_hooks | None = None
        self._held: Held = []

    def is_of(self, module: nn.Module) -> bool:
        return self._module is module

    def open(self) -> None:
        hooks = save_by_name_hooks()
        if hooks is not None:
            hooks.__enter__()
            self._hooks = hooks
        self._held = bring(own_parameters(self._module))

    def close(self) -> None:
        try:
            release_all(self._held)
        finally:
            if self._hooks is not None:
                self._hooks.__exit__()


class _ModuleCalls(local):
    """The module calls that one thread is in, the innermost last."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self._raised_count = interrupts.raised_count

    def enter(self, module: nn.Module) -> None:
        frame = _Frame(module)
        frames = self._frames
        if self._raised_count != interrupts.raised_count:
            self._leave_interrupted()
        if not frames:
            note_module_calls(True)
        # Before anything can fail: torch calls `_leave` after a failed pre-hook too.
        frames.append(frame)
        frame.open()

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

    @staticmethod
    def _close_last(frames: list[_Frame]) -> None:
        frame = frames.pop()
        if not frames:
            note_module_calls(False)
        frame.close()


_calls = _ModuleCalls()
_CALL = nn.Module._call_impl.__code__


def _modules_on_the_stack() -> list[nn.Module]:
    """The modules that this thread is calling, the innermost last."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


class _UncountedHooks(MutableMapping[int, Any]):
    """A module's hooks, of which memd's are not counted: `nn.TransformerEncoderLayer` leaves its
    one kernel if it or a child has any, and the others round differently.

    It is over the module's own dictionary, which the handles of earlier hooks refer to.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = hooks

    def __getitem__(self, key: int) -> Any:
        return self._hooks[key]

    def __setitem__(self, key: int, hook: Any) -> None:
        self._hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return sum(hook is not _enter and hook is not _leave for hook in self._hooks.values())

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def items(self) -> ItemsView[int, Any]:
        return self._hooks.items()  # every call of the module asks

    def move_to_end(self, key: int, last: bool = True) -> None:
        self._hooks.move_to_end(key, last)


def stream(module: nn.Module) -> None:
    """From now on a module call fetches the parameters of `module` that it needs."""
    for child in module.modules():
        # First and last, so that other hooks see the parameters in place.
        child.register_forward_pre_hook(_enter, prepend=True)
        child.register_forward_hook(_leave, always_call=True)
        child.register_state_dict_post_hook(_copy_out)
        # torch.jit.script() calls it, before it fails at these hooks.
        child.__prepare_scriptable__ = _refuse_scripting  # type: ignore[assignment]
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            _hide_hooks(layer)


def _hide_hooks(layer: nn.TransformerEncoderLayer) -> None:
    for child in layer.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = child.__dict__[name]
            if not isinstance(hooks, _UncountedHooks):
                child.__dict__[name] = _UncountedHooks(hooks)


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
            return list(module.parameters())
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            return list(module.layers[0].parameters())
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def end_interrupted_calls() -> None:
    """Releases what module calls of this thread still hold that a BaseException has ended, such as
    SystemExit: torch runs forward hooks after an Exception only. The caller must not be inside a
    module call."""
    _calls.leave_all()


def _enter(module: nn.Module, inputs: Any) -> None:
    del inputs
    _calls.enter(module)


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
        entry = streamed(parameter)
        if entry is not None:
            # One lease for all that follows.
            value = value.in_memory() if isinstance(value, LazyTensor) else value
            state[key] = _copy_in(state, key, value, entry.residency)


def _copy_in(
    state: dict[str, Any], key: str, value: torch.Tensor, residency: Residency
) -> torch.Tensor:
    """The copy of `value` for `state[key]`. If `state` has one of a tied parameter, it is over the
    same memory, as in torch: programs that save it look for that.
    """
    # Somebody else's hook may have put another value.
    if residency_of_storage(value.untyped_storage()) is not residency:
        return value.clone()
    write_count = residency.count_of(value)
    last = _copies.get(residency)
    if last is not None and last.write_count == write_count:
        tied = last.copy()
        is_there = tied is state.get(last.key)
        if tied is not None and is_there and _has_form_of(tied, value):
            return tied.detach()
    copy = value.clone()
    _copies[residency] = _Copy(key, ref(copy), write_count)
    return copy


def _has_form_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
