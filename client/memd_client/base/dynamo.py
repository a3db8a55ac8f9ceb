"""Marks that tell torch.compile which of memd's functions it may not look into.

Inside a compiled function dynamo takes each Python frame that begins, and traces it. memd's own
move bytes, which no graph can. `torch.compiler.disable` would tell dynamo so, but it imports
dynamo, which takes a second, and wraps the function, which takes a microsecond of each call. These
marks cost nothing where nobody compiles.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame
_Strategy, _Action = _eval_frame._FrameExecStrategy, _eval_frame._FrameAction
_skip_frame = _Strategy(_Action.SKIP, _Action.DEFAULT)
_skip_call = _Strategy(_Action.SKIP, _Action.SKIP)
_compiler = _eval_frame.get_eval_frame_callback
# torch prints it where a graph may not end: with fullgraph=True, and in torch.export with strict.
_REASON = (
    "memd moves parameters here, which no graph can; with fullgraph=True compile the blocks of the "
    "model one by one, each of which memd brings before its graph; export with strict=False inside "
    "memd_client.gather(model)"
)


def untraced(function: FunctionT) -> FunctionT:
    """A decorator: graphs end before a call of `function`, which runs as it is, with all that it
    calls."""
    _eval_frame.set_code_exec_strategy(function.__code__, _skip_call)
    return _end_graphs_at(function)


def untraced_itself(function: FunctionT) -> FunctionT:
    """As `untraced`, without what `function` calls, so that it may ask `is_compiled`."""
    return _end_graphs_at(traced_if_inlined(function))


def traced_if_inlined(function: FunctionT) -> FunctionT:
    """A decorator: a graph goes on in `function`. A call from outside of graphs runs as it is."""
    _eval_frame.set_code_exec_strategy(function.__code__, _skip_frame)
    return function


def _end_graphs_at(function: FunctionT) -> FunctionT:
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return function


def without_compiler(method: Any, *args: Any) -> Any:
    """`method(*args)`. torch keeps some of its methods out of graphs by a decorator whose first
    call imports dynamo: a second, and 68 MiB, for trainers that never compile. Callers are
    `untraced`, and so is all that they call."""
    function: Any = getattr(method, "__func__", None)
    if function is None or function.__globals__.get("__name__") != "torch._compile":
        return method(*args)
    return function.__wrapped__(method.__self__, *args)


def is_compiled() -> bool:
    """Whether this thread is in a compiled function, between two of its graphs."""
    return _compiler() is not None


def makes_constants() -> bool:
    """Whether inductor would make constants of the parameters of a compiled function."""
    if torch.is_grad_enabled():
        return False
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.freezing)
