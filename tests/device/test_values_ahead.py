"""New values of parameters that stay on a device come while the daemon updates the rest, before the
step is known to be committed."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import memd_client
from memd_client import DaemonUnavailable, DeviceError, MemdError, SessionFenced
from memd_client.parameters.hidden import hidden_memory
from tests.daemons import daemons as made_daemons
from tests.device.held_updates import HeldUpdates, SmallAndLarge, WhenLargeIsNext, held_updates
from tests.device.models import are_equal
from tests.device.offloaded import RATE, batch
from tests.device.staying import WrittenOut, backward
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from memd_client import Session

ROOT = Path(__file__).parents[2]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldUpdates]:
    with made_daemons() as made:
        held = held_updates(made, tmp_path)
        yield held
        held.release()
        if held.daemon.process.poll() is None:
            held.daemon.stop()


@pytest.fixture
def session(held: HeldUpdates, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(held.daemon, monkeypatch, durability="step") as session:
        yield session


def staying(session: Session) -> tuple[nn.Module, memd_client.AdamW]:
    model = SmallAndLarge().to("sim")
    return model, memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)


def connect(held: HeldUpdates) -> Session:
    return memd_client.connect(
        held.daemon.address, job="ahead", host_bytes="48MiB", durability="step"
    )


def kill(held: HeldUpdates) -> None:
    held.daemon.process.kill()
    held.daemon.process.wait()


def written_out(steps: int) -> list[Tensor]:
    model = SmallAndLarge().to("sim")
    optimizer = WrittenOut(list(model.parameters()))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def values(model: nn.Module) -> list[Tensor]:
    """On the host, whether they may be used or not."""
    found = []
    for parameter in model.parameters():
        memory = hidden_memory(parameter)
        found.append((parameter.detach() if memory is None else memory).cpu())
    return found


def train(model: nn.Module, optimizer: memd_client.AdamW, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def test_a_value_comes_while_the_update_of_another_is_held(
    session: Session, held: HeldUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = staying(session)
    train(model, optimizer, range(1))
    before, after = written_out(1), written_out(2)
    seen: list[Tensor] = []

    def look() -> None:
        seen.extend(values(model))
        held.release()

    backward(model, 1)
    with monkeypatch.context() as patched:
        WhenLargeIsNext(session, held, patched, look)
        held.hold()
        optimizer.step()
    assert are_equal(seen, [after[0], before[1]])
    assert are_equal(values(model), after)
    assert session.committed_step == 2


@pytest.mark.parametrize("moment", ["at once", "elsewhere", "late"])
def test_values_that_came_are_taken_back_if_the_step_fails_and_it_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Also where a lease of another thread is the first to hear of it, and where `step()` cannot
    bring old values back."""
    heard: list[MemdError] = []

    def hear(session: Session) -> None:
        try:
            session.transaction.job.steps.settle_for_lease()
        except MemdError as error:
            heard.append(error)

    def fail(session: Session, held: HeldUpdates) -> None:
        held.fail()
        if moment == "elsewhere":
            thread = threading.Thread(target=hear, args=(session,))
            thread.start()
            thread.join()

    said = "was not committed, its gradients are as they were"
    if moment == "late":
        said += ".*the values from before it are not back in place yet for 2 of the parameters"
    with made_daemons() as made:
        held = held_updates(made, tmp_path)
        with connect(held) as session:
            train(*staying(session), range(1))
        held.daemon.stop()
        held = held_updates(made, tmp_path)  # which has to read moments
        with connect(held) as session:
            model, optimizer = staying(session)
            before = values(model)
            assert session.resume() == 1
            backward(model, 1)
            gradients = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
            with monkeypatch.context() as patched:
                failing = partial(fail, session, held)
                heals = moment != "late"
                when = WhenLargeIsNext(session, held, patched, failing, heals=heals)
                held.hold()
                with pytest.raises(DeviceError, match=said):
                    optimizer.step()
                assert when.count == 1
                assert [type(each) for each in heard] == [DeviceError] * (moment == "elsewhere")
            if moment == "late":
                with pytest.raises(DeviceError, match=said):
                    model(batch(0).to("sim"))
                held.release()
            assert are_equal([each.detach().cpu() for each in model.parameters()], before)
            found = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
            assert are_equal(found, gradients)
            assert session.committed_step == 1
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, range(2, 4))
            assert are_equal(values(model), written_out(4))


@pytest.mark.parametrize(
    ("seconds", "error", "said"),
    [
        (0, DaemonUnavailable, "it is not known whether it is committed"),
        (30, SessionFenced, "connect again, offload the model again and go on from step 1"),
    ],
    ids=["gone", "lost"],
)
def test_nothing_computes_with_the_values_of_a_step_that_ended_with_its_daemon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    error: type[MemdError],
    said: str,
) -> None:
    """Whether another comes, which does not have the session, or none."""
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", str(seconds))
    with made_daemons() as made:
        held = held_updates(made, tmp_path)
        session = connect(held)
        model, optimizer = staying(session)
        train(model, optimizer, range(1))

        def end() -> None:
            kill(held)
            if seconds:
                held.release()
                held_updates(made, tmp_path)

        backward(model, 1)
        with monkeypatch.context() as patched:
            WhenLargeIsNext(session, held, patched, end)
            held.hold()
            with pytest.raises(error, match=said):
                optimizer.step()
        for _ in range(2):
            with pytest.raises(error, match=said):
                backward(model, 2)
        with pytest.raises(error):
            session.close()
        with pytest.raises(MemdError, match="connect again and make the optimizer anew"):
            backward(model, 2)
        del optimizer
        gc.collect()
        if not seconds:
            held.release()
            held_updates(made, tmp_path)
        with connect(held) as session:
            optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
            assert session.resume() == 1
            model.zero_grad()
            train(model, optimizer, range(1, 4))
            assert are_equal(values(model), written_out(4))


CHILD = """
import os, signal, sys
from pathlib import Path
import pytest, torch
import memd_client
from tests.device.held_updates import HeldUpdates, SmallAndLarge, WhenLargeIsNext
from tests.device.offloaded import RATE, batch
from tests.device.simulation import SIM
from tests.device.staying import backward
torch.set_num_threads(1)
address, flag = sys.argv[1:]
held = HeldUpdates(Path(flag), None)
session = memd_client.connect(address, job="ahead", host_bytes="48MiB", durability="step")
model = SmallAndLarge().to("sim")
optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
patch = pytest.MonkeyPatch()
WhenLargeIsNext(session, held, patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
for step in range(2):
    backward(model, step)
    if step:
        held.hold()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_daemon_killed", [False, True])
def test_where_a_trainer_is_killed_between_two_values_the_commit_decides(
    tmp_path: Path, is_daemon_killed: bool
) -> None:
    with made_daemons() as made:
        held = held_updates(made, tmp_path)
        command = [sys.executable, "-c", CHILD, held.daemon.address, str(held.flag)]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
        if is_daemon_killed:
            kill(held)
        held.release()
        if is_daemon_killed:
            held = held_updates(made, tmp_path)
        with connect(held) as session:
            model, optimizer = staying(session)
            first = session.resume()
            assert first == (1 if is_daemon_killed else 2)
            train(model, optimizer, range(first, 4))
            assert are_equal(values(model), written_out(4))
