"""Delayed updates of parameters that stay on a device: the bits of the same steps written out."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from memd_client import InvalidArgument, MemdError, NotYet
from memd_client.core.ranks import Ranks
from memd_client.device.departures import Departures
from memd_client.device.staying_copies import StayingCopies, staying_copies
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, MIXED_LOOPS, RATE, batch, reference
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.staying import (
    WrittenOut,
    backward,
    change_late,
    clamp_data,
    clip,
    drop_gradient,
    nothing,
    replace_gradient,
    stayed,
    with_memd,
    written_out,
)
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.offloaded import Loop
    from tests.device.staying import Change

ROOT = Path(__file__).parents[2]
SEEDS = (1, pytest.param(20, marks=pytest.mark.soak))
STEPS = 6


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def delayed(
    session: Session, begin: bool | int = True, **settings: Any
) -> tuple[nn.Module, memd_client.AdamW]:
    model = build("mlp").to("sim")
    optimizer = memd_client.AdamW(
        model.named_parameters(), lr=RATE, session=session, delayed_update=begin, **settings
    )
    return model, optimizer


def reference_of(model: nn.Module) -> WrittenOut:
    return WrittenOut(list(model.parameters()), is_delayed=True)


def steps(model: nn.Module, optimizer: Any, numbers: Sequence[int]) -> None:
    for step in numbers:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def are_pending(optimizer: memd_client.AdamW, session: Session) -> bool:
    assert optimizer.has_pending_update == session.has_pending_update
    return session.has_pending_update


def values(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().cpu() for each in model.state_dict().values()]


def values_written_out(numbers: Sequence[int], *, is_brought: bool = False) -> list[torch.Tensor]:
    model = build("mlp").to("sim")
    optimizer = reference_of(model)
    steps(model, optimizer, numbers)
    if is_brought:
        optimizer.bring_pending_update()
    return values(model)


# --- bits -----------------------------------------------------------------------------------------


CASES = (
    *(("mlp", loop, True) for loop in (*LOOPS, MIXED_LOOPS[1])),
    *(("mlp", LOOPS[0], 3), ("norms", LOOPS[0], True), ("bf16", LOOPS[0], True)),
)
MORE_CASES = (
    *(("mlp", loop, 3) for loop in (*LOOPS[1:], *MIXED_LOOPS)),
    *(("gpt", LOOPS[1], True), ("experts", LOOPS[0], True), ("lora", LOOPS[2], 2)),
)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("model", "loop", "begin"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.more) for case in MORE_CASES)],
    ids=str,
)
def test_training_has_the_bits_of_the_steps_written_out(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    loop: Loop,
    begin: bool | int,
    seeds: int,
) -> None:
    expected = reference(model, loop, "sim", STEPS, delayed_from=0 if begin is True else begin)
    for seed in range(seeds):
        SIM.seed(seed)
        found = stayed(daemon, monkeypatch, model, loop, delayed_update=begin, steps=STEPS)
        assert are_equal(found, expected)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("change", "set_to_none"),
    [
        *((nothing, False), (clip, True), (clip, False), (drop_gradient, True)),
        *(
            pytest.param(change, True, marks=pytest.mark.more)
            for change in (replace_gradient, change_late, clamp_data)
        ),
    ],
)
def test_what_a_program_changes_before_a_step_counts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, change: Change, set_to_none: bool, seeds: int
) -> None:
    expected = written_out(change, set_to_none=set_to_none, is_delayed=True)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            found = with_memd(session, change, set_to_none=set_to_none, delayed_update=True)
        assert are_equal(found, expected)


def test_gradients_that_nobody_drops_are_added_to(session: Session) -> None:
    """The next backward adds in place, where a copy may still be under way."""
    model, expected = build("mlp").to("sim"), build("mlp").to("sim")
    optimizer = memd_client.AdamW(
        model.named_parameters(), lr=RATE, session=session, delayed_update=True
    )
    for module, each in ((model, optimizer), (expected, reference_of(expected))):
        for step in range(STEPS):
            backward(module, step)
            clip(module, step)
            each.step()
    assert are_equal(values(model), values(expected))


def test_the_next_backward_comes_behind_copies_that_step_began(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has heard of their end."""
    plain_finish, is_over = Departures._finish, threading.Event()

    def finish(*arguments: Any) -> None:
        is_over.wait()
        plain_finish(*arguments)

    monkeypatch.setattr(Departures, "_finish", finish)
    model, optimizer = delayed(session)
    try:
        backward(model, 0)
        clip(model, 0)
        optimizer.step()
        backward(model, 1)
    finally:
        is_over.set()
    optimizer.step()
    assert session.committed_step == 2


