"""The calls to the daemon by which all ranks end or drop the gradients of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from memd_client.errors import DaemonUnavailable, DeadlineExceeded, MemdError
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.calls import ControlPlane
    from memd_client.core.ranks import Ranks

T = TypeVar("T")
# They leave the outcome of a call unknown.
NO_ANSWERS = (DaemonUnavailable, DeadlineExceeded)


class RankCalls:
    """Makes them. A call without an answer, as where another rank is late, is the same call when it
    is made again. The lock of `RankGradients` serialises.
    """

    def __init__(self, *, session_id: int, ranks: Ranks, control: ControlPlane) -> None:
        self._session_id = session_id
        self._ranks = ranks
        self._control = control
        # Without an answer yet:
        self._end: session_pb2.EndGradientsRequest | None = None
        self._undropped: set[int] = set()  # the shards of a drop

    @property
    def is_end_unanswered(self) -> bool:
        return self._end is not None

    @property
    def is_drop_unanswered(self) -> bool:
        return bool(self._undropped)

    def forget_end(self) -> None:
        """Gradients were taken or dropped, or another call has taken its place."""
        self._end = None

    def end(self, *, accumulated_count: int, is_without_backward: bool) -> set[int]:
        """Ends this rank's gradients and waits for all ranks. Returns the shards of which others
        have made a gradient, and this one has not.

        Raises:
            DaemonUnavailable, DeadlineExceeded: there is no answer.
            MemdError: it was refused.
        """
        request = self._end = self._end or session_pb2.EndGradientsRequest(
            session_id=self._session_id,
            rank_call=self._ranks.next_call(),
            accumulated_count=accumulated_count,
            is_without_backward=is_without_backward,
        )
        answer = self._together(lambda: self._control.end_gradients(request))
        self._end = None
        return set(answer.shard_ids)

    def drop(self, shard_ids: set[int]) -> set[int]:
        """Drops these of all ranks, and those of a call without an answer. Returns all of them.

        Raises: as `end`.
        """
        dropped = shard_ids | self._undropped
        request = session_pb2.DropGradientsRequest(
            session_id=self._session_id,
            shard_ids=sorted(dropped),
            rank_call=self._ranks.next_call(),
        )
        self._undropped = dropped
        self._together(lambda: self._control.drop_gradients(request))
        self._undropped = set()
        return dropped

    def drop_own(self, shard_ids: set[int]) -> None:
        """Drops what this rank alone has of these."""
        self._control.drop_gradients(
            session_pb2.DropGradientsRequest(
                session_id=self._session_id, shard_ids=sorted(shard_ids)
            )
        )

    def _together(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except NO_ANSWERS:
            raise
        except MemdError:
            self._ranks.count_call()
            self._end, self._undropped = None, set()
            raise
        self._ranks.count_call()
        return answer
