"""The states of a process's random number generators: Python's, numpy's, torch's and those of its
devices.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from memd_client.errors import InvalidArgument, MemdError

_CUDA = "cuda"
# The devices' generators where they are not CUDA's, by type of device; absent where there are none.
_OTHERS = "others"


def random_state() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    state = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False) if numpy is not None else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else None,
    }
    others = _of_other_devices()
    return {**state, _OTHERS: others} if others else state


def _of_other_devices() -> dict[str, list[torch.Tensor]]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == _CUDA:
        return {}
    module: Any = torch.get_device_module(accelerator)
    if not module.is_initialized():
        return {}
    count = torch.accelerator.device_count()
    return {accelerator.type: [module.get_rng_state(index) for index in range(count)]}


def is_random_state(state: Any) -> bool:
    return (
        type(state) is dict
        and state.keys() - {_OTHERS} == {"python", "numpy", "torch", "cuda"}
        and type(state["python"]) is tuple
        and type(state["numpy"]) in (dict, type(None))
        and type(state["torch"]) is torch.Tensor
        and type(state["cuda"]) in (list, type(None))
        and all(type(each) is torch.Tensor for each in state["cuda"] or ())
        and _are_others(state.get(_OTHERS, {}))
    )


def _are_others(others: Any) -> bool:
    return type(others) is dict and all(
        type(kind) is str
        and type(states) is list
        and all(type(each) is torch.Tensor for each in states)
        for kind, states in others.items()
    )


def refuse_other_generators(state: dict[str, Any]) -> None:
    """
    Raises:
        InvalidArgument: this process lacks generators that `state` has.
    """
    if state["numpy"] is not None and "numpy" not in sys.modules:
        raise InvalidArgument("the commit holds numpy's random state; import numpy before resume()")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if state["cuda"] is not None and len(state["cuda"]) != count:
        raise InvalidArgument(
            f"the commit holds the random states of {len(state['cuda'])} CUDA devices; this "
            f"process has {count}"
        )
    for kind, states in state.get(_OTHERS, {}).items():
        accelerator = torch.accelerator.current_accelerator()
        is_here = accelerator is not None and accelerator.type == kind
        count = torch.accelerator.device_count() if is_here else 0
        if len(states) != count:
            raise InvalidArgument(
                f"the commit holds the random states of {len(states)} devices of type {kind!r}; "
                f"this process has {count}"
            )


def set_random_state(state: dict[str, Any]) -> None:
    """
    Raises:
        MemdError: this version of Python, numpy or torch cannot take them.
    """
    try:
        random.setstate(state["python"])
        if state["numpy"] is not None:
            sys.modules["numpy"].random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state_all(state["cuda"])
        for kind, states in state.get(_OTHERS, {}).items():
            module: Any = torch.get_device_module(kind)
            for index, each in enumerate(states):
                module.set_rng_state(each, index)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ArithmeticError,
        ValueError,
        RuntimeError,
    ) as error:
        raise MemdError(
            f"the random states cannot be restored by this version of Python, numpy or torch: "
            f"{error}"
        ) from error