def test_optimizers_delay_their_own_updates(session: Session) -> None:
    """A step of one is a commit, and brings nothing to the parameters of the other."""
    found = []
    for of_memd in (True, False):
        model = build("mlp").to("sim")
        named = list(model.named_parameters())
        if of_memd:
            optimizers: list[Any] = [
                memd_client.AdamW(part, lr=RATE, session=session, delayed_update=is_delayed)
                for part, is_delayed in ((named[:3], True), (named[3:6], True), (named[6:], False))
            ]
        else:
            optimizers = [
                WrittenOut([each for _, each in part], is_delayed=is_delayed)
                for part, is_delayed in ((named[:3], True), (named[3:6], True), (named[6:], False))
            ]
        for step in range(2 * STEPS):
            backward(model, step)
            optimizers[step % 3].step()
            model.zero_grad()
        found.append(values(model))
    assert are_equal(*found)


def test_a_commit_brings_what_is_not_delayed(session: Session) -> None:
    session.track(rng=True)
    found = []
    for of_memd in (True, False):
        model = build("mlp").to("sim")
        named = list(model.named_parameters())
        optimizers: list[Any] = [
            memd_client.AdamW(part, lr=RATE, session=session, delayed_update=is_delayed)
            if of_memd
            else WrittenOut([each for _, each in part], is_delayed=is_delayed)
            for part, is_delayed in ((named[::2], True), (named[1::2], False))
        ]
        for step in range(STEPS):
            backward(model, step)
            for each in optimizers:
                each.step()
            if of_memd:
                session.commit()
            model.zero_grad()
        found.append(values(model))
    assert are_equal(*found)


def test_parameters_on_two_devices(session: Session) -> None:
    found = []
    for of_memd in (True, False):
        models = {device: build("mlp").to(device) for device in ("sim:0", "sim:1")}
        pairs = [
            (f"{device}.{name}", each)
            for device, model in models.items()
            for name, each in model.named_parameters()
        ]
        optimizer: Any = (
            memd_client.AdamW(pairs, lr=RATE, session=session, delayed_update=True)
            if of_memd
            else WrittenOut([each for _, each in pairs], is_delayed=True)
        )
        for step in range(STEPS):
            for device, model in models.items():
                model(batch(step).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([each for model in models.values() for each in values(model)])
    assert are_equal(*found)


def test_a_closure_is_a_backward_with_the_values_from_before(session: Session) -> None:
    model, optimizer = delayed(session)

    def closure(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch(number).to("sim"))
        loss.backward()
        return loss

    for step in range(STEPS):
        optimizer.step(partial(closure, step))
    assert are_equal(values(model), values_written_out(range(STEPS)))


# --- what is pending ------------------------------------------------------------------------------


def test_a_pending_update_can_be_brought_at_once(session: Session) -> None:
    model, optimizer = delayed(session)
    assert not are_pending(optimizer, session)
    steps(model, optimizer, range(3))
    assert are_pending(optimizer, session)
    assert are_equal(values(model), values_written_out(range(3)))
    for _ in range(2):
        optimizer.bring_pending_update()
        assert not are_pending(optimizer, session)
        assert are_equal(values(model), values_written_out(range(3), is_brought=True))
    expected = build("mlp").to("sim")
    each = reference_of(expected)
    steps(expected, each, range(3))
    each.bring_pending_update()
    steps(expected, each, range(3, STEPS))
    steps(model, optimizer, range(3, STEPS))
    assert are_equal(values(model), values(expected))


def test_another_thread_brings_it_on_its_stream(session: Session) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(2))
    backward(model, 2)

    side = torch.Stream(device="sim")
    side.wait_stream(torch.accelerator.current_stream())

    def bring() -> None:
        with side:
            optimizer.bring_pending_update()

    thread = threading.Thread(target=bring)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    steps(model, optimizer, range(3, STEPS))
    assert are_equal(values(model), values_written_out(range(STEPS)))


