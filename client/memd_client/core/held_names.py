"""The parameters that a job held when a session began: a model must claim them all, and no others.

A model whose names do not match would start from its own values at step N, and nobody would notice.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from memd_client.errors import InvalidArgument
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memd_client.core.first_values import FirstValues

# Blobs of parameters that have no name yet are called so: see `unnamed.py`.
UNNAMED_PREFIX = "@init/"
_SHOWN = 5  # names in a message


class HeldNames:
    """Any thread may call."""

    def __init__(
        self,
        job: str,
        list_shards: Callable[[], Iterable[types_pb2.Shard]],
        *,
        first_values: FirstValues,
    ) -> None:
        self._job = job
        self._list_shards = list_shards
        self._first_values = first_values
        self._lock = threading.Lock()
        # Asked for when parameters come, before the first of them is declared.
        self._held: set[str] | None = None
        self._unclaimed: set[str] = set()
        self._left_unnamed: list[str] = []
        self._is_strict = True
        self._is_settled = False

    @property
    def first_values(self) -> FirstValues:
        return self._first_values

    def look(self) -> None:
        """The names that the job holds now count as held, also if it has more when the first
        parameters come."""
        self._look()

    def relax(self) -> None:
        """From now on a model may have more parameters than the job held, or fewer."""
        self._is_strict = False

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Before the parameters `names` are declared.

        Raises:
            InvalidArgument: the job holds parameters, but not these.
        """
        held = self._look()
        unknown = [name for name in names if name not in held]
        if self._is_strict and held and unknown:
            left = sorted(self._unclaimed.difference(names))
            raise InvalidArgument(
                f"job {self._job!r} holds other parameters: {_listed(unknown)} it does not have, "
                f"and {_listed(left) if left else 'no other'} this model does not; give the model "
                "the names that it was trained with, connect to another job or with fresh=True, or "
                "pass offload(..., strict=False) to add parameters, such as adapters"
            )

    def left_unnamed(self) -> list[str]:
        """Blobs of unnamed parameters that sessions before this one have left."""
        self._look()
        return self._left_unnamed

    def forget_left(self) -> None:
        """They were deleted."""
        self._left_unnamed = []

    def refuse_unnamed(self, what: str) -> None:
        """Before parameters get names by their position.

        Raises:
            InvalidArgument: the job holds parameters, and the order may have been another.
        """
        if self._look() and self._is_strict:
            raise InvalidArgument(
                f"job {self._job!r} holds parameters, and {what} would be matched with them by "
                "position; give the optimizer model.named_parameters(), or (name, parameter) pairs"
            )

    def claim(self, names: Iterable[str]) -> None:
        """These were declared."""
        with self._lock:
            self._unclaimed.difference_update(names)

    def refuse_unclaimed(self) -> None:
        """Before a step.

        Raises:
            InvalidArgument: nobody has claimed some of the parameters that the job held.
        """
        if self._is_strict and self._unclaimed:
            raise InvalidArgument(
                f"job {self._job!r} holds parameters that no module or optimizer of this session "
                f"has: {_listed(sorted(self._unclaimed))}; offload the module that has them before "
                "the first step, connect with fresh=True, or pass offload(..., strict=False) to "
                "leave them as they are"
            )

    def settle(self) -> None:
        """Before a value is read: what sessions before this one have left half-way is settled."""
        if self._is_settled:
            return
        with self._lock:
            if not self._is_settled:
                self._list_settled()

    def _list_settled(self) -> list[types_pb2.Shard]:
        shards = list(self._list_shards())
        self._is_settled = True
        return shards

    def _look(self) -> set[str]:
        with self._lock:
            if self._held is None:
                shards = self._list_settled()
                first = self._first_values
                first.learn(shards)
                self._held = {
                    shard.spec.name
                    for shard in shards
                    if shard.spec.kind == types_pb2.SHARD_KIND_PARAMETER
                    and shard.written
                    and not first.is_unfinished(shard.spec.name)
                }
                self._left_unnamed = [
                    shard.spec.name
                    for shard in shards
                    if shard.spec.kind == types_pb2.SHARD_KIND_BLOB
                    and shard.spec.name.startswith(UNNAMED_PREFIX)
                ]
                self._unclaimed = set(self._held)
            return self._held


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
