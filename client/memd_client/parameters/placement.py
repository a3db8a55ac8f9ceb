"""The places of a module's parameters: which attribute of which child module each one is."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from memd_client.errors import MemdError
from memd_client.parameters.tiles import entries_of, is_in_memd

if TYPE_CHECKING:
    from torch import nn


class Placement:
    """The places at which `offload` found parameters. Another parameter there is trained outside of
    memd, while commits go on to store the one that nobody uses any more."""

    def __init__(self, module: nn.Module, job: str) -> None:
        self._job = job
        self._places = [
            (weakref.ref(child), name, entries[0].shard.name)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and (entries := entries_of(parameter))
        ]

    def refuse_replaced(self) -> None:
        """Raises if a place has a parameter that is not offloaded. A place may have none, as after
        `parametrize`, or have gone with its module."""
        for owner, name, shard_name in self._places:
            module = owner()
            if module is None:
                continue
            parameter = module._parameters.get(name)
            if parameter is not None and not is_in_memd(parameter):
                raise MemdError(
                    f"job {self._job!r}: parameter {shard_name!r} was replaced by one that is not "
                    "in memd, as load_state_dict(assign=True), module.name = nn.Parameter(...) and "
                    "fully_shard() do; copy the values instead, with load_state_dict() or inside "
                    "gather(write=True), or replace it before offload(). A module is offloaded or "
                    "sharded, not both"
                )
