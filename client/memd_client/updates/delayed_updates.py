"""The delayed updates of one optimizer: ZeRO-Offload's one-step delayed parameter update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.core.backward import is_in_backward
from memd_client.core.comparisons import compare_together
from memd_client.errors import InvalidArgument, MemdError, NotYet
from memd_client.parameters.tiles import entries_of
from memd_client.updates.delayed_values import delayed_values
from memd_client.updates.resident_target import ResidentTarget
from memd_client.updates.targets import needs_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Transaction
    from memd_client.updates.targets import Target


class DelayedUpdates:
    """Which steps of an optimizer are delayed, and the parameters that wait for their update. Who
    brings values has the turn of the transaction, with no step in flight."""

    def __init__(self, begin: bool | int) -> None:
        """
        Args:
            begin: whether each step is delayed; or the first one that is, as `resume()` counts.
        """
        self._begin = _checked(begin)
        self._is_possible = begin is not False
        self._targets: list[ResidentTarget] = []

    @property
    def begin(self) -> bool | int:
        return self._begin

    @begin.setter
    def begin(self, begin: bool | int) -> None:
        if begin is not False and not self._is_possible:
            raise InvalidArgument(
                "the optimizer was made without delayed_update; make it with True, or with the "
                "number of a later step"
            )
        self._begin = _checked(begin)

    @property
    def is_possible(self) -> bool:
        """A step may be delayed, now or later."""
        return self._is_possible

    @property
    def are_pending(self) -> bool:
        """A step was made, or is being made, whose update is not in the parameters yet."""
        return any(target.is_delayed for target in self._targets)

    def admit(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        transaction: Transaction,
        *,
        is_early: bool,
    ) -> None:
        """Before a group of these is part of the optimizer.

        Raises:
            InvalidArgument, NotYet: one of them cannot wait for its update.
            CapacityError: the job's quota does not hold their values twice more.
        """
        if not self._is_possible:
            return
        for what, is_asked in (
            ("step_in_backward=True", is_early),
            ("several ranks", transaction.job.ranks.are_several),
            ("shards of fully_shard()", any(map(is_traceable_wrapper_subclass, parameters))),
        ):
            if is_asked:
                raise NotYet(f"delayed_update with {what} comes in a later version")
        for parameter in parameters:
            for entry in entries_of(parameter):
                raise InvalidArgument(
                    f"parameter {entry.shard.label!r} is offloaded, and its next forward waits for "
                    "its update alone; delayed_update is for an optimizer of parameters that stay "
                    "in this process or on a device"
                )
        stay = [pair for pair in zip(names, parameters, strict=True) if needs_name(pair[1])]
        delayed_values(transaction).declare(stay, transaction.job)

    def add(self, targets: Sequence[Target], transaction: Transaction) -> None:
        """The targets of parameters that were admitted."""
        if self._is_possible:
            added = [target for target in targets if isinstance(target, ResidentTarget)]
            delayed_values(transaction).add(added)
            self._targets += added

    def refuse_in_backward(self) -> None:
        """Before a step."""
        if self._is_possible and is_in_backward():
            raise InvalidArgument(
                "step() in backward is not possible with delayed_update, as it brings new values "
                "while backward uses the old ones; call it after backward"
            )

    def begin_step(self, job: Job) -> None:
        """Brings what is pending, before the next step takes gradients."""
        if not self._is_possible:
            return
        self.bring(job)
        is_wanted = self._begin is True or (
            self._begin is not False and job.steps.committed_step >= self._begin
        )
        for target in self._targets:
            if target.delay.is_taken:
                continue  # a second step() before commit(), which is refused
            target.delay.begin_step(is_wanted=is_wanted)

    def bring(self, job: Job) -> None:
        """Puts values with their pending updates in place.

        Raises:
            MemdError: the program has written a value meanwhile, which is lost.
        """
        pending = self._pending
        compare_together(each for target in pending for each in target.compare_value())
        written = [target for target in pending if target.bring_pending()]
        job.unordered_leases.devices.follow_values()
        if written:
            raise MemdError(
                f"job {job.name!r}: parameter {written[0].shard.name!r} was written while its "
                "update was pending, as delayed_update has it, and the change is lost; call "
                "optimizer.bring_pending_update() before values are written"
            )

    def refuse_pending(self, what: str) -> None:
        """Before `what`, which changes the state that the pending update has made."""
        if self.are_pending:
            raise InvalidArgument(
                f"{what} is not possible while an update is pending; call "
                "optimizer.bring_pending_update() first"
            )

    @property
    def _pending(self) -> list[ResidentTarget]:
        return [target for target in self._targets if target.delay.is_pending]


def _checked(begin: bool | int) -> bool | int:
    is_right: bool = type(begin) is bool or (type(begin) is int and begin >= 1)
    if not is_right:
        raise InvalidArgument(
            "delayed_update is True, False, or the number of the first step that is delayed, from "
            f"1 on: {begin!r}"
        )
    return begin
