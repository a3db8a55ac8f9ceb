"""Parameters of this process whose value is out of date until their step is closed.

A step that is called in backward is closed when backward ends, and one of a session that tracks
objects by `commit()`. torch's optimizers would have updated each parameter at once. A parameter
that stays in this process is an ordinary tensor, which anybody could read meanwhile. So it has a
class that refuses each use but questions about metadata and gradient. Constructors such as
torch.tensor(), scripted modules and torch.func's transforms do not ask its class, so it is covered
too (see `hole.py`). A DTensor's own dispatch comes before the cover of its part in this process, so
torch.func's functions that wrap tensors ask for one.
"""

from __future__ import annotations

import types
import weakref
from functools import partial
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.parameters.hole import allowing_metadata, cover, uncover
from memd_client.transaction.metadata import asks_for_metadata, attribute_of

if TYPE_CHECKING:
    from collections.abc import Callable


class _Hidden(NamedTuple):
    kind: type[torch.Tensor]  # the class that it had
    refuse: Callable[[], None]
    memory: torch.Tensor | None  # that a cover lies over


_hidden: ByIdentity[torch.Tensor, _Hidden] = ByIdentity()
_classes: dict[type[torch.Tensor], type[torch.Tensor]] = {}
_ATTRIBUTES = frozenset(("grad", "_grad"))
# Called for each tensor by grad, vjp and jacrev, by functionalize, and by vmap.
_WRAPPING = (
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch._functorch.vmap", "_add_batch_dim"),
)
_lock = RLock()  # reentrant: garbage that is collected under it may show parameters
_made_of_others: ByIdentity[torch.Tensor, None] = ByIdentity()  # those that are hidden
# torch's own functions, while one of these is hidden; by module and name.
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}


def hide(parameter: torch.Tensor, refuse: Callable[[], None]) -> None:
    """From now on a use of the value calls `refuse`, which raises, shows it, or returns to let the
    use go on. Autograd takes the value for changed, as torch's optimizers have changed it by now:
    what saved it before is refused. A parameter that is hidden has another `refuse` then."""
    found = _hidden.get(parameter)
    increment_version(parameter)
    if found is not None:
        _hidden[parameter] = _Hidden(found.kind, refuse, found.memory)
        return
    kind, here = type(parameter), _lies_here(parameter)
    memory = here.data if here is not None else None
    # Before it is covered: an interrupt in between leaves a parameter that `show` finds.
    _hidden[parameter] = _Hidden(kind, refuse, memory)
    if here is not parameter:
        with _lock:
            _made_of_others[parameter] = None
            if not _replaced:
                _watch_transforms()
    if here is not None and memory is not None:
        cover(here, memory, partial(_refuse_use, weakref.ref(parameter)))
    if kind not in _classes:
        _classes[kind] = _hidden_class(kind)
    parameter.__class__ = _classes[kind]


def _lies_here(parameter: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has its elements: that of this process, of a DTensor. None if there are no
    elements, or they lie in another way."""
    here = getattr(parameter, "_local_tensor", parameter)
    is_plain = type(here).__torch_dispatch__ is torch.nn.Parameter.__torch_dispatch__
    return here if is_plain and here.layout is torch.strided and here.numel() else None


def _refuse_use(parameter: weakref.ref[torch.Tensor]) -> None:
    """Called by an operation that has not asked the class."""
    found = _hidden.get(parameter())
    if found is not None:
        found.refuse()


def hidden_memory(parameter: torch.Tensor) -> torch.Tensor | None:
    """memd itself reads and writes it: the value of a hidden parameter, and of a DTensor the part
    in this process. None if it is in the parameter alone."""
    found = _hidden.get(parameter)
    return None if found is None else found.memory


def show(parameter: torch.Tensor) -> None:
    """Ends `hide`; does nothing to another parameter."""
    found = _hidden.get(parameter)
    if found is None:
        return
    parameter.__class__ = found.kind
    here = _lies_here(parameter)
    if found.memory is not None and here is not None:
        uncover(here, found.memory)
    _hidden.discard(parameter)
    with _lock:
        _made_of_others.discard(parameter)
        if not _made_of_others:
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
        found.refuse()
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
    if asks_for_metadata(func) or attribute_of(func) in _ATTRIBUTES:
        with torch._C.DisableTorchFunctionSubclass(), allowing_metadata():
            return func(*args, **(kwargs or {}))
    for leaf in tree_leaves((args, kwargs)):
        found = _hidden.get(leaf)
        if found is not None:
            found.refuse()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _hidden_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    refusing = {"__torch_function__": classmethod(_torch_function)}
    made: type[torch.Tensor] = types.new_class(
        kind.__name__, (kind,), exec_body=lambda body: body.update(refusing)
    )
    return made
