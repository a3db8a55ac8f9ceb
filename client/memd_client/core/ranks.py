"""The ranks that train a job together, and what they tell each other beside the daemon."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memd_client.errors import InvalidArgument, MemdError
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


class Ranks:
    """This process's place among those that train a job: one alone, or several with a process group
    of gloo that is memd's own. All ranks call what talks to others, in the same order. One thread
    at a time.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._call_count = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def are_several(self) -> bool:
        return self._world_size > 1

    @property
    def is_first(self) -> bool:
        """The rank that gives first values, loads, and writes outside of steps."""
        return self._rank == 0

    def next_call(self) -> session_pb2.RankCall | None:
        """For a call to the daemon that all ranks make; None if there is one."""
        if not self.are_several:
            return None
        self._call_count += 1
        return session_pb2.RankCall(number=self._call_count)

    def exchange(self, value: T, what: str) -> list[T]:
        """The values of all ranks, by rank.

        Raises:
            MemdError: a rank has ended, or does not answer while `what`.
        """
        if not self.are_several:
            return [value]
        values: list[Any] = [None] * self._world_size
        try:
            torch.distributed.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._unanswered(what, error) from error
        return values

    def refuse_different(self, values: Mapping[str, Any], what: str) -> None:
        """Before `what`, which all ranks do with the same `values`.

        Raises:
            InvalidArgument: on all ranks, with the first difference.
        """
        for rank, others in enumerate(self.exchange(dict(values), what)):
            for name, value in values.items():
                if others.get(name) != value:
                    raise InvalidArgument(
                        f"all ranks {what} alike, and {name} differs: {value!r} on rank "
                        f"{self._rank}, {others.get(name)!r} on rank {rank}"
                    )
            # On every rank: those that are equal to this one.
            extra = sorted(set(others) - set(values))
            if extra:
                raise InvalidArgument(
                    f"all ranks {what} alike, and rank {rank} has {extra[0]}, which rank "
                    f"{self._rank} has not"
                )

    def in_order(self, make: Callable[[], T], what: str) -> T:
        """The result of `make`, which the first rank calls before all others do.

        Raises:
            MemdError: on every rank, if it has failed on one.
        """
        if not self.are_several:
            return make()
        made: list[T] = []
        failure: MemdError | None = None
        texts: list[str] = []
        for is_turn in (self.is_first, not self.is_first):
            if is_turn and not any(texts):
                try:
                    made.append(make())
                except MemdError as error:
                    failure = error
            texts = self.exchange("" if failure is None else str(failure), what)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise MemdError(f"rank {rank} of {self._world_size} could not {what}: {text}")
        return made[0]

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Into `tensor`, which is dense and on the CPU: the first rank's."""
        if not self.are_several:
            return
        source = torch.distributed.get_global_rank(self._group, 0)
        try:
            torch.distributed.broadcast(tensor, source, group=self._group)
        except RuntimeError as error:
            raise self._unanswered(what, error) from error

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        """Into `tensor`: the sum over ranks."""
        if not self.are_several:
            return
        try:
            torch.distributed.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise self._unanswered(what, error) from error

    def end(self) -> None:
        """Ends this rank's group with the others."""
        if self._group is not None and torch.distributed.is_initialized():
            with suppress(ValueError):  # the user has ended all groups, and begun others
                torch.distributed.destroy_process_group(self._group)
        self._group = None

    def _unanswered(self, what: str, error: RuntimeError) -> MemdError:
        return MemdError(
            f"rank {self._rank} of {self._world_size}: another rank has ended or does not answer "
            f"while they {what}; start all ranks again, and resume from the last step: {error}"
        )
