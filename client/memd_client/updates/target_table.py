"""The targets of one optimizer."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from memd_client.errors import InvalidArgument
from memd_client.updates.streamed_target import TiledTarget
from memd_client.updates.targets import Part, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class TargetsById(dict[int, Target]):
    """By the id of a parameter, which is kept alive: no other gets its id, even if somebody takes
    it out of its group."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: list[torch.Tensor] = []

    def add(self, parameter: torch.Tensor, target: Target) -> None:
        self._parameters.append(parameter)
        self[id(parameter)] = target

    def parts(self) -> Iterator[Part]:
        """The targets that steps update."""
        return chain.from_iterable(target.parts for target in self.values())

    def forget_assigned(self) -> None:
        """Gradients end, also those that were assigned to parameters in tiles."""
        for target in self.values():
            if isinstance(target, TiledTarget):
                target.forget_assigned()

    def __missing__(self, key: int) -> NoReturn:
        """A parameter that came into `param_groups` without `add_param_group` is not in memd."""
        raise InvalidArgument(
            "a parameter in optimizer.param_groups was put there by hand, and memd does not know "
            "it; use add_param_group(), or make a new optimizer after offload()"
        )
