"""Bringing parameters to the modules that use them, for as long as they use them.

Nothing is patched and no backward hooks are needed (the mechanism, and what failed first, is told
in ARCHITECTURE.md):

* forward pre-hooks bring a module's own parameters, forward hooks let them go (`always_call`: after
  an exception too);
* the outermost module call pushes the hooks of `saved.py`, so that autograd does not keep a
  parameter's bytes;
* the hooks are plain functions that look parameters up, so that a copy of the module, whose
  parameters memd does not know, is not held up by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from memd_client import saved
from memd_client.away import bring, let_go, streamed
from memd_client.stalls import here

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from memd_client.away import StreamedParameter


class _Frame:
    """A module call that is under way in this thread. What it costs counts for every module: 20 µs
    as two context managers on an `ExitStack`."""

    __slots__ = ("held", "hooks", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.hooks: saved_tensors_hooks | None = None
        self.held: list[tuple[StreamedParameter, torch.Tensor]] = []

    def close(self) -> None:
        try:
            let_go(self.held)
        finally:
            if self.hooks is not None:
                self.hooks.__exit__()


def stream(module: nn.Module) -> None:
    """From now on the parameters of `module` that are away come when a module call needs them."""
    for child in module.modules():
        # First and last: hooks of others see the parameters in place.
        child.register_forward_pre_hook(_enter, prepend=True)
        child.register_forward_hook(_leave, always_call=True)
        child.register_state_dict_post_hook(_copy_out)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that a call of `module` itself uses.

    `nn.MultiheadAttention` hands the parameters of its child to one kernel without calling the
    child; so does `nn.TransformerEncoderLayer` in evaluation. Fetched one by one they would take
    another kernel, which rounds differently.
    """
    reaches = isinstance(module, nn.MultiheadAttention) or (
        isinstance(module, nn.TransformerEncoderLayer) and not module.training
    )
    if reaches:
        return list(module.parameters())
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def end_interrupted_calls() -> None:
    """Lets go of what module calls of this thread hold that were left without their hooks, which
    torch runs after an exception, but not after a KeyboardInterrupt. For places where no module
    call can be under way."""
    while here.calls:
        here.calls.pop().close()


def _enter(module: nn.Module, inputs: Any) -> None:
    del inputs
    frame = _Frame(module)
    # Before anything can fail: torch calls _leave after a failed pre-hook too.
    here.calls.append(frame)
    if saved.may_save_by_name():
        hooks = saved.save_by_name_hooks()
        hooks.__enter__()
        frame.hooks = hooks
    frame.held = bring(own_parameters(module))


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    del inputs, output
    # No frame of this module on top: a hook of somebody else failed before ours was called.
    if here.calls and here.calls[-1].module is module:
        here.calls.pop().close()


def _copy_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict is kept and saved: it gets copies, one module's at a time, instead of leases on
    the whole model.
    """
    del metadata
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if (
            parameter is not None
            and streamed(parameter) is not None
            and value is not parameter
            and value is not None
        ):
            state[prefix + name] = value.clone()