def test_the_last_steps_can_do_without(session: Session) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(3))
    assert optimizer.delayed_update is True
    optimizer.delayed_update = False
    steps(model, optimizer, [3])
    assert not optimizer.has_pending_update
    expected = build("mlp").to("sim")
    each = reference_of(expected)
    steps(expected, each, range(3))
    each._is_delayed = False
    steps(expected, each, [3])
    assert are_equal(values(model), values(expected))


def test_a_written_value_is_lost_with_a_sentence(session: Session) -> None:
    """Its update was made of the value before, and the next step counts what is there then."""
    model, optimizer = delayed(session)
    steps(model, optimizer, range(2))
    next(model.parameters()).data.mul_(0.5)
    backward(model, 2)
    with pytest.raises(MemdError, match="was written while its update was pending"):
        optimizer.step()
    assert session.committed_step == 2
    brought = values_written_out(range(2), is_brought=True)
    assert are_equal(values(model), brought)
    optimizer.zero_grad()
    next(model.parameters()).data.mul_(0.5)  # nothing is pending
    steps(model, optimizer, range(3, STEPS))
    expected = build("mlp").to("sim")
    each = reference_of(expected)
    steps(expected, each, range(2))
    each.bring_pending_update()
    next(expected.parameters()).data.mul_(0.5)
    steps(expected, each, range(3, STEPS))
    assert are_equal(values(model), values(expected))


