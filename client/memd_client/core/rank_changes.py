"""Changes that a program makes to a gradient that several ranks share."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd_client.base.tensor_bytes import checksum_of
from memd_client.core.ranks import failure_text
from memd_client.errors import InvalidArgument, MemdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from memd_client.connection.shard import Shard
    from memd_client.core.ranks import Ranks

_DOING = "change gradients"  # as in "while they change gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """The gradient that one rank would put in the place of the old one."""

    label: str
    what: str
    value: int | None  # the checksum of its bytes; None: there is no gradient any more
    failure: str = ""


class RankChange:
    """One change of one gradient, made once for all ranks: each makes it of a copy of its own, and
    one writes, if all have made the same. All ranks make the same changes in the same order, as in
    a program that changes the gradients that DistributedDataParallel has averaged. One thread.
    """

    def __init__(self, ranks: Ranks, shard: Shard, what: str) -> None:
        """`what` changes the gradient of `shard`."""
        self._ranks = ranks
        self._shard = shard
        self._what = what

    @contextmanager
    def making(self) -> Iterator[None]:
        """Inside, this rank makes its copy. If it fails, the other ranks change nothing either."""
        try:
            yield
        except Exception as error:
            self._exchange(None, failure=failure_text(error))
            raise

    def agree(self, value: torch.Tensor | None) -> None:
        """The gradient becomes `value`, dense and on the CPU. When it returns, all ranks have read
        what they wanted of the old one.

        Raises:
            InvalidArgument: another rank has made another change.
            MemdError: a rank could not make its own.
        """
        made = self._exchange(value)
        mine = made[self._ranks.rank]
        for rank, other in enumerate(made):
            if other.failure:
                raise MemdError(
                    f"{self._what} has changed the gradient of {self._shard.label!r} on no rank: "
                    f"rank {rank} of {self._ranks.world_size} could not: {other.failure}"
                )
            if (other.label, other.what) != (mine.label, mine.what):
                raise InvalidArgument(
                    "all ranks change gradients alike and in the same order, and nothing has "
                    f"changed: {mine.what} changes that of {mine.label!r} on rank "
                    f"{self._ranks.rank}, and {other.what} that of {other.label!r} on rank {rank}"
                )
            if other.value != mine.value:
                raise InvalidArgument(
                    f"{self._what} makes another gradient of {self._shard.label!r} on rank "
                    f"{rank} than on rank {self._ranks.rank}, and nothing has changed. All ranks "
                    "have one average, as after DistributedDataParallel: change it on all of them, "
                    "by what is equal on all, or take p.grad.clone()"
                )

    def prepare(self, prepare: Callable[[], object]) -> None:
        """Each rank calls `prepare`, before one writes.

        Raises:
            Exception: of `prepare`.
            MemdError: on the other ranks, if it has failed on one.
        """
        self._ranks.together(prepare, _DOING)

    def write(self, write: Callable[[], None]) -> None:
        """One rank writes, and all go on when it has.

        Raises:
            MemdError: it could not.
        """
        writer = self._shard.shard_id % self._ranks.world_size
        self._ranks.by_one(writer, write, _DOING)

    def _exchange(self, value: torch.Tensor | None, failure: str = "") -> list[_Made]:
        made = _Made(
            label=self._shard.label,
            what=self._what,
            value=None if value is None else checksum_of(value),
            failure=failure,
        )
        return self._ranks.exchange(made, _DOING)
