"""The open steps of one session: what optimizers have sealed and nobody has sent yet.

Optimizers seal into one step, which `step()` or `commit()` closes. Each backward in which `step()`
is called has a step of its own, so that no other thread sends half of it, and none is sent of a
backward that has raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from memd_client.connection.shard import Shard
    from memd_client.core.backward import Backward
    from memd_client.core.comparisons import Comparison
    from memd_proto.v1 import session_pb2

_BROKEN = (
    "The step was not made, and all values are those from before that backward, where plain "
    "PyTorch would have updated some parameters and not others; call zero_grad() of the optimizer, "
    "and go on with this batch or the next"
)


class SealedTarget(Protocol):
    """A parameter in a step: `targets.Target`."""

    @property
    def shard(self) -> Shard: ...
    @property
    def stays(self) -> bool:
        """The value is in this process, and must be the new one once the step is closed."""
        ...

    @property
    def is_viewed(self) -> bool:
        """Somebody holds memory of the value in this process, and sees the new one there once the
        step is closed."""
        ...

    @property
    def is_delayed(self) -> bool:
        """The value is in this process, and is to stay the old one when the step is closed."""
        ...

    @property
    def has_gradient(self) -> bool:
        """There is one that a step could take."""
        ...

    @property
    def has_sealed_gradient(self) -> bool:
        """The gradient is still in this process, and is the one that was sealed last."""
        ...

    def take_writes(self) -> None:
        """Writes through views of the value are part of the step."""
        ...

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed, no other thread fetches the value or touches the gradient."""
        ...

    def refuse_if_in_use(self) -> None:
        """Raises if somebody has the value in place, and so would not see the update."""
        ...

    def compare(self) -> Sequence[Comparison]:
        """Comparisons that `seal` needs; they are made by then."""
        ...

    def seal(self) -> None:
        """The step takes the gradient, which is gone here."""
        ...

    def hide(self) -> None:
        """`step()` was called in backward, so that the value is out of date until its end: a use of
        it raises, until `show`, `undo` or `finish`."""
        ...

    def show(self) -> None:
        """Backward has ended."""
        ...

    def undo(self) -> None:
        """The step was not made: the gradient is there as before."""
        ...

    def drop_gradient(self) -> bool:
        """As `zero_grad()`. Returns whether the daemon has to drop it too."""
        ...

    @property
    def comes_ahead(self) -> bool:
        """The new value may come before it is known whether the step is committed."""
        ...

    def bring_ahead(self) -> None:
        """The step was sent: puts the new value in place once that is updated. Until `finish` or
        `take_back` a use of it waits for the outcome, or raises."""
        ...

    def take_back(self) -> None:
        """The step was not made: the value from before it is in place. If this raises, it is called
        again."""
        ...

    def finish(self) -> None:
        """The step is committed: the new value is in place. If this raises, it is called again."""
        ...


@dataclass(eq=False)
class OpenStep:
    """Everything that optimizers sealed since the last step closed. `Steps` alone changes it."""

    groups: list[session_pb2.StepGroup] = field(default_factory=list)
    targets: dict[int, SealedTarget] = field(default_factory=dict)  # by shard id
    # The backward in which they were sealed, while it runs.
    backward: Backward | None = None
    # That backward has raised: some of its parameters may be missing, so it is never sent.
    is_broken: bool = False
    # `step()` was called for it, even if it updates nothing.
    is_counted: bool = False
    # Steps before it whose outcome was learned late, since the backward began.
    late: list[OpenStep] = field(default_factory=list)
    # Raises if there is a gradient that no optimizer takes.
    refuse_orphans: Callable[[], None] | None = None