def test_a_commit_says_that_an_update_is_pending(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = delayed(session)
    session.track(other=torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        with pytest.raises(InvalidArgument, match="step\\(\\) has taken the gradient"):
            model(batch(0).to("sim"))
        with pytest.raises(InvalidArgument, match="bring_pending_update\\(\\) is not possible"):
            optimizer.bring_pending_update()
        with caplog.at_level("INFO", logger="memd_client"):
            session.commit(wait=step == 1)
        assert type(next(model.parameters())) is nn.Parameter
        optimizer.zero_grad()
    assert caplog.text.count("has an update that is pending") == 1
    assert "commit 2 has an update that is pending: the next step() brings it" in caplog.text
    assert are_equal(values(model), values_written_out(range(3)))


def test_who_brings_it_after_a_commit_does_so_in_each_run(daemon: Daemon) -> None:
    """Also when the loop resumes."""
    found = []
    for kills in (False, True):
        for run in range(2):
            session = memd_client.connect(
                daemon.address, job=f"averaged{kills}", host_bytes="16MiB"
            )
            model, optimizer = delayed(session)

            def bring(step: int, optimizer: memd_client.AdamW = optimizer) -> None:
                if step % 2 == 0:
                    optimizer.bring_pending_update()

            session.after_commit(bring)
            for step in range(session.resume(), 2 if kills and not run else STEPS):
                backward(model, step)
                optimizer.step()
                session.commit()
                optimizer.zero_grad()
            found.append(values(model))
            if run:
                session.drop_job()
            else:
                session.close()
    assert are_equal(found[1], found[3])


# --- saved states ---------------------------------------------------------------------------------


def on_host(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.cpu() for name, each in model.state_dict().items()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("is_model_first", [True, False])
def test_training_goes_on_from_a_state_with_a_pending_update(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, is_model_first: bool
) -> None:
    with connected(daemon, monkeypatch) as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(3))
        weights, state = through_a_file([on_host(model), optimizer.state_dict()])
        steps(model, optimizer, range(3, STEPS))
        assert are_equal(values(model), values_written_out(range(STEPS)))
    with connected(daemon, monkeypatch) as session:
        model, optimizer = delayed(session)
        loads: list[Callable[[], object]] = [
            lambda: model.load_state_dict(weights),
            lambda: optimizer.load_state_dict(state),
        ]
        for load in loads if is_model_first else reversed(loads):
            load()
        assert optimizer.has_pending_update
        steps(model, optimizer, range(3, STEPS))
        assert are_equal(values(model), values_written_out(range(STEPS)))


def test_a_state_with_a_pending_update_is_refused_by_who_does_not_know_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(3))
        state = through_a_file(optimizer.state_dict())
        optimizer.bring_pending_update()
        brought = through_a_file(optimizer.state_dict())
        torch.optim.AdamW(build("mlp").parameters()).load_state_dict(brought)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        plain = kind(build("mlp").parameters())
        with pytest.raises(ValueError, match="an update of memd's delayed_update is pending"):
            plain.load_state_dict(state)
    with connected(daemon, monkeypatch) as session:
        _, optimizer = delayed(session, False)
        with pytest.raises(InvalidArgument, match="make the optimizer with delayed_update=True"):
            optimizer.load_state_dict(state)
    with connected(daemon, monkeypatch) as session:
        model, optimizer = delayed(session)
        optimizer.load_state_dict(state)
        backward(model, 3)  # with other values than those of then
        with pytest.raises(MemdError, match="was written while its update was pending"):
            optimizer.step()
        del state["state"][0]["pending_value"]
        with pytest.raises(InvalidArgument, match="says that an update is pending, and has no"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("is_model_loaded", [False, True])
def test_a_state_that_is_loaded_takes_the_place_of_a_pending_update(
    session: Session, is_model_loaded: bool
) -> None:
    """Parameters have the values that they show."""
    model, optimizer = delayed(session)
    steps(model, optimizer, [0])
    optimizer.bring_pending_update()
    weights, state = through_a_file([on_host(model), optimizer.state_dict()])
    steps(model, optimizer, [1, 2])
    with pytest.raises(InvalidArgument, match="reset_state\\(\\) is not possible while an update"):
        optimizer.reset_state()
    if is_model_loaded:
        model.load_state_dict(weights)
    shown = on_host(model)
    optimizer.load_state_dict(state)
    assert not optimizer.has_pending_update
    steps(model, optimizer, range(3, STEPS))
    expected = build("mlp").to("sim")
    each = reference_of(expected)
    steps(expected, each, [0])
    each.bring_pending_update()
    expected.load_state_dict(shown)
    steps(expected, each, range(3, STEPS))
    assert are_equal(values(model), values(expected))


# --- who waits ------------------------------------------------------------------------------------


def test_the_training_thread_waits_for_the_device_to_compare_values_and_gradients_alone(
    session: Session,
) -> None:
    model, optimizer = delayed(session)
    for step in range(STEPS):
        session.transaction.job.settle()  # otherwise gradients may have to leave in step()
        before = Counter(session.statistics().waited_for)
        SIM.host_waits()
        backward(model, step)
        assert SIM.host_waits() == {}
        optimizer.step()
        waited = Counter(session.statistics().waited_for) - before
        assert waited == {"comparison": 2 if step else 1}
        optimizer.zero_grad()


def test_gradients_leave_in_backward_once_the_update_is_made(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = delayed(session)
    count = len(list(model.parameters()))
    sent = Counter[str]()
    moment = ""
    plain_leave = StayingCopies.leave

    def leave(*arguments: Any) -> None:
        sent[moment] += 1
        plain_leave(*arguments)

    monkeypatch.setattr(StayingCopies, "leave", leave)
    steps_made = session.transaction.job.steps
    for step in range(STEPS):
        step_in_flight = steps_made._in_flight
        if step_in_flight is not None:
            step_in_flight.call.result()  # nobody has asked for the answer yet
        sent.clear()
        moment = "backward"
        backward(model, step)
        moment = "step"
        optimizer.step()
        optimizer.zero_grad()
        assert sent == {"backward": count}
    assert steps_made.is_in_flight  # nobody has waited for the last update


# --- failures -------------------------------------------------------------------------------------


def test_a_delayed_step_that_is_not_made_is_left_out(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = delayed(session)
    control = session.transaction.job.control

    def refuse(_: object) -> None:
        raise MemdError("not today")

    steps(model, optimizer, range(2))
    assert session.committed_step == 2
    with monkeypatch.context() as patched:
        patched.setattr(control, "begin_step", refuse)
        steps(model, optimizer, [2])
        leases = session.transaction.job.unordered_leases
        copies = staying_copies(leases, torch.device("sim", 0), job="")
        copies._departures._thread.wait_for_end()
    with pytest.raises(MemdError, match=r"step 3 was not committed, and its gradients are gone"):
        backward(model, 3)
    assert not optimizer.has_pending_update
    optimizer.zero_grad()
    steps(model, optimizer, range(3, STEPS))
    expected = build("mlp").to("sim")
    each = reference_of(expected)
    steps(expected, each, range(2))
    each.bring_pending_update()
    steps(expected, each, range(3, STEPS))
    assert session.committed_step == 5
    assert are_equal(values(model), values(expected))


def test_a_delayed_step_is_made_again_while_its_gradients_are_there(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = delayed(session)
    control = session.transaction.job.control

    def refuse(_: object) -> None:
        raise MemdError("not today")

    for step in range(STEPS):
        backward(model, step)
        with monkeypatch.context() as patched:
            patched.setattr(control, "begin_step", refuse)
            optimizer.step()
            with pytest.raises(MemdError, match="its gradients are as they were: not today"):
                _ = session.committed_step
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal(values(model), values_written_out(range(STEPS)))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [0, -1, 1.5, "yes", None])
def test_a_wrong_begin(session: Session, begin: Any) -> None:
    with pytest.raises(InvalidArgument, match="delayed_update is True, False, or the number"):
        delayed(session, begin)
    _, optimizer = delayed(session, 3)
    with pytest.raises(InvalidArgument, match="delayed_update is True, False, or the number"):
        optimizer.delayed_update = begin


def test_what_cannot_wait_for_its_update(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotYet, match="delayed_update with step_in_backward=True comes in a later"):
        delayed(session, step_in_backward=True)
    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "are_several", property(lambda _: True))
        with pytest.raises(NotYet, match="delayed_update with several ranks comes in a later"):
            delayed(session)
    model = build("mlp")
    memd_client.offload(model, session)
    with pytest.raises(InvalidArgument, match="is offloaded, and its next forward waits for its"):
        memd_client.AdamW(model.parameters(), delayed_update=True)


def test_an_optimizer_that_was_made_without_stays_so(session: Session) -> None:
    _, optimizer = delayed(session, False)
    optimizer.delayed_update = False
    with pytest.raises(InvalidArgument, match="was made without delayed_update; make it with"):
        optimizer.delayed_update = True


def test_a_step_in_backward(session: Session) -> None:
    model, optimizer = delayed(session)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(InvalidArgument, match=r"step\(\) in backward is not possible with delayed"):
        backward(model, 0)


# --- kills ----------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
import torch
import memd_client
from memd_client.device.staying_copies import StayingCopies
from tests.device.test_delayed_update import delayed, backward
torch.set_num_threads(1)
address, name, kill_at, is_tracked = sys.argv[1], sys.argv[2], int(sys.argv[3]), len(sys.argv) > 4
session = memd_client.connect(address, job="delayed", host_bytes="16MiB")
model, optimizer = delayed(session)
count = 0
def note():
    global count
    count += 1
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
if name != "step":
    plain = getattr(StayingCopies, name)
    def counted(*arguments):
        note()
        return plain(*arguments)
    setattr(StayingCopies, name, counted)
if is_tracked:
    session.track(rng=True)
for step in range(session.resume(), 9):
    backward(model, step)
    optimizer.step()
    if is_tracked:
        session.commit(wait=True)
    optimizer.zero_grad()
    if name == "step":
        note()
"""
_COUNT = len(list(build("mlp").parameters()))


_KILLS = (
    *(("step", 1, True), ("step", 4, False), ("bring", 1, False), ("bring", _COUNT + 3, True)),
    *(("step", 2, False), ("step", 3, True), ("leave", 2 * _COUNT + 2, False)),
)


@pytest.mark.parametrize(
    ("name", "kill_at", "is_tracked"),
    [
        ("step", 2, True),
        ("bring", _COUNT + 3, False),
        *(pytest.param(*kill, marks=pytest.mark.more) for kill in _KILLS[-2:]),
        *(pytest.param(*kill, marks=pytest.mark.soak) for kill in _KILLS[:-2]),
    ],
)
def test_a_killed_trainer_goes_on_with_the_same_bits(
    daemon: Daemon, name: str, kill_at: int, is_tracked: bool
) -> None:
    """Killed while an update is pending: behind a step, while values come with the next one, or in
    the next backward."""
    command = [sys.executable, "-c", CHILD, daemon.address, name, str(kill_at)]
    command += ["tracked"] * is_tracked
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    with memd_client.connect(daemon.address, job="delayed", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        newest = values(model)
        if is_tracked:
            session.track(rng=True)
        made = session.resume()
        assert made
        assert optimizer.has_pending_update
        assert not are_equal(values(model), newest)
        assert are_equal(values(model), values_written_out(range(made)))
        for step in range(made, STEPS):
            backward(model, step)
            optimizer.step()
            if is_tracked:
                session.commit()
            optimizer.zero_grad()
        found = values(model)
        session.drop_job()
    assert are_equal(found, values_written_out(range(STEPS)))
