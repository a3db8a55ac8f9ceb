"""The gradients of one step of several ranks, which are sums over them."""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum, auto
from threading import RLock
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakSet, ref

import torch

from memd_client.core.backward import is_in_backward, running_backward
from memd_client.core.leases import MODE_OVERWRITE, MODE_READ, MODE_WRITE
from memd_client.core.rank_calls import NO_ANSWERS, RankCalls
from memd_client.errors import InvalidArgument, MemdError, NotYet, from_code
from memd_native import PART_RANK_SUM, StatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.shard import Shard
    from memd_client.core.backward import Backward
    from memd_client.core.leases import Leases
    from memd_client.core.ranks import Ranks


class _Sums(Enum):
    """The gradients of the next step, as this rank knows them."""

    BEGUN = auto()  # there are none, or ranks add to them
    COMPLETE = auto()  # all ranks have ended theirs, and any may use them
    LEFT = auto()  # they were complete, and a step has not taken them: any rank may read them
    APART = auto()  # ranks have ended or dropped different ones
    VOID = auto()  # a change that ranks share has failed, and is made in part


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
    to none until the step, and waits until all ranks have ended theirs. In `no_sync()` a backward
    ends nothing: the rank keeps a sum of its own for each parameter, and adds it to that of all
    ranks with the first backward outside. Does nothing if there is one rank. Any thread may call.
    """

    def __init__(
        self,
        *,
        job: str,
        session_id: int,
        ranks: Ranks,
        control: ControlPlane,
        leases: Leases | None,
        parameters: Parameters,
        can_keep_own: bool,
        settle: Callable[[], None],
    ) -> None:
        """`settle` waits for the step in flight."""
        self._job = job
        self._ranks = ranks
        self._calls = RankCalls(session_id=session_id, ranks=ranks, control=control)
        self._leases = leases
        self._parameters = parameters
        self._can_keep_own = can_keep_own
        self._settle = settle
        self._lock = RLock()
        self._sums = _Sums.BEGUN
        self._reason = ""  # what has made them COMPLETE or VOID
        self._agreed: dict[str, object] = {}  # see `agreed`
        self._backward: ref[Backward] | None = None
        self._then: Callable[[], None] | None = None  # see `expect_buckets`
        # Those that are not in the sums yet: this rank's own, of so many backwards.
        self._own: dict[int, Shard] = {}
        self._accumulated_count = 0
        self._no_sync_count = 0  # of blocks that this process is in
        self._is_backward_own = False  # the running one is in such a block
        self._was_forward_own: bool | None = None  # the last one; None: there was none since
        # Their last forward was in such a block: see `shares_buffers`.
        self._keep_buffers: WeakSet[object] = WeakSet()

    # Accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Session.no_sync`."""
        if self._ranks.are_several and not self._can_keep_own:
            raise NotYet(
                f"job {self._job!r}: the daemon is older than this client, and keeps no sum of "
                "gradients for each rank; start a new daemon"
            )
        if is_in_backward():
            raise InvalidArgument(
                f"job {self._job!r}: no_sync() holds a whole forward and its backward; enter it "
                "before the forward"
            )
        with self._lock:
            self._no_sync_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._no_sync_count -= 1

    def note_forward(self) -> None:
        """Before a forward of an offloaded module that a backward may follow."""
        if not is_in_backward():  # a checkpoint computes it again there
            self._was_forward_own = self._no_sync_count > 0

    def shares_buffers(self, owner: object) -> bool:
        """Whether the forward of `owner` that begins has the first rank's buffers: as in
        DistributedDataParallel, unless the one before it was in `no_sync()`."""
        with self._lock:
            shares = owner not in self._keep_buffers
            if self._no_sync_count:
                self._keep_buffers.add(owner)
            else:
                self._keep_buffers.discard(owner)
            return shares

    def has_own(self, shard: Shard) -> bool:
        """`p.grad` of `shard` is what this rank has accumulated and not added yet, as in
        DistributedDataParallel."""
        return shard.shard_id in self._own

    def own_sum(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """A lease of that. Only while `has_own`."""
        assert self._leases is not None
        return self._leases.gradient(shard, mode, part=PART_RANK_SUM)

    def shares(self, shard: Shard) -> bool:
        """The gradient of `shard` is all ranks', which change it together: see `RankChange`."""
        return self._ranks.are_several and not self.has_own(shard)

    def add(self, shard: Shard, gradient: torch.Tensor, *, is_first: bool) -> None:
        """Adds a gradient of this rank, in backward and in its dtype.

        Args:
            is_first: there was none of `shard` since the last step.
        """
        is_accumulated = shard.shard_id in self._own
        if not is_first and not is_accumulated:
            self._refuse_second(shard)
        assert self._leases is not None
        if self._is_backward_own:
            if is_accumulated:
                self.own_sum(shard, MODE_WRITE).add_(gradient)
            else:
                self.own_sum(shard, MODE_OVERWRITE).copy_(gradient)
                self._own[shard.shard_id] = shard
        elif is_accumulated:
            self._add_own(shard, gradient)
        else:
            self.add_part(shard, gradient)

    def _add_own(self, shard: Shard, last: torch.Tensor | None = None) -> None:
        """Adds what this rank has accumulated, and `last`, to the sum of all ranks."""
        assert self._leases is not None
        own = self.own_sum(shard)
        if last is not None:
            own = own + last  # the lease ends
        self.add_part(shard, own)
        del own
        try:
            self._leases.plane.rank_sum_ended(shard.shard_id)
        except StatusError as error:
            raise from_code(
                error.code, f"job {self._job!r}: {error}", error.error_number
            ) from error
        del self._own[shard.shard_id]

    def add_part(self, shard: Shard, gradient: torch.Tensor) -> None:
        """This rank's part in the average. The daemon lets ranks add in their order."""
        assert self._leases is not None
        part = gradient * (1.0 / self._ranks.world_size)  # as DistributedDataParallel does
        if self._ranks.is_first:
            self._leases.overwrite_gradient(shard, part)
        else:
            self._leases.add_gradient(shard, part)

    # Refusals

    def _refuse_second(self, shard: Shard) -> NoReturn:
        """A gradient of `shard` came after this rank's part in its sum."""
        raise InvalidArgument(
            f"job {self._job!r}: a second gradient of {shard.label!r} in one step. The gradients "
            f"of the {self._ranks.world_size} ranks are averaged at the end of each backward; to "
            "accumulate, make all but the last backward of a step, and their forwards, in `with "
            "session.no_sync():`, or call optimizer.zero_grad() before the next one"
        )

    def _refuse_after_end(self, shard: Shard) -> NoReturn:
        """The first gradient of `shard` came when all ranks had ended theirs."""
        raise InvalidArgument(
            f"job {self._job!r}: the first gradient of {shard.label!r} in this step comes after "
            f"{self._reason} has ended them: the {self._ranks.world_size} ranks average all "
            "gradients of a step together. Add up losses and call backward() once, or make all but "
            "the last backward, and their forwards, in `with session.no_sync():`"
        )

    def _refuse_void(self) -> None:
        if self._sums is _Sums.VOID:
            raise InvalidArgument(
                f"job {self._job!r}: the gradients of this step are void, since {self._reason}; "
                "call optimizer.zero_grad() on all ranks, and begin the step again"
            )

    def _refuse_other_forward(self) -> None:
        if self._was_forward_own in (None, self._is_backward_own):
            return
        own, other = ("backward", "forward") if self._is_backward_own else ("forward", "backward")
        raise InvalidArgument(
            f"job {self._job!r}: a {own} ran in session.no_sync(), and its {other} outside. "
            "no_sync() holds both, as in DistributedDataParallel, where the forward decides"
        )

    def refuse_alone(self, shard: Shard, what: str, instead: str) -> None:
        """Before `what`, by which this rank may change the gradient of `shard` unseen by others.

        Raises:
            NotYet: there are several.
        """
        if self._ranks.are_several:
            raise NotYet(
                f"{what} may change the gradient of {shard.label!r}, which all "
                f"{self._ranks.world_size} ranks share in this version; {instead}"
            )

    # Their end

    def expect(self, shard: Shard, *, has_gradient: bool) -> None:
        """Before this rank adds its gradient of `shard`, in backward.

        Args:
            has_gradient: there is one already.
        """
        if not self._ranks.are_several:
            return
        self._finish_drop()
        self._refuse_void()
        if self.are_complete:
            if has_gradient:
                self._refuse_second(shard)
            self._refuse_after_end(shard)
        self._enter_backward()

    @property
    def takes_gradients(self) -> bool:
        """This rank has added gradients in the backward that runs."""
        running = self._running()
        return running is not None and self._backward is not None and self._backward() is running

    @property
    def takes_buckets(self) -> bool:
        """A communication hook has."""
        return self._then is not None and self.takes_gradients

    def expect_buckets(self, then: Callable[[], None]) -> None:
        """Before a communication hook adds the first gradients of the backward that runs. `then` is
        called at its end, when the sums are complete."""
        if self._no_sync_count:
            raise InvalidArgument(
                f"job {self._job!r}: DistributedDataParallel has called reduce_hook() in "
                "session.no_sync(), which is for offloaded parameters; enter no_sync() of the "
                "wrapped model too, or instead where nothing is offloaded"
            )
        self._finish_drop()
        self._refuse_void()
        self._enter_backward()
        self._then = then

    def _enter_backward(self) -> None:
        backward = self._running()
        with self._lock:
            if backward is None or (self._backward is not None and self._backward() is backward):
                return
            self._is_backward_own = self._no_sync_count > 0
            self._refuse_other_forward()
            self._backward = ref(backward)
            if self._sums is _Sums.LEFT:
                self._sums = _Sums.BEGUN
        backward.tell_end(_at_end(ref(self)))

    def _running(self) -> Backward | None:
        try:
            return running_backward(self._job)
        except InvalidArgument:
            raise InvalidArgument(
                f"job {self._job!r}: a gradient came in a backward inside another, as reentrant "
                "checkpoints run it, and memd can't tell when the gradients of the "
                f"{self._ranks.world_size} ranks are complete; checkpoint with use_reentrant=False"
            ) from None

    def complete(self, what: str, *, reads: bool = False) -> None:
        """Before `what`, which uses the sums: they are complete.

        Args:
            reads: and does no more. Where a step has left them, one rank may do so alone.

        Raises:
            InvalidArgument: backward has not ended; or ranks have accumulated different numbers of
                backwards, or nothing else; or the sums are void.
            SessionFenced: a rank has ended.
            DeadlineExceeded: names the ranks that have not come here in time.
            MemdError: of the step in flight.
        """
        if not self._ranks.are_several:
            return
        self._finish_drop()
        self._refuse_void()
        if self.are_complete or (reads and self._sums is _Sums.LEFT):
            return
        if is_in_backward():
            raise InvalidArgument(
                f"job {self._job!r}: {what} in backward, where the gradients of the "
                f"{self._ranks.world_size} ranks are not averaged yet; do it after backward"
            )
        # A step takes the end of all gradients before it. No lease of a backward has waited until
        # the daemon has that step, so this end could come before it.
        self._settle()
        self._end(is_without_backward=True)

    def agreed(self, what: str) -> object | None:
        """All ranks have agreed on this by `what`, before a step that this one has not sent. If it
        fails and makes the step again, others have sent theirs, and it must not ask them."""
        return self._agreed.get(what)

    def note_agreed(self, what: str, found: object) -> None:
        """Until the step is sent, or gradients change."""
        self._agreed[what] = found

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Inside, ranks `what`, as in "clip gradients", and each changes its part of the sums. If
        that fails on one, nobody knows what is changed, and all ranks drop them."""
        self._agreed.clear()
        try:
            yield
        except BaseException as error:
            if self._ranks.are_several:
                with self._lock:
                    self._sums = _Sums.VOID
                    self._reason = f"ranks have begun to {what}, and it failed: {error}"
            raise

    def begin(self) -> None:
        """A step has taken them, or they were dropped."""
        with self._lock:
            if self.has_failed:
                self._keep_buffers.clear()  # ranks may have come here from different forwards
            self._sums = _Sums.BEGUN
            self._agreed.clear()
            self._calls.forget_end()
            self._backward = None
            self._was_forward_own = None
            if not self._own:
                self._accumulated_count = 0

    def note_empty_step(self) -> None:
        """A step has taken none: they have to be ended again before they are changed."""
        with self._lock:
            self._calls.forget_end()  # the step was that call
            self._agreed.clear()
            if self.are_complete:
                self._sums = _Sums.LEFT

    def note_return(self) -> None:
        """A step that had taken them was not made. If it was not sent either, other ranks may have
        sent theirs, and they stay complete: the same step can be made again. Without the lock: a
        thread that holds it may wait, in a lease, for this step to settle."""
        if self._sums is _Sums.BEGUN:
            self._sums = _Sums.LEFT

    @property
    def are_complete(self) -> bool:
        """All ranks have ended theirs, and no step has taken them."""
        return self._sums is _Sums.COMPLETE

    @property
    def has_failed(self) -> bool:
        """Ranks have ended different gradients, or these are void: all drop theirs together."""
        return self._sums in (_Sums.APART, _Sums.VOID)

    @property
    def is_drop_unanswered(self) -> bool:
        """Other ranks have not come in time: the next use of gradients makes that call again."""
        return self._calls.is_drop_unanswered

    def drop(self, shards: Iterable[Shard]) -> None:
        """Drops the gradients of `shards`: by a call of all ranks, unless this one has accumulated
        them and nobody else has any part in them.

        Raises:
            DeadlineExceeded: names the ranks that have not come here in time.
            InvalidArgument: another rank has come with another call.
        """
        with self._lock:
            dropped = {shard.shard_id for shard in shards}
            is_begun = self.has_failed or self.is_drop_unanswered
            are_own = bool(dropped) and dropped <= self._own.keys() and not is_begun
            if are_own or not self._ranks.are_several:
                self._calls.drop_own(dropped)
            else:
                with self._refusable():
                    dropped = self._calls.drop(dropped)
            for each in dropped:
                self._own.pop(each, None)
            self.begin()

    def _finish_drop(self) -> None:
        """Before gradients are used: those that were dropped are gone."""
        if self.is_drop_unanswered:
            self.drop([])

    @contextmanager
    def _refusable(self) -> Iterator[None]:
        """Inside, all ranks make a call. If they are apart, all of them begin anew."""
        try:
            yield
        except NO_ANSWERS:
            raise  # it is the same call if it is made again
        except MemdError:
            self._sums = _Sums.APART
            raise

    def end_backward(self, *, is_complete: bool) -> None:
        """It raised if not `is_complete`."""
        then, self._then = self._then, None
        if not is_complete or self.are_complete:
            return
        if self._is_backward_own:
            self._accumulated_count += 1
            return
        self._end(is_without_backward=False)
        if then is not None:
            then()

    @torch.no_grad()
    def _end(self, *, is_without_backward: bool) -> None:
        with self._lock:
            if not self._calls.is_end_unanswered:
                for shard in list(self._own.values()):
                    self._add_own(shard)
            with self._refusable():
                made = self._calls.end(
                    accumulated_count=self._accumulated_count,
                    is_without_backward=is_without_backward,
                )
            if made:
                for parameter in self._parameters.parameters:
                    if parameter.shard.shard_id in made:
                        parameter.note_sum()
            self._sums = _Sums.COMPLETE
            self._reason = "a use of them" if is_without_backward else "a backward"
            self._accumulated_count = 0


def _at_end(gradients: ref[RankGradients]) -> Callable[[bool], None]:
    """Weak: a backward must not keep a session that nobody refers to."""

    def end(is_complete: bool) -> None:
        held = gradients()
        if held is not None:
            held.end_backward(is_complete=is_complete)

    return end
