"""The attribute `optimizer.state`, for states that are in memd."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memd_client.connection.shard import MOMENTS
from memd_client.errors import InvalidArgument, UnknownName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class StateInMemd(dict[str, Any]):
    """`optimizer.state[parameter]`: empty, and asked for a moment it says where that is.

    Iterated, it names what Adam may have of a parameter: torch's distributed checkpoint asks so
    which names it shall look for in a state that was flattened.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(("step", *MOMENTS, *super().__iter__())))

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownName(
            f"optimizer.state[parameter] has no {name!r}: states are in memd; read them in "
            "optimizer.state_dict()['state'], and change them by load_state_dict()"
        )


class StatesInMemd(defaultdict[torch.Tensor, StateInMemd]):
    """`optimizer.state`: it lists the parameters that torch's would, once they have a state."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: as those of a defaultdict, whose `copy()` passes them."""
        super().__init__(*(arguments or (StateInMemd,)))
        self._shown: set[torch.Tensor] = set()

    def __bool__(self) -> bool:
        """True: torch's distributed checkpoint makes a step of an optimizer that has none, to make
        its states. Here they are in memd from the beginning."""
        return True

    def show(self, parameter: torch.Tensor) -> None:
        """It has a state from now on."""
        self.setdefault(parameter, StateInMemd())
        self._shown.add(parameter)

    @property
    def is_whole(self) -> bool:
        """Nobody has removed what was shown."""
        return self._shown <= self.keys()


def begin_shown(optimizer: torch.optim.Optimizer) -> None:
    """Its state lists nothing yet."""
    _replace(optimizer, StatesInMemd())


def show(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """These have a state from now on."""
    if isinstance(optimizer.state, StatesInMemd):  # otherwise the next step refuses it
        for parameter in parameters:
            optimizer.state.show(parameter)


def refuse_changed(optimizer: torch.optim.Optimizer) -> None:
    """The state shows nothing of what memd has, so a change there would be lost.

    Raises:
        InvalidArgument: there is one.
    """
    if not isinstance(optimizer.state, StatesInMemd) or not optimizer.state.is_whole:
        raise InvalidArgument(
            "optimizer.state was cleared or replaced, and states are in memd; call "
            "optimizer.reset_state() instead"
        )
    if any(optimizer.state.get(each) for each in _parameters(optimizer)):
        raise InvalidArgument(
            "optimizer.state was written, and states are in memd; change what state_dict() "
            "returns, and give it to load_state_dict()"
        )


@contextmanager
def listing(
    optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, dict[str, Any]]
) -> Iterator[None]:
    """Inside, torch finds all states where its optimizers have them."""
    shown = optimizer.state
    try:
        _replace(optimizer, defaultdict(dict, shown))
        optimizer.state.update((each, states.get(each, {})) for each in _parameters(optimizer))
        yield
    finally:
        _replace(optimizer, shown)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _replace(optimizer: torch.optim.Optimizer, state: defaultdict[Any, Any]) -> None:
    """The attribute is torch's."""
    optimizer.state = state