class OpenSteps:
    """Any thread may ask. Who changes them has the turn of `transaction.Transaction`, or the lock
    of `steps.Steps`."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._step: OpenStep | None = None
        self._in_backward: list[OpenStep] = []  # those that are broken too

    @property
    def step(self) -> OpenStep | None:
        """The one that belongs to no backward."""
        return self._step

    @property
    def exist(self) -> bool:
        """There is one at least."""
        return self._step is not None or bool(self._in_backward)

    @property
    def all(self) -> list[OpenStep]:
        return [*([self._step] if self._step is not None else ()), *self._in_backward]

    @property
    def in_backward(self) -> list[OpenStep]:
        """The steps of backwards that run or are broken."""
        return list(self._in_backward)

    def is_sealed(self, shard: Shard) -> bool:
        """An open step has its gradient."""
        return self.exist and self._step_with(shard) is not None

    def _step_with(self, shard: Shard) -> OpenStep | None:
        """The open step that updates `shard`."""
        return next((step for step in self.all if shard.shard_id in step.targets), None)

    def step_of(self, backward: Backward) -> OpenStep | None:
        """The open step of a backward that runs."""
        return next((step for step in self._in_backward if step.backward is backward), None)

    def open_in(self, backward: Backward) -> OpenStep:
        """Opens the step of a backward that runs. The caller has the turn, and tells how backward
        ends by `send`, `merge`, `drop` or `note_broken`."""
        step = OpenStep(backward=backward)
        self._in_backward.append(step)
        return step

    def note_late(self, step: OpenStep, late: OpenStep) -> None:
        """While `step` is open in a backward, it was learned that `late` is committed."""
        step.late.append(late)

    def merge(self, step: OpenStep) -> None:
        """Its backward is complete, and `commit()` closes it with what else was sealed."""
        # In this order: at no moment is a gradient sealed by neither.
        self.add(step.groups, list(step.targets.values()), None)
        self._in_backward.remove(step)

    def note_broken(self, step: OpenStep) -> None:
        """Its backward has raised. It stays open, so that nobody uses what it was to update, until
        it is dropped. Does nothing to a step that is not open. Takes no lock."""
        if step not in self._in_backward:
            return
        step.backward = None
        step.is_broken = bool(step.targets)
        if not step.is_broken:
            self._in_backward.remove(step)

    def count(self, step: OpenStep) -> None:
        """`step()` was called for it, and updates nothing."""
        step.is_counted = True

    def add(
        self,
        groups: Sequence[session_pb2.StepGroup],
        targets: Sequence[SealedTarget],
        into: OpenStep | None,
    ) -> OpenStep:
        """Adds what is sealed to `into`, or to the step that belongs to no backward."""
        if into is None:
            into = self._step = self._step or OpenStep()
        into.is_counted = True
        into.groups += groups
        into.targets.update((target.shard.shard_id, target) for target in targets)
        return into

    def forget(self, step: OpenStep) -> None:
        """It is not open any more."""
        if step is self._step:
            self._step = None
        elif step in self._in_backward:
            self._in_backward.remove(step)

    def refuse_if_sealed(self, shard: Shard, what: str) -> None:
        """Raises if one of them updates the parameter."""
        step = self._step_with(shard)
        if step is None:
            return
        begin = f"job {self._job!r}: step() has taken the gradient of {shard.label!r}"
        if step.is_broken:
            raise InvalidArgument(f"{begin} in a backward that has raised since. {_BROKEN}")
        if step.backward is not None:
            raise InvalidArgument(
                f"{begin} in a backward that has not ended, and {what} has to wait for its update, "
                "which is made when backward ends; step after backward if it has to use the value, "
                "and checkpoint a module that is used several times with use_reentrant=False"
            )
        raise InvalidArgument(
            f"{begin}, and {what} has to wait for its update: call session.commit() first, and "
            "average weights (AveragedModel.update_parameters) after it"
        )

    def refuse_if_open(self, what: str) -> None:
        self.refuse_if_in_backward(what)
        if self._step is not None:
            raise InvalidArgument(
                f"job {self._job!r}: {what} is not possible between step() and commit(); call "
                "session.commit() first"
            )

    def refuse_if_in_backward(self, what: str) -> None:
        """Raises if a backward in which `step()` was called has not ended, or has raised."""
        for step in self._in_backward:
            begin = f"job {self._job!r}: {what} is not possible"
            if step.is_broken:
                raise InvalidArgument(
                    f"{begin} after a backward that has raised after step(). {_BROKEN}"
                )
            raise InvalidArgument(
                f"{begin} in a backward after step(), as backward has not made all gradients of "
                "the step; do it when backward has ended"
            )
