"""Parameters that stay on a device: training has the bits of the same steps written out."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
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
from tests.device.offloaded import LOOPS, MIXED_LOOPS, RATE, STEPS, Loop, batch, reference
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
    write_data,
    write_value,
    written_out,
)
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session
    from memd_client.connection.shard import Shard
    from tests.daemons import Daemon
    from tests.device.staying import Change, Stepped

ROOT = Path(__file__).parents[2]
SEEDS = (1, pytest.param(20, marks=pytest.mark.soak))


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def staying(session: Session, **settings: Any) -> tuple[nn.Module, memd_client.AdamW]:
    model = build("mlp").to("sim")
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session, **settings)
    return model, optimizer


# --- bits -----------------------------------------------------------------------------------------


CASES = (
    *(("mlp", loop) for loop in (*LOOPS, MIXED_LOOPS[1], MIXED_LOOPS[3])),
    *(("norms", LOOPS[0]), ("bf16", LOOPS[0]), ("gpt", LOOPS[1])),
)
MORE_CASES = (
    *(("mlp", loop) for loop in MIXED_LOOPS[::2]),
    *(("lora", LOOPS[2]), ("experts", LOOPS[0])),
    ("gpt", Loop("checkpoints", has_checkpoints=True)),
)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("model", "loop"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.more) for case in MORE_CASES)],
    ids=str,
)
def test_training_has_the_bits_of_training_without_memd(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, model: str, loop: Loop, seeds: int
) -> None:
    expected = reference(model, loop, "sim")
    for seed in range(seeds):
        SIM.seed(seed)
        assert are_equal(stayed(daemon, monkeypatch, model, loop), expected)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("change", "set_to_none"),
    [
        *((nothing, True), (clip, True), (clip, False), (replace_gradient, True)),
        *((drop_gradient, True), (change_late, True), (write_data, True), (clamp_data, True)),
        pytest.param(nothing, False, marks=pytest.mark.more),
        pytest.param(write_value, True, marks=pytest.mark.more),
    ],
)
def test_what_a_program_changes_before_a_step_counts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, change: Change, set_to_none: bool, seeds: int
) -> None:
    """Whether a gradient has left by then or not."""
    expected = written_out(change, set_to_none=set_to_none)
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert are_equal(with_memd(session, change, set_to_none=set_to_none), expected)


def test_a_second_step_takes_the_same_gradients_again(session: Session) -> None:
    """As torch's: nobody has called `zero_grad()`."""
    model, optimizer = staying(session)
    plain = build("mlp").to("sim")
    stepped: Stepped
    for module, stepped in ((model, optimizer), (plain, WrittenOut(list(plain.parameters())))):
        for step in range(2):
            backward(module, step)
            stepped.step()
            stepped.step()
            stepped.zero_grad()
    found, expected = (
        [each.detach().cpu() for each in module.parameters()] for module in (model, plain)
    )
    assert are_equal(found, expected)


