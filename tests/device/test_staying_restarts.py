"""The daemon is killed or stopped while a step over parameters that stay on a device is made, and
another follows: the trainer goes on with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import memd_client
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, RATE, STEPS, reference
from tests.device.offloaded_models import build
from tests.device.staying import backward
from tests.device.trained import connected
from tests.faults.restarts import Restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from memd_client import Session
    from tests.daemons import Daemons

RESTARTED_STEP = 2
more = pytest.mark.more


@pytest.fixture(scope="module")
def restarts(daemons: Daemons) -> Iterator[Restarts]:
    """At one place for all tests, as each has a volume."""
    made = Restarts(daemons, "staying", daemons.start(name="staying"))
    yield made
    made.settle()
    made.daemon.stop()


class Disturbance:
    """Ends the daemon at one moment of a step, and begins another."""

    def __init__(self, restarts: Restarts, *, is_clean: bool) -> None:
        self._restarts = restarts
        self._is_clean = is_clean
        self.count = 0

    def make(self) -> None:
        self.count += 1
        if self._is_clean:
            self._restarts.daemon.stop()
        else:
            self._restarts.kill()
        self._restarts.begin_start()

    def before_call(self, number: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """In front of the call of `plain` of this number, from 0."""
        left = [number]

        def call(*arguments: Any) -> Any:
            if not left[0]:
                self.make()
            left[0] -= 1
            return plain(*arguments)

        return call


def disturb_step(
    disturbance: Disturbance, moment: str, session: Session, patch: pytest.MonkeyPatch
) -> None:
    """From now on, at this moment of the next step."""
    if moment == "between":
        disturbance.make()
    elif moment == "sent":
        control = session.transaction.job.control
        patch.setattr(control, "begin_step", disturbance.before_call(0, control.begin_step))
    else:
        number = {"first value": 0, "third value": 2}[moment]
        leases = session.leases
        patch.setattr(leases, "value", disturbance.before_call(number, leases.value))


@pytest.mark.parametrize(
    ("moment", "is_clean"),
    [
        *(("between", False), ("sent", False), ("first value", False), ("third value", True)),
        *(pytest.param(each, True, marks=more) for each in ("between", "sent", "first value")),
        pytest.param("third value", False, marks=more),
    ],
)
def test_training_goes_on_with_the_same_bits(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch, moment: str, is_clean: bool
) -> None:
    disturbance = Disturbance(restarts, is_clean=is_clean)
    with connected(restarts.daemon, monkeypatch, durability="step") as session:
        model = build("mlp").to("sim")
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        for step in range(STEPS):
            backward(model, step)
            with monkeypatch.context() as patched:
                if step == RESTARTED_STEP:
                    disturb_step(disturbance, moment, session, patched)
                optimizer.step()
            optimizer.zero_grad()
        assert session.committed_step == STEPS
        found: list[Tensor] = [each.cpu() for each in model.state_dict().values()]
        restarts.settle()
    assert disturbance.count == 1
    assert are_equal(found, reference("mlp", LOOPS[0], "sim")[STEPS:])
