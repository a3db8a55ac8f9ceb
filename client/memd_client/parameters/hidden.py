"""Parameters of this process whose value is out of date until their step is closed.

A step that is called in backward is closed when backward ends, and one of a session that tracks
objects by `commit()`. torch's optimizers would have updated each parameter at once. A parameter
that stays in this process is an ordinary tensor, which anybody could read meanwhile. So it has a
class that refuses each use but questions about metadata and gradient. torch.func's transforms wrap
what they are given without a question to its class, so their functions that wrap ask meanwhile.
"""

from __future__ import annotations

import types
from functools import partial
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.transaction.metadata import asks_for_metadata, attribute_of

if TYPE_CHECKING:
    from collections.abc import Callable

# The class that a hidden parameter had, and what raises for it.
_hidden: ByIdentity[torch.Tensor, tuple[type[torch.Tensor], Callable[[], None]]] = ByIdentity()
_classes: dict[type[torch.Tensor], type[torch.Tensor]] = {}
_ATTRIBUTES = frozenset(("grad", "_grad"))
# Called for each tensor by grad, vjp and jacrev, by functionalize, and by vmap.
_WRAPPING = (
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch._functorch.vmap", "_add_batch_dim"),
)
_lock = RLock()  # reentrant: garbage that is collected under it may show parameters
# torch's own functions, while some parameter is hidden; by module and name.
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}


def hide(parameter: torch.Tensor, refuse: Callable[[], None]) -> None:
    """From now on a use of the value calls `refuse`, which raises, or shows it. Autograd takes the
    value for changed, as torch's optimizers have changed it by now: what saved it before is
    refused. A parameter that is hidden has another `refuse` then."""
    found = _hidden.get(parameter)
    kind = type(parameter) if found is None else found[0]
    increment_version(parameter)
    with _lock:
        _hidden[parameter] = kind, refuse
        if not _replaced:
            _watch_transforms()
    parameter.__class__ = _classes.setdefault(kind, _hidden_class(kind))


def show(parameter: torch.Tensor) -> None:
    """Ends `hide`; does nothing to another parameter."""
    found = _hidden.get(parameter)
    if found is not None:
        parameter.__class__ = found[0]
        with _lock:
            _hidden.discard(parameter)
            if not _hidden:
                _leave_transforms()


def _watch_transforms() -> None:
    for module, name in _WRAPPING:
        function = getattr(import_module(module), name)
        _replaced[module, name] = function
        setattr(import_module(module), name, partial(_wrap, function))


def _leave_transforms() -> None:
    while _replaced:
        (module, name), function = _replaced.popitem()
        setattr(import_module(module), name, function)


@untraced
def _wrap(function: Callable[..., Any], tensor: object, *given: Any) -> Any:
    found = _hidden.get(tensor)
    if found is not None:
        found[1]()
    return function(tensor, *given)


@untraced
def _torch_function(
    cls: Any,
    func: Any,
    classes: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    del cls, classes
    if not asks_for_metadata(func) and attribute_of(func) not in _ATTRIBUTES:
        for leaf in tree_leaves((args, kwargs)):
            found = _hidden.get(leaf)
            if found is not None:
                found[1]()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _hidden_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    refusing = {"__torch_function__": classmethod(_torch_function)}
    made: type[torch.Tensor] = types.new_class(
        kind.__name__, (kind,), exec_body=lambda body: body.update(refusing)
    )
    return made
