"""The gradients of one step of several ranks, which are sums over them."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from memd_client.core.backward import is_in_backward, running_backward
from memd_client.errors import DaemonUnavailable, DeadlineExceeded, InvalidArgument, NotYet
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.shard import Shard
    from memd_client.core.backward import Backward
    from memd_client.core.ranks import Ranks


class Parameter(Protocol):
    """`registry.LivingParameter`."""

    @property
    def shard(self) -> Shard: ...
    def note_sum(self) -> None:
        """Other ranks have made a gradient of it, and this one has not."""
        ...


class Parameters(Protocol):
    """`registry.ShardRegistry`."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...


class RankGradients:
    """When the sums of a step are complete. A rank *ends* its gradients with its backward: it adds
    to none until the step, and waits until all ranks have ended theirs. Does nothing if there is
    one rank. Any thread may call.
    """

    def __init__(
        self,
        *,
        job: str,
        session_id: int,
        ranks: Ranks,
        control: ControlPlane,
        parameters: Parameters,
    ) -> None:
        self._job = job
        self._session_id = session_id
        self._ranks = ranks
        self._control = control
        self._parameters = parameters
        self._lock = RLock()
        self._are_complete = False
        self._backward: ref[Backward] | None = None
        self._request: session_pb2.EndGradientsRequest | None = None  # without an answer yet

    def refuse_second(self, shard: Shard) -> None:
        """A gradient of `shard` came after this rank's part in its sum."""
        raise InvalidArgument(
            f"job {self._job!r}: a second gradient of {shard.label!r} in one step. The gradients "
            f"of the {self._ranks.world_size} ranks are averaged at the end of each backward, and "
            "several backwards a step come in a later version: make one backward a step, or call "
            "optimizer.zero_grad() before the next one"
        )

    def refuse_change(self, shard: Shard, what: str) -> None:
        """Before `what` changes the gradient of `shard`.

        Raises:
            NotYet: it is all ranks', and each of them would change it.
        """
        if self._ranks.are_several:
            raise NotYet(
                f"{what} changes the gradient of {shard.label!r}, which all "
                f"{self._ranks.world_size} ranks share in this version; use "
                "optimizer.clip_grad_norm_() and optimizer.zero_grad(), or p.grad.clone()"
            )

    def expect(self, shard: Shard) -> None:
        """Before this rank adds its gradient of `shard`, in backward."""
        if not self._ranks.are_several:
            return
        if self._are_complete:
            self.refuse_second(shard)
        try:
            backward = running_backward(self._job)
        except InvalidArgument:
            raise InvalidArgument(
                f"job {self._job!r}: a gradient came in a backward inside another, as reentrant "
                "checkpoints run it, and memd can't tell when the gradients of the "
                f"{self._ranks.world_size} ranks are complete; checkpoint with use_reentrant=False"
            ) from None
        with self._lock:
            if backward is None or (self._backward is not None and self._backward() is backward):
                return
            self._backward = ref(backward)
        backward.tell_end(_at_end(ref(self)))

    def complete(self, what: str) -> None:
        """Before `what`, which uses the sums: they are complete.

        Raises:
            InvalidArgument: backward has not ended.
            SessionFenced: a rank has ended.
            DeadlineExceeded: names the ranks that have not come here in time.
        """
        if not self._ranks.are_several or self._are_complete:
            return
        if is_in_backward():
            raise InvalidArgument(
                f"job {self._job!r}: {what} in backward, where the gradients of the "
                f"{self._ranks.world_size} ranks are not averaged yet; do it after backward"
            )
        self._end()

    def begin(self) -> None:
        """A step has taken them, or they were dropped."""
        with self._lock:
            self._are_complete = False
            self._request = self._backward = None

    def end_backward(self, *, is_complete: bool) -> None:
        if is_complete and not self._are_complete:
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._request is None:
                self._request = session_pb2.EndGradientsRequest(
                    session_id=self._session_id, rank_call=self._ranks.next_call()
                )
            try:
                answer = self._control.end_gradients(self._request)
            except (DaemonUnavailable, DeadlineExceeded):
                raise  # it is the same call if it is made again
            except BaseException:
                self._request = None
                raise
            self._request = None
            made = set(answer.shard_ids)
            if made:
                for parameter in self._parameters.parameters:
                    if parameter.shard.shard_id in made:
                        parameter.note_sum()
            self._are_complete = True


def _at_end(gradients: ref[RankGradients]) -> Callable[[bool], None]:
    """Weak: a backward must not keep a session that nobody refers to."""

    def end(is_complete: bool) -> None:
        held = gradients()
        if held is not None:
            held.end_backward(is_complete=is_complete)

    return end
