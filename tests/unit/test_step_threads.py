"""Sessions that several threads use while steps are closed: the daemon is faked."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
import memd_native
from memd_client.errors import from_code
from memd_client.parameters.parameter import streamed
from memd_client.parameters.thread_uses import this_thread
from tests.unit.client_cases import Mlp, assert_same_state, build, loss_of
from tests.unit.fake_session import FakeCall, FakeDaemon, status_error
from tests.unit.thread_cases import gathered_elsewhere
from tests.unit.view_cases import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session
    from memd_proto.v1 import session_pb2

# Of threads that wait for each other for ever, and of what another thread may never come to.
_DEADLOCK_S, _MOMENT_S = 10.0, 0.2
DEADLINE = 9
_FIRST, _OTHER = "step closer", "other"


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def session(daemon: FakeDaemon) -> Session:
    return daemon.session()


def run_together(**bodies: Callable[[], Any]) -> dict[str, BaseException | None]:
    """What each raised."""
    raised: dict[str, BaseException | None] = {}

    def run(name: str, body: Callable[[], Any]) -> None:
        try:
            body()
            raised[name] = None
        except BaseException as error:  # noqa: BLE001 handed to the caller
            raised[name] = error

    threads = [
        threading.Thread(target=run, args=each, name=each[0], daemon=True)
        for each in bodies.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLOCK_S)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"they wait for each other: {stuck}"
    return raised


@pytest.mark.parametrize("tracks", [False, True])
def test_two_optimizers_step_in_two_threads_and_no_update_is_lost(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch, tracks: bool
) -> None:
    models = [build(Mlp), build(Mlp)]
    twins = [build(Mlp), build(Mlp)]
    memd_client.offload(torch.nn.ModuleList(models), session)
    optimizers = [memd_client.AdamW(model.parameters(), lr=1e-2) for model in models]
    torchs = [torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True) for twin in twins]
    for model in (*models, *twins):
        loss_of(model).backward()
    if tracks:
        session.track(rng=True)
    # One thread has asked what its step is, and sends it when the other has sealed, or cannot.
    sealed = threading.Event()
    job = session.transaction.job
    seal = job.steps.seal
    sync_if_needed = job.sync_if_needed

    def seal_and_tell(*arguments: Any) -> Any:
        open_step = seal(*arguments)
        if threading.current_thread().name == "second":
            sealed.set()
        return open_step

    def send_late() -> None:
        sync_if_needed()
        if threading.current_thread().name == "first":
            sealed.wait(_MOMENT_S)

    monkeypatch.setattr(job.steps, "seal", seal_and_tell)
    monkeypatch.setattr(job, "sync_if_needed", send_late)

    def step(index: int) -> None:
        optimizers[index].step()
        if tracks:
            session.commit()

    assert run_together(first=lambda: step(0), second=lambda: step(1)) == {
        "first": None,
        "second": None,
    }
    for twin, optimizer in zip(twins, torchs, strict=True):
        optimizer.step()
        assert all(parameter.grad is not None for parameter in twin.parameters())
    assert session.committed_step == 2
    for model, twin in zip(models, twins, strict=True):
        assert_same_state(model, twin)


class LockOfSteps:
    """The lock of `steps.Steps`, which the other thread asks for only once the one that closes a
    step has come as far as it can."""

    def __init__(self, lock: Any, is_asked: threading.Event, is_sealing: threading.Event) -> None:
        self.lock, self.is_asked, self.is_sealing = lock, is_asked, is_sealing

    def __enter__(self) -> Any:
        if threading.current_thread().name == _OTHER and not self.is_asked.is_set():
            self.is_asked.set()
            self.is_sealing.wait(_MOMENT_S)
        return self.lock.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.lock.__exit__(*error)


@pytest.mark.parametrize("use", ["value", "gradient"])
def test_a_parameter_is_used_in_one_thread_while_a_step_seals_it_in_another(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    model, before = build(Mlp), build(Mlp)
    memd_client.offload(torch.nn.ModuleList([model, before]), session)
    optimizer, first = (memd_client.AdamW(each.parameters(), lr=1e-2) for each in (model, before))
    loss_of(model).backward()
    loss_of(before).backward()
    first.step()  # it is on its way, without an answer yet
    parameter = next(model.parameters())
    entry = streamed(parameter)
    assert entry is not None
    gradient = torch.ones(parameter.shape)
    leases = session.transaction.job.unordered_leases
    is_asked, is_sealing = threading.Event(), threading.Event()
    steps = session.transaction.job.steps
    monkeypatch.setattr(steps, "_lock", LockOfSteps(steps._lock, is_asked, is_sealing))
    refuse_if_in_use = entry.residency.refuse_if_in_use

    def note_sealing(what: str) -> None:
        is_sealing.set()
        refuse_if_in_use(what)

    monkeypatch.setattr(entry.residency, "refuse_if_in_use", note_sealing)
    result = FakeCall.result

    def answer_late(call: FakeCall) -> session_pb2.StepResponse:
        assert is_asked.wait(_DEADLOCK_S)
        return result(call)

    monkeypatch.setattr(FakeCall, "result", answer_late)
    monkeypatch.setattr(FakeCall, "done", lambda _call: True)

    def use_it() -> None:
        if use == "value":
            uses = this_thread.uses
            entry.residency.fetch(parameter, uses)
            entry.residency.release(parameter, uses)
        else:
            entry.gradient.accumulate(gradient, leases)

    raised = run_together(**{_FIRST: optimizer.step, _OTHER: use_it})
    assert raised[_OTHER] is None
    # Which of the two came first nobody knows; whoever came second was told or has waited.
    assert raised[_FIRST] is None or "is in use" in str(raised[_FIRST])


def test_a_step_that_could_not_be_sent_keeps_no_lease_of_another_thread_waiting(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Mlp)
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    session.put("x", torch.arange(3.0))
    loss_of(model).backward()
    found: list[torch.Tensor] = []

    def refuse(request: session_pb2.StepRequest) -> FakeCall:
        del request
        assert run_together(get=lambda: found.append(session.get("x"))) == {"get": None}
        raise RuntimeError("can't create new thread")

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "begin_step", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            optimizer.step()
    assert torch.equal(found.pop(), torch.arange(3.0))
    optimizer.step()  # with the gradients, which are as they were
    assert session.committed_step == 1


def test_a_lease_that_finds_no_daemon_does_not_wait_for_a_step_too(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Mlp)
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()

    def refuse(*arguments: Any) -> Any:
        del arguments
        raise status_error(10, "the daemon did not answer within 61000 ms")

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "lease", refuse)
        patch.setattr(FakeCall, "result", lambda _call: pytest.fail("waits for the step"))
        with pytest.raises(
            memd_client.DaemonUnavailable, match="step 1: it is not known whether it is committed"
        ):
            loss_of(model)
    assert session.committed_step == 1  # the next use asks


def test_what_was_saved_during_a_step_that_failed_does_not_pass_for_the_value_after_the_next(
    daemon: FakeDaemon, session: Session
) -> None:

    model = build(Mlp)
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    parameter = next(model.parameters())
    entry = streamed(parameter)
    assert entry is not None
    loss_of(model).backward()
    count_before = entry.residency.write_count
    optimizer.step()
    count_meanwhile = entry.residency.write_count
    daemon.step_failures.append(from_code(5, "the disk is full"))
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        _ = session.committed_step
    assert entry.residency.write_count == count_before, (
        "what was saved before the step is as it was"
    )
    optimizer.step()
    assert session.committed_step == 1
    assert entry.residency.write_count not in (count_before, count_meanwhile)
    # And so for changes by hand.
    daemon.step_failures.append(from_code(5, "the disk is full"))
    loss_of(model).backward()
    count_before = entry.residency.write_count
    optimizer.step()
    count_meanwhile = entry.residency.write_count
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        _ = session.committed_step
    with memd_client.gather(parameter, write=True), torch.no_grad():
        assert entry.residency.write_count == count_before
        parameter.add_(1)
        assert entry.residency.write_count not in (count_before, count_meanwhile)
        changed = entry.residency.write_count
    assert entry.residency.write_count == changed


def test_a_value_that_a_step_outdated_stays_outdated_when_the_next_step_fails(
    daemon: FakeDaemon, session: Session
) -> None:
    model, reference = build(Mlp), build(Mlp)
    memd_client.offload(model, session)
    optimizers = (
        memd_client.AdamW(model.parameters(), lr=1e-2),
        torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
    )
    for module in (model, reference):
        loss_of(module).backward()
    outputs: list[torch.Tensor] = []
    with gathered_elsewhere(model) as leave:
        for optimizer in optimizers:
            optimizer.step()
        assert session.committed_step == 1
        leases = session.transaction.job.unordered_leases
        for parameter in model.parameters():
            entry = streamed(parameter)
            assert entry is not None
            entry.gradient.accumulate(torch.ones(parameter.shape), leases)
        daemon.step_failures.append(from_code(5, "the disk is full"))
        optimizers[0].step()
        with pytest.raises(memd_client.CapacityError, match="not committed"):
            _ = session.committed_step
        # It may not join the thread that has the value from before both steps.
        thread = threading.Thread(target=lambda: outputs.append(loss_of(model)), daemon=True)
        thread.start()
        thread.join(_MOMENT_S)
        leave()
        thread.join(_DEADLOCK_S)
    assert torch.equal(outputs.pop(), loss_of(reference))
    assert_same_state(model, reference)


def test_a_thread_that_gathers_for_writing_goes_on_while_views_wait_for_it(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, reference = build(Mlp), build(Mlp), build(Mlp)
    memd_client.offload(torch.nn.ModuleList([model, other]), session)
    optimizers = (
        memd_client.AdamW(model.parameters(), lr=1e-2),
        torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
    )
    view = view_of(model.get_parameter("layers.0.weight"))
    for module in (model, reference):
        loss_of(module).backward()
    optimizers[1].step()
    is_sent, is_inside, is_showing = (threading.Event() for _ in range(3))
    entry = streamed(model.get_parameter("layers.0.weight"))
    assert entry is not None
    begin_step, lease, result = daemon.begin_step, daemon.lease, FakeCall.result
    show_update = entry.residency.show_update

    def send(request: session_pb2.StepRequest) -> FakeCall:
        call = begin_step(request)
        is_sent.set()
        return call

    def answer_late(call: FakeCall) -> session_pb2.StepResponse:
        assert is_inside.wait(_DEADLOCK_S)
        return result(call)

    def show() -> None:
        is_showing.set()
        show_update()

    def lease_in_the_end(*arguments: Any) -> Any:
        deadline = time.monotonic() + 2 * _DEADLOCK_S
        while True:
            try:
                return lease(*arguments)
            except memd_native.StatusError as error:
                if error.code != DEADLINE or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def write() -> None:
        assert is_sent.wait(_DEADLOCK_S)
        with memd_client.gather(model.get_parameter("layers.0.weight"), write=True):
            is_inside.set()
            assert is_showing.wait(_DEADLOCK_S)
            loss_of(other)

    monkeypatch.setattr(daemon, "begin_step", send)
    monkeypatch.setattr(daemon, "lease", lease_in_the_end)
    monkeypatch.setattr(FakeCall, "result", answer_late)
    monkeypatch.setattr(entry.residency, "show_update", show)
    assert run_together(step=optimizers[0].step, write=write) == {"step": None, "write": None}
    assert session.committed_step == 1
    assert torch.equal(view, reference.get_parameter("layers.0.weight"))
    assert_same_state(model, reference)


def test_a_lease_of_a_committed_step_s_value_waits_no_longer_than_another(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Mlp)
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    view = view_of(model.get_parameter("layers.0.weight"))
    loss_of(model).backward()
    lease = daemon.lease
    refused: list[tuple[Any, ...]] = []

    def refuse(*arguments: Any) -> Any:
        if not daemon.committed_step:
            return lease(*arguments)
        refused.append(arguments)
        assert len(refused) < 10, "it is asked for again and again"
        raise status_error(DEADLINE, "it is being written")

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "lease", refuse)
        with pytest.raises(memd_client.MemdError, match="step 1 is committed; new values are not"):
            optimizer.step()
    assert session.committed_step == 1
    assert torch.equal(view, model.get_parameter("layers.0.weight"))