def test_a_parameter_whose_elements_lie_in_another_order(session: Session) -> None:
    def weights(device: str) -> torch.Tensor:
        made = torch.arange(48.0).view(6, 8).t() / 48
        weight = nn.Parameter(made.to(device))
        assert not weight.is_contiguous()
        optimizer: Any
        if device == "cpu":
            optimizer = torch.optim.AdamW([weight], lr=RATE, fused=True)
        else:
            optimizer = memd_client.AdamW([("weight", weight)], lr=RATE, session=session)
        for step in range(STEPS):
            (weight.sum(0) @ torch.arange(6.0).add(step).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().cpu()

    assert torch.equal(weights("sim"), weights("cpu"))


class Halves(nn.Module):
    """On two devices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 8)
        self.to("sim:0")
        self.second.to("sim:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(torch.tanh(self.first(x)).to("sim:1")).square().mean()
        return loss


def test_a_model_on_two_devices(session: Session) -> None:
    found = []
    for is_reference in (False, True):
        model = Halves()
        optimizer: Any
        if is_reference:
            optimizer = WrittenOut(list(model.parameters()))
            clip_all = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
        else:
            optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
            clip_all = optimizer.clip_grad_norm_
        for step in range(STEPS):
            backward(model, step)
            if step % 2:
                clip_all(0.05)
            optimizer.step()
            optimizer.zero_grad()
        found.append([each.detach().cpu() for each in model.parameters()])
    assert are_equal(*found)


def test_a_state_of_torchs_optimizer_on_the_device_is_gone_on_with(session: Session) -> None:
    there, plain = build("mlp").to("sim"), build("mlp").to("sim")
    first = torch.optim.AdamW(plain.parameters(), lr=RATE)
    backward(plain, 0)
    first.step()
    there.load_state_dict(plain.state_dict())
    optimizer = memd_client.AdamW(there.parameters(), lr=RATE, session=session)
    optimizer.load_state_dict(first.state_dict())
    host = build("mlp")
    host.load_state_dict(plain.state_dict())
    last = torch.optim.AdamW(host.parameters(), lr=RATE, fused=True)
    last.load_state_dict(first.state_dict())
    last.param_groups[0]["fused"] = True
    backward(there, 1)
    for one, other in zip(there.parameters(), host.parameters(), strict=True):
        assert one.grad is not None
        other.grad = one.grad.cpu()
    optimizer.step()
    last.step()
    found, expected = (
        [each.detach().cpu() for each in model.parameters()] for model in (there, host)
    )
    assert are_equal(found, expected)


# --- who waits ------------------------------------------------------------------------------------


def test_gradients_leave_in_the_last_backward_unless_they_change_behind_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = staying(session)
    count = len(list(model.parameters()))
    sent = Counter[str]()
    moment = ""
    plain_leave = StayingCopies.leave

    def leave(*arguments: Any) -> None:
        sent[moment] += 1
        plain_leave(*arguments)

    monkeypatch.setattr(StayingCopies, "leave", leave)

    def step(backwards: int, change: Change) -> dict[str, int]:
        nonlocal moment
        sent.clear()
        for number in range(backwards):
            moment = f"backward {number}"
            backward(model, number)
        change(model, 0)
        moment = "step"
        optimizer.step()
        optimizer.zero_grad()
        return dict(sent)

    assert step(2, nothing) == {"backward 0": count, "backward 1": count}
    assert step(2, nothing) == {"backward 1": count}
    assert step(2, clip) == {"backward 1": count, "step": count}
    assert step(2, clip) == {"step": count}
    assert step(1, nothing) == {"step": count}
    assert step(1, nothing) == {"backward 0": count}


def test_a_gradient_of_another_dtype_stays_and_the_step_refuses_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation has no sparse ones."""
    model, optimizer = staying(session)
    parameter = next(model.parameters())
    left: list[str] = []
    plain_leave = StayingCopies.leave

    def leave(copies: StayingCopies, shard: Shard, *others: Any) -> None:
        left.append(shard.name)
        plain_leave(copies, shard, *others)

    with monkeypatch.context() as patched:
        patched.setattr(StayingCopies, "leave", leave)
        parameter.grad_dtype = torch.bfloat16
        backward(model, 0)
    assert sorted([*left, "layers.0.weight"]) == sorted(dict(model.named_parameters()))
    with pytest.raises(InvalidArgument, match="another shape or dtype than the parameter"):
        optimizer.step()
    optimizer.zero_grad()
    parameter.grad_dtype = torch.float32
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    found = [each.cpu() for each in model.state_dict().values()]
    assert are_equal(found, reference("mlp", LOOPS[0], "sim")[STEPS:])


def test_nothing_leaves_in_a_backward_that_is_captured(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation has no graphs."""
    model, optimizer = staying(session)
    with monkeypatch.context() as patched:
        patched.setattr(StayingCopies, "may_leave", False)
        patched.setattr(StayingCopies, "leave", None)
        backward(model, 0)
    optimizer.step()
    assert session.committed_step == 1


def test_the_training_thread_waits_for_the_device_once_a_step_to_compare_values_and_gradients(
    session: Session,
) -> None:
    model, optimizer = staying(session)
    count = len(list(model.parameters()))
    for step in range(STEPS):
        before = Counter(session.statistics().waited_for)
        SIM.host_waits()
        with SIM.timeline() as timeline:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert SIM.host_waits() == {}
        # The gradients, and what all comparisons have found.
        assert len(timeline.entries("copy_out")) == count + 1
        assert Counter(session.statistics().waited_for) - before == {"comparison": 1}


def test_nobody_waits_for_a_norm(session: Session) -> None:
    model, optimizer = staying(session)
    backward(model, 0)
    SIM.host_waits()
    norm = optimizer.clip_grad_norm_(0.05)
    assert SIM.host_waits() == {}
    model.zero_grad()
    backward(model, 0)
    assert torch.equal(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).cpu(), norm.cpu())


# --- failures -------------------------------------------------------------------------------------


def lose_gradients(model: nn.Module, session: Session, patch: pytest.MonkeyPatch) -> None:
    """In a backward. Zeros lie in their place."""
    plain_finish, plain_copy = Departures._finish, Departures._copy_out

    def copy_out(found: Departures, source: torch.Tensor, target: torch.Tensor) -> torch.Event:
        return plain_copy(found, torch.zeros_like(source), target)

    def fail(*arguments: Any) -> None:
        plain_finish(*arguments)
        raise RuntimeError("lost on the way")

    with patch.context() as patched:
        patched.setattr(Departures, "_finish", fail)
        patched.setattr(Departures, "_copy_out", copy_out)
        backward(model, 0)
        copies = staying_copies(session.leases, torch.device("sim", 0), job="")
        copies._departures._thread.wait_for_end()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_is_repeated_after_a_gradient_that_did_not_arrive(
    session: Session, monkeypatch: pytest.MonkeyPatch, set_to_none: bool
) -> None:
    model, optimizer = staying(session)
    before = [each.detach().cpu() for each in model.parameters()]
    lose_gradients(model, session, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(session.leases, "value", None)  # a lease would wait for a step in vain
        with pytest.raises(
            MemdError, match=r"did not arrive from its device, so call optimizer\.zero_grad"
        ):
            optimizer.step()
    assert are_equal([each.detach().cpu() for each in model.parameters()], before)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, step)
        optimizer.step()
    found = [each.cpu() for each in model.state_dict().values()]
    assert are_equal(found, reference("mlp", LOOPS[0], "sim")[STEPS:])


def test_what_another_optimizer_gave_up_leaves_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = build("mlp").to("sim"), build("mlp").to("sim")
    named = list(model.named_parameters())
    first, second = (
        memd_client.AdamW(part, lr=RATE, session=session) for part in (named[:2], named[2:])
    )
    lose_gradients(model, session, monkeypatch)
    first.zero_grad()
    second.step()
    backward(expected, 0)
    WrittenOut(list(expected.parameters())[2:]).step()
    found, wanted = ([each.cpu() for each in of.state_dict().values()] for of in (model, expected))
    assert are_equal(found, wanted)


def test_a_step_that_is_not_made_is_made_again_with_the_same_gradients(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = staying(session)
    control = session.transaction.job.control

    def refuse(_: object) -> None:
        raise MemdError("not today")

    for step in range(STEPS):
        backward(model, step)
        with monkeypatch.context() as patched:
            patched.setattr(control, "begin_step", refuse)
            with pytest.raises(MemdError, match="not today"):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    found = [each.cpu() for each in model.state_dict().values()]
    assert are_equal(found, reference("mlp", LOOPS[0], "sim")[STEPS:])


def test_an_optimizer_ends_with_its_last_user_and_another_goes_on(session: Session) -> None:
    model, optimizer = staying(session)
    backward(model, 0)
    del optimizer
    gc.collect()
    assert not next(model.parameters())._post_accumulate_grad_hooks
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
    optimizer.step()
    assert session.committed_step == 1


def test_backward_goes_on_when_the_session_has_ended(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="ended", host_bytes="16MiB") as session:
        model, optimizer = staying(session)
        session.drop_job()
    backward(model, 0)
    with pytest.raises(MemdError, match="closed"):
        optimizer.step()


def test_between_step_and_commit_a_parameter_is_not_used(session: Session) -> None:
    model, optimizer = staying(session)
    session.track(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    for step in range(2):
        kept = next(model.parameters()).data
        backward(model, step)
        optimizer.step()
        with pytest.raises(InvalidArgument, match="step\\(\\) has taken the gradient"):
            model(batch(0).to("sim"))
        if step:
            kept.mul_(2)
            with pytest.raises(MemdError, match="was written through a tensor"):
                session.commit()
        session.commit()
        optimizer.zero_grad()
    assert session.committed_step == 2


# --- what comes later -----------------------------------------------------------------------------


def test_several_ranks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "are_several", property(lambda _: True))
        with pytest.raises(NotYet, match="stay on a device come with several ranks in a later"):
            staying(session)


def test_a_model_that_moves_to_a_device_later(session: Session) -> None:
    model, optimizer = staying(session)
    model.to("sim:1")
    model(batch(0).to("sim:1")).backward()
    with pytest.raises(InvalidArgument, match=r"was on sim:0 when .* is on sim:1 now"):
        optimizer.step()


# --- kills ----------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
import torch
import memd_client
from memd_client.device.staying_copies import StayingCopies, staying_copies
from tests.device.offloaded import RATE
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.staying import backward
torch.set_num_threads(1)
address, name, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = memd_client.connect(address, job="staying", host_bytes="16MiB")
model = build("mlp").to("sim")
optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
plain, count = getattr(StayingCopies, name), 0
def counted(*arguments):
    global count
    count += 1
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)
setattr(StayingCopies, name, counted)
for step in range(session.resume(), 9):
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("name", "made"), [("bring", 2), pytest.param("leave", 1, marks=pytest.mark.more)]
)
def test_a_killed_trainer_goes_on_with_the_same_bits(daemon: Daemon, name: str, made: int) -> None:
    """Killed while new values come to the device, or while gradients leave it."""
    kill_at = len(list(build("mlp").parameters())) + 3
    command = [sys.executable, "-c", CHILD, daemon.address, name, str(kill_at)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    with memd_client.connect(daemon.address, job="staying", host_bytes="16MiB") as session:
        model, optimizer = staying(session)
        assert session.resume() == made
        for step in range(made, STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found = [each.cpu() for each in model.state_dict().values()]
        session.drop_job()
    assert are_equal(found, reference("mlp", LOOPS[0], "sim")[STEPS:])
