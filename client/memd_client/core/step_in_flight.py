"""A step that was sent, until the values that stay in this process are in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from threading import get_ident
from typing import TYPE_CHECKING

from memd_client.base.interrupts import Latch
from memd_client.errors import retold

if TYPE_CHECKING:
    from memd_client.connection.calls import StepCall
    from memd_client.core.open_steps import OpenStep, SealedTarget
    from memd_client.errors import MemdError


class Outcome(Enum):
    """The outcome of a step, as far as this process has heard."""

    UNKNOWN = auto()
    COMMITTED = auto()
    REFUSED = auto()  # the job is at the step before


@dataclass(slots=True)
class Finishing:
    """A thread puts new values in place, or takes them back."""

    thread: int = field(default_factory=get_ident)
    is_over: Latch = field(default_factory=Latch)


@dataclass
class StepInFlight:
    """`Steps` alone changes it, under its lock but for what the thread of `finishing` does."""

    number: int
    call: StepCall
    step: OpenStep
    unfinished: list[SealedTarget] = field(default_factory=list)
    # Those of which the new value may be in place before the step is known to be committed.
    ahead: list[SealedTarget] = field(default_factory=list)
    outcome: Outcome = Outcome.UNKNOWN
    refusal: MemdError | None = None  # never raised itself: its traceback would keep its callers
    finishing: Finishing | None = None
    disk_error: str = ""
    durable_step: int = 0
    # A caller was told that the outcome is unknown, or that values are not in place.
    was_raised: bool = False


def bring_ahead(step: StepInFlight) -> None:
    """Brings one value after the other, each when it is updated, until the answer is there."""
    step.call.wait_until_sent()
    for target in step.unfinished:
        if step.outcome is not Outcome.UNKNOWN or step.call.done():
            return
        if target.comes_ahead:
            step.ahead.append(target)
            target.bring_ahead()


def finish(step: StepInFlight) -> None:
    """It is committed. If this raises, it is called again."""
    while step.unfinished:
        step.unfinished[0].finish()
        del step.unfinished[0]


def take_back(step: StepInFlight) -> None:
    """It was not made. If this raises, it is called again."""
    while step.ahead:
        step.ahead[-1].take_back()
        del step.ahead[-1]


def refused(step: StepInFlight) -> MemdError:
    """The error of a step that was not made, for one caller."""
    assert step.refusal is not None
    return retold(step.refusal, str(step.refusal))


def end_finishing(step: StepInFlight) -> None:
    """The thread has done what it could."""
    finishing, step.finishing = step.finishing, None
    assert finishing is not None
    finishing.is_over.open()
