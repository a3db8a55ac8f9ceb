"""Delayed updates of parameters that stay in the process: the bits of the steps written out."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.testing._internal.two_tensor import TwoTensor

import memd_client
from memd.client import DaemonClient
from memd_client import DaemonUnavailable, InvalidArgument, MemdError, NotYet
from tests.daemons import fresh
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memd_client import Session
    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RATE = 1e-2
STEPS = 6


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with fresh(daemon, "delayed", host_bytes="16MiB") as session:
        yield session


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(dtype)


def delayed(session: Session) -> tuple[nn.Sequential, memd_client.AdamW]:
    model = model_of()
    optimizer = memd_client.AdamW(
        model.named_parameters(), lr=RATE, session=session, delayed_update=True
    )
    return model, optimizer


def backward(model: nn.Module, number: int) -> None:
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
    model(inputs).square().mean().backward()


def steps(model: nn.Module, optimizer: Any, numbers: Sequence[int]) -> None:
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def written_out(count: int, *, is_brought: bool = False) -> list[torch.Tensor]:
    model = model_of()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    pending: list[torch.Tensor | None] = []

    def bring() -> None:
        for parameter, gradient in zip(parameters, pending, strict=False):
            parameter.grad = gradient
        if pending:
            optimizer.step()

    for number in range(count):
        optimizer.zero_grad()
        backward(model, number)
        gradients = [each.grad for each in parameters]
        bring()
        pending = gradients
    if is_brought:
        bring()
    return values(model)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("is_settled", [False, True])
def test_training_has_the_bits_of_the_steps_written_out(session: Session, is_settled: bool) -> None:
    """However soon the update is made."""
    model, optimizer = delayed(session)
    for number in range(STEPS):
        steps(model, optimizer, [number])
        if is_settled:
            assert session.committed_step == number + 1
    assert optimizer.has_pending_update
    assert are_equal(values(model), written_out(STEPS))
    optimizer.bring_pending_update()
    assert are_equal(values(model), written_out(STEPS, is_brought=True))


def test_a_written_value_is_lost_with_a_sentence(session: Session) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(2))
    next(model.parameters()).data.mul_(0.5)
    with pytest.raises(MemdError, match=r"'0\.weight' was written while its update was pending"):
        optimizer.bring_pending_update()
    assert not optimizer.has_pending_update
    assert are_equal(values(model), written_out(2, is_brought=True))


def test_a_state_is_saved_and_loaded(daemon: Daemon) -> None:
    with fresh(daemon, "delayed", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(3))
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        state = optimizer.state_dict()
        optimizer.bring_pending_update()
    with fresh(daemon, "delayed", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        session.commit()  # makes durable what was loaded, and counts nothing
        steps(model, optimizer, range(3, STEPS))
        assert are_equal(values(model), written_out(STEPS))


def test_a_commit_after_a_load_has_the_values_that_were_loaded(daemon: Daemon) -> None:
    """No step has stored them."""
    with fresh(daemon, "delayed", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(3))
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        state = optimizer.state_dict()
    with memd_client.connect(daemon.address, job="loaded", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        session.track(rng=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        session.commit()
    with memd_client.connect(daemon.address, job="loaded", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        session.track(rng=True)
        assert session.resume() == 1
        assert optimizer.has_pending_update
        assert are_equal(values(model), written_out(3))
        for number in range(3, STEPS):
            steps(model, optimizer, [number])
            session.commit()
        assert are_equal(values(model), written_out(STEPS))
        session.drop_job()


def test_bfloat16_goes_on_from_what_memd_has(session: Session) -> None:
    """Its fp32 values have bits that the parameter has not."""
    found = []
    for begin in (True, 2 * STEPS):
        model = model_of(torch.bfloat16)
        named = [(f"{begin}.{name}", each) for name, each in model.named_parameters()]
        optimizer = memd_client.AdamW(named, lr=1e-4, session=session, delayed_update=begin)
        for _ in range(STEPS):
            for each in model.parameters():
                each.grad = torch.full_like(each, 0.5)  # whatever the values are
            optimizer.step()
        optimizer.bring_pending_update()
        found.append(values(model))
    assert are_equal(*found)


def test_a_distributed_checkpoint_with_a_pending_update_is_not_loaded_without_it(
    session: Session, tmp_path: Path
) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(3))
    save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    plain = torch.optim.AdamW(model.parameters())
    optimizer.bring_pending_update()
    steps(model, plain, [3])
    for each in (optimizer, plain):
        with pytest.raises(CheckpointException, match="exp_avg"):
            load({"optimizer": each.state_dict()}, checkpoint_id=tmp_path)
    steps(model, optimizer, [4])
    # torch refuses the sentence in the place of `step`.
    with pytest.raises(NotImplementedError, match="only supports tensor, int, float"):
        get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )


def test_a_file_of_weights_has_the_values_that_the_model_shows(
    session: Session, tmp_path: Path
) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(3))
    path = tmp_path / "model.safetensors"
    for is_brought in (False, True):
        memd_client.save_safetensors(model, path)
        found = load_file(path)
        expected = written_out(3, is_brought=is_brought)
        assert are_equal([found[name] for name, _ in model.named_parameters()], expected)
        optimizer.bring_pending_update()


def test_a_snapshot_has_both_values_and_an_export_the_newest(
    daemon: Daemon, tmp_path: Path
) -> None:
    with memd_client.connect(daemon.address, job="kept", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(3))
        session.snapshot("three")
        steps(model, optimizer, range(3, 5))
        out = tmp_path / "model"
    memd(daemon, "snapshot", "export", "kept", "three", str(out))
    exported = load_file(out / "model.safetensors")
    names = [name for name, _ in model_of().named_parameters()]
    assert sorted(exported) == sorted(names)
    assert are_equal([exported[name] for name in names], written_out(3, is_brought=True))
    memd(daemon, "snapshot", "restore", "kept", "three", "--yes")
    with memd_client.connect(daemon.address, job="kept", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        assert session.resume() == 3
        assert are_equal(values(model), written_out(3))
        steps(model, optimizer, range(3, STEPS))
        assert are_equal(values(model), written_out(STEPS))
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_job("kept", force=True)


CHILD = """
import os, signal, sys
import memd_client
from tests.integration.test_delayed_update import delayed, steps
session = memd_client.connect(sys.argv[1], job="killed", host_bytes="16MiB")
model, optimizer = delayed(session)
for number in range(session.resume(), 9):
    steps(model, optimizer, [number])
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kill_at", [0, 3])
def test_a_killed_trainer_goes_on_with_the_same_bits(daemon: Daemon, kill_at: int) -> None:
    command = [sys.executable, "-c", CHILD, daemon.address, str(kill_at)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    with memd_client.connect(daemon.address, job="killed", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        made = session.resume()
        assert made in {kill_at, kill_at + 1}
        assert optimizer.has_pending_update == (made > 0)
        assert are_equal(values(model), written_out(made))
        steps(model, optimizer, range(made, STEPS))
        assert are_equal(values(model), written_out(STEPS))
        session.drop_job()


def test_a_job_goes_on_without_delay_with_every_update(daemon: Daemon) -> None:
    """It is the value that memd has."""
    for is_delayed in (True, False):
        with memd_client.connect(daemon.address, job="both", host_bytes="16MiB") as session:
            model = model_of()
            optimizer = memd_client.AdamW(
                model.named_parameters(), lr=RATE, session=session, delayed_update=is_delayed
            )
            made = session.resume()
            assert not optimizer.has_pending_update
            if is_delayed:
                steps(model, optimizer, range(3))
            else:
                session.drop_job()
    assert made == 3
    assert are_equal(values(model), written_out(3, is_brought=True))


def test_the_commit_of_another_optimizer_keeps_what_is_pending(daemon: Daemon) -> None:
    for run in range(2):
        with memd_client.connect(daemon.address, job="two", host_bytes="16MiB") as session:
            model = model_of()
            named = list(model.named_parameters())
            optimizers = [
                memd_client.AdamW(part, lr=RATE, session=session, delayed_update=True)
                for part in (named[:2], named[2:])
            ]
            made = session.resume()
            assert [each.has_pending_update for each in optimizers] == [bool(made)] * 2
            if not run:
                backward(model, 0)
                for each in optimizers:
                    each.step()
                before = values(model)
            else:
                session.drop_job()
    assert made == 2
    assert are_equal(values(model), before)


def test_a_later_commit_has_nothing_pending(daemon: Daemon) -> None:
    """The values that an earlier one has stored are there still."""
    for run in range(2):
        with memd_client.connect(daemon.address, job="ended", host_bytes="16MiB") as session:
            model, optimizer = delayed(session)
            made = session.resume()
            assert not optimizer.has_pending_update
            if not run:
                steps(model, optimizer, range(2))
                optimizer.delayed_update = False
                steps(model, optimizer, [2])
                before = values(model)
            else:
                session.drop_job()
    assert made == 3
    assert are_equal(values(model), before)


def test_what_is_loaded_is_not_undone_by_the_values_of_the_last_commit(daemon: Daemon) -> None:
    for run in range(2):
        with memd_client.connect(daemon.address, job="undone", host_bytes="16MiB") as session:
            model, optimizer = delayed(session)
            assert session.resume() == 2 * run
            assert not optimizer.has_pending_update
            if not run:
                before = values(model)
                state = optimizer.state_dict()
                steps(model, optimizer, range(2))
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.data.copy_(value)
                optimizer.load_state_dict(state)
            else:
                assert are_equal(values(model), before)
                session.drop_job()


def test_a_saved_state_does_not_take_a_written_value_for_the_one_from_before(
    daemon: Daemon,
) -> None:
    with fresh(daemon, "written", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        steps(model, optimizer, range(2))
        next(model.parameters()).data.mul_(0.5)
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        state = optimizer.state_dict()
        with pytest.raises(MemdError, match="was written while its update was pending"):
            optimizer.bring_pending_update()
    with fresh(daemon, "written", host_bytes="16MiB") as session:
        model, optimizer = delayed(session)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        with pytest.raises(MemdError, match="was written while its update was pending"):
            optimizer.bring_pending_update()


def test_a_skipped_step_brings_the_update_before_it(session: Session) -> None:
    """As a GradScaler skips it that has found infinite gradients."""
    model, optimizer = delayed(session)
    skipped: Any = optimizer
    for is_tracked in (False, True):
        if is_tracked:
            session.transaction.close_by_commit()
        steps(model, optimizer, [0])
        session.commit()
        before = values(model)
        skipped.found_inf = torch.tensor(1.0)
        optimizer.step()
        session.commit()
        del skipped.found_inf
        assert not optimizer.has_pending_update
        assert not are_equal(values(model), before)
    assert session.committed_step == 4


def test_a_second_step_before_a_commit_is_refused_as_ever(session: Session) -> None:
    model, optimizer = delayed(session)
    session.track(rng=True)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(InvalidArgument, match="and a second step"):
        optimizer.step()
    session.commit()
    assert optimizer.has_pending_update


def test_a_step_whose_answer_was_lost_for_a_while_counts(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the step after it are of the right values, which have not changed."""
    model, optimizer = delayed(session)
    steps(model, optimizer, range(2))
    backward(model, 2)
    in_flight = session.transaction.job.steps._in_flight
    assert in_flight is not None

    def fail() -> None:
        raise DaemonUnavailable("away for a while")

    with monkeypatch.context() as patched:
        patched.setattr(in_flight.call, "result", fail)
        with pytest.raises(DaemonUnavailable, match="it is not known whether it is committed"):
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    steps(model, optimizer, range(3, STEPS))
    assert are_equal(values(model), written_out(STEPS))


def test_shards_of_others_are_refused(session: Session) -> None:
    parameter = nn.Parameter(TwoTensor(torch.zeros(8), torch.zeros(8)))
    with pytest.raises(NotYet, match=r"delayed_update with shards of fully_shard\(\) comes in a"):
        memd_client.AdamW([("a", parameter)], session=session, delayed_update=True)


def test_reset_state_waits_for_the_pending_update(session: Session) -> None:
    model, optimizer = delayed(session)
    steps(model, optimizer, range(2))
    with pytest.raises(
        InvalidArgument, match=r"while an update is pending; call optimizer\.bring_"
    ):
        optimizer.reset_state()
    optimizer.bring_pending_update()
    optimizer.reset_state()
    assert session.committed_step == 2
