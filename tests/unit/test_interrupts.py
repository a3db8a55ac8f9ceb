"""Interrupts at chosen moments; `tests/soak/interrupts.py` has them at random ones."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client.base.interrupts import Latch, _handle, defer_interrupts, safe_point
from memd_client.parameters import residency, thread_uses
from tests.unit.client_cases import Mlp, assert_same_state, batch, build, leases_held, loss_of
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session

_LONG_S = 5.0  # for what an interrupt ends at once


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def session() -> Session:
    return FakeDaemon().session()


@pytest.fixture
def mlp(session: Session) -> tuple[Mlp, Mlp]:
    defer_interrupts()
    model, reference = build(Mlp), build(Mlp)
    assert isinstance(model, Mlp)
    assert isinstance(reference, Mlp)
    memd_client.offload(model, session)
    return model, reference


def interrupted_in(call: Callable[[], Any]) -> None:
    """The interrupt arrives in `call`, or as soon as memd's work there is done."""

    def call_and_wait() -> None:
        call()
        time.sleep(_LONG_S)

    with pytest.raises(KeyboardInterrupt):
        call_and_wait()


def test_an_interrupt_in_a_training_library_does_not_wait_for_its_loop() -> None:
    """Integrations call the loops of libraries, which run for days."""
    made: dict[str, Any] = {}
    path = f"{next(iter(memd_client.__path__))}/integrations/library.py"
    exec(compile("def run_epoch(train): train()", path, "exec"), made)
    went_on: list[bool] = []

    def train() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    defer_interrupts()
    with pytest.raises(KeyboardInterrupt):
        made["run_epoch"](train)
    assert not went_on


@pytest.mark.parametrize("use", ["call", "operation", "gather"])
def test_an_interrupt_between_a_lease_and_its_note_waits_for_the_note(
    mlp: tuple[Mlp, Mlp], session: Session, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    model, reference = mlp

    def gathered() -> None:
        with memd_client.gather(model):
            pass

    uses: dict[str, Callable[[], Any]] = {
        "call": lambda: model.first(batch(model)),
        "operation": lambda: model.first.weight.sum(),
        "gather": gathered,
    }
    add_use = thread_uses.add_use
    came: list[Any] = []

    def interrupted(uses: Any, parameter: Any) -> Any:
        if not came:
            came.append(parameter)
            signal.raise_signal(signal.SIGINT)
        add_use(uses, parameter)

    with monkeypatch.context() as patch:
        patch.setattr(residency, "add_use", interrupted)
        interrupted_in(uses[use])
    assert torch.equal(loss_of(model), loss_of(reference))
    assert leases_held(session) == 0


def test_a_module_call_leaves_those_that_an_interrupt_has_ended(
    mlp: tuple[Mlp, Mlp], session: Session
) -> None:
    """In a loop that never makes a step."""
    model, reference = mlp
    handle = model.second.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    interrupted_in(lambda: loss_of(model))
    handle.remove()
    assert leases_held(session) > 0, "torch calls no hooks after an interrupt"
    assert torch.equal(loss_of(model), loss_of(reference))
    assert leases_held(session) == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_calls_around_one_that_caught_the_interrupt_go_on(session: Session) -> None:
    class Outer(torch.nn.Module):
        """Catches interrupts of its inner module."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((32,), 2.0))
            self.inner = Mlp()
            self.inner.load_state_dict(reference.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                output: torch.Tensor = self.inner(x)
            except KeyboardInterrupt:
                output = self.inner(x)
            return output * self.scale.data

    defer_interrupts()
    reference = build(Mlp)
    model = memd_client.offload(Outer(), session)
    x = batch(reference)

    def interrupt(*_: Any) -> None:
        handle.remove()
        signal.raise_signal(signal.SIGINT)

    handle = model.inner.second.register_forward_pre_hook(interrupt)
    assert torch.equal(model(x), reference(x) * 2)
    assert leases_held(session) == 0


def test_a_step_that_was_interrupted_while_it_waited_is_made_once(
    mlp: tuple[Mlp, Mlp], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = mlp
    ours = memd_client.AdamW(model.parameters(), lr=1e-2)
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    job = session.transaction.job
    settle = job.steps.settle

    def interrupted(*arguments: Any) -> Any:
        safe_point()  # as a wait for an answer is one
        return settle(*arguments)

    for trained, optimizer in ((model, ours), (reference, torchs)):
        loss_of(trained).backward()
        optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(job.steps, "settle", interrupted)

        def ask() -> None:
            signal.raise_signal(signal.SIGINT)
            _ = session.committed_step

        interrupted_in(ask)
    assert session.committed_step == 1
    assert_same_state(model, reference)


def test_a_wait_for_an_answer_ends_at_once_and_may_be_repeated() -> None:
    defer_interrupts()
    latch = Latch()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    late = threading.Timer(_LONG_S, latch.open)
    timer.start()
    late.start()
    has_waited = False

    def wait() -> None:
        nonlocal has_waited
        latch.wait()
        has_waited = True

    interrupted_in(wait)
    assert not has_waited
    late.cancel()
    opened = threading.Timer(0.05, latch.open)
    opened.start()
    latch.wait()
    latch.wait()


def test_a_closure_is_the_user_s_code(mlp: tuple[Mlp, Mlp]) -> None:
    model, _ = mlp
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    came_back = False

    def closure() -> None:
        nonlocal came_back
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        came_back = True

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert not came_back


def test_a_handler_of_the_user_stays() -> None:
    numbers: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    defer_interrupts()
    signal.raise_signal(signal.SIGINT)
    assert numbers == [signal.SIGINT]


def test_only_the_main_thread_sets_the_handler() -> None:
    thread = threading.Thread(target=defer_interrupts)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    defer_interrupts()
    assert signal.getsignal(signal.SIGINT) is _handle
