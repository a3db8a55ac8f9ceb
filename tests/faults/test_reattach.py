"""The daemon is killed, restarted or upgraded under a living trainer, which waits and goes on with
the same bits; and what happens where its memory does not survive."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import memd_client
from memd_client.base.address import UnixAddress
from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from tests.faults.restarts import (
    NEW_VERSION,
    PATIENCE_S,
    STEPS,
    Restarts,
    SteppedTraining,
    Training,
    reference,
)
from tests.faults.small_training import batch, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memd_client.connection.reattach import Reattach
    from memd_proto.v1 import session_pb2
    from tests.daemons import Daemon, Daemons


@contextmanager
def once_in_forward(model: torch.nn.Module, action: Callable[[], None]) -> Iterator[None]:
    """Between two modules, while the first one's parameters are on their way back."""

    def act(*_: object) -> None:
        handle.remove()
        action()

    handle = model[2].register_forward_pre_hook(act)  # type: ignore[index]
    yield
    handle.remove()


def train_with_an_interruption(
    restarts: Restarts, moment: str, interrupt: Callable[[], None], **settings: Any
) -> Training:
    training = Training(restarts.daemon, **settings)
    for number in range(STEPS):
        if number != STEPS // 2:
            training.step(number)
            continue
        inputs = batch(number)
        if moment == "forward":
            with once_in_forward(training.model, interrupt):
                loss = loss_of(training.model, inputs)
        else:
            loss = loss_of(training.model, inputs)
        if moment == "backward":
            # The gradients of the last module are in memd, the others are not.
            handles = [
                parameter.register_post_accumulate_grad_hook(_once(interrupt))
                for parameter in list(training.model[2].parameters())[:1]  # type: ignore[index]
            ]
            loss.backward()
            for handle in handles:
                handle.remove()
        else:
            loss.backward()
        if moment == "before the step":
            interrupt()
        training.optimizer.step()
        if moment == "after the step":
            interrupt()
        training.optimizer.zero_grad()
        training.losses.append(loss.detach())
    return training


def _once(action: Callable[[], None]) -> Callable[[object], None]:
    left = [action]

    def act(_: object) -> None:
        if left:
            left.pop()()

    return act


@pytest.mark.parametrize("moment", ["forward", "backward", "before the step", "after the step"])
def test_a_training_goes_on_with_the_same_bits_after_the_daemon_was_killed(
    restarts: Restarts, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="memd_client")
    first = restarts.daemon.process.pid
    training = train_with_an_interruption(restarts, moment, restarts.kill_and_begin_start)
    training.expect_the_bits_of(*reference())
    assert training.session.committed_step == STEPS
    assert training.session.daemon_process_id == restarts.settle().process.pid != first
    said = [record for record in caplog.records if record.name == "memd_client"]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
    assert "has ended or closed the connection; waiting up to 120 s" in said[0].getMessage()
    assert "the daemon is back after" in said[1].getMessage()
    training.session.close()


@pytest.mark.parametrize("place", [2, 0, None], ids=["second step", "last step", "end"])
def test_a_backward_that_calls_step_goes_on_after_the_daemon_was_killed_in_it(
    restarts: Restarts, place: int | None
) -> None:
    training = SteppedTraining(restarts.daemon)
    for number in range(STEPS):
        if number == STEPS // 2 and place is not None:
            training.model[place].weight.register_post_accumulate_grad_hook(  # type: ignore[index]
                _once(restarts.kill_and_begin_start)
            )
        training.step(number)
        if number == STEPS // 2 and place is None:
            restarts.kill_and_begin_start()
    training.expect_the_bits_of(*reference())
    assert training.session.committed_step == STEPS
    restarts.settle()
    training.session.close()


@pytest.mark.parametrize("setting", ["maximize", "amsgrad"])
def test_a_step_that_the_daemon_died_in_has_its_settings_in_the_next_one(
    restarts: Restarts, setting: str
) -> None:
    training = train_with_an_interruption(
        restarts, "after the step", restarts.kill_and_begin_start, **{setting: True}
    )
    training.expect_the_bits_of(*reference(**{setting: True}))
    training.session.close()


def test_the_daemon_is_upgraded_under_a_training(restarts: Restarts) -> None:
    def upgrade() -> None:
        assert restarts.daemon.stop(signal.SIGTERM) == 0
        restarts.begin_start(before=NEW_VERSION)

    training = train_with_an_interruption(restarts, "before the step", upgrade)
    training.expect_the_bits_of(*reference())
    daemon = restarts.settle()
    connection = AttachConnection(UnixAddress(socket=daemon.socket))
    assert connection.daemon_version == "9.9.9"
    connection.close()
    training.session.close()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_killed_again_and_again(restarts: Restarts, *, amsgrad: bool) -> None:
    training = Training(restarts.daemon, amsgrad=amsgrad)
    for number in range(STEPS):
        restarts.settle()
        restarts.kill_and_begin_start()
        training.step(number)
    training.expect_the_bits_of(*reference(amsgrad=amsgrad))
    training.session.close()


def test_no_lease_waits_for_the_garbage_collector(restarts: Restarts) -> None:
    training = Training(restarts.daemon)
    gc.disable()
    try:
        for number in range(STEPS):
            loss = loss_of(training.model, batch(number))
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            del loss
            # The answer of the step is waited for in the next forward, beneath the frames of its
            # modules.
            restarts.kill_and_begin_start()
        loss_of(training.model, batch(STEPS))
        training.session.commit(wait=True)
        assert training.session.statistics().leases_held == 0
    finally:
        gc.enable()
        restarts.settle()
        training.session.close()


def test_a_daemon_that_ends_before_it_accepts_is_a_daemon_that_is_not_there(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "attach.sock"))
        listening.listen()
        threading.Timer(0.2, listening.close).start()
        with pytest.raises(memd_client.DaemonUnavailable, match="ended while"):
            AttachConnection(UnixAddress(socket=tmp_path / "memd.sock"))


def test_leases_stay_valid_and_values_come_back(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="values")
    session.put("a", torch.arange(300_000.0))
    held = session.get("a")
    session.put("b", torch.ones(5))
    restarts.kill_and_begin_start()
    session.put("c", torch.full((200_000,), 7.0))
    assert torch.equal(held, torch.arange(300_000.0))
    assert torch.equal(session.get("b"), torch.ones(5))
    restarts.settle()
    restarts.kill_and_begin_start()
    assert torch.equal(session.get("c"), torch.full((200_000,), 7.0))
    assert torch.equal(held, torch.arange(300_000.0))
    before = session.statistics().leases_held
    del held
    assert session.statistics().leases_held == before - 1
    session.delete("b")
    with pytest.raises(memd_client.UnknownName):
        session.get("b")
    session.close()


def test_bytes_over_grpc_are_sent_again(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="remote", shared_memory=False)
    value = torch.arange(700_000.0)
    restarts.kill_and_begin_start()
    session.put("a", value)
    restarts.settle()
    restarts.kill_and_begin_start()
    assert torch.equal(session.get("a"), value)
    session.close()


def test_threads_wait_for_one_that_re_attaches(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="threads")
    for number in range(4):
        session.put(f"x{number}", torch.full((50_000,), float(number)))
    restarts.kill()
    found: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda n=number: found.update({n: session.get(f"x{n}")}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    restarts.begin_start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(found) == [0, 1, 2, 3]
    for number, value in found.items():
        assert torch.equal(value, torch.full((50_000,), float(number)))
    session.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_re_attach_and_keeps_nobody_from_it(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="forked")
    session.put("a", torch.arange(1000.0))
    held = session.get("a")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        os.read(read_end, 1)  # the daemon is dead by then
        uses: list[Callable[[], object]] = [
            lambda: session.get("a"),
            lambda: session.put("b", torch.ones(2)),
            lambda: session.commit(wait=True),
        ]
        for use in uses:
            try:
                use()
                status = 1
            except memd_client.MemdError as error:
                status |= 0 if "connect again in the child" in str(error) else 2
        session.close()
        status |= 0 if float(held[999]) == 999 else 4
        os.read(read_end, 1)  # until then it has its copies of what its parent re-attaches with
        os._exit(status)
    restarts.kill()
    os.write(write_end, b"1")
    restarts.begin_start()
    assert torch.equal(session.get("a"), torch.arange(1000.0))
    session.put("b", torch.ones(2))
    restarts.settle()
    restarts.kill_and_begin_start()
    assert torch.equal(session.get("b"), torch.ones(2))
    os.write(write_end, b"2")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(held, torch.arange(1000.0))
    assert session.statistics().leases_held == 1, "the child gave back a pin of the parent's"
    os.close(read_end)
    os.close(write_end)
    session.close()


def test_an_answer_that_is_lost_on_the_way_back_costs_nothing(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = memd_client.connect(restarts.daemon.address, job="lost")
    session.put("a", torch.arange(1000.0))
    held = session.get("a")
    attach = Control.attach
    left_open: list[int] = []

    def attach_and_lose(
        self: Control, request: session_pb2.AttachRequest
    ) -> session_pb2.AttachResponse:
        answer = attach(self, request)
        if len(left_open) < 2:
            # As a data loader that was forked this moment: the daemon sees no end.
            left_open.append(reattach_of(session).connection.duplicate())
            raise memd_client.DeadlineExceeded("the daemon answered too late")
        return answer

    monkeypatch.setattr(Control, "attach", attach_and_lose)
    restarts.kill_and_begin_start()
    session.put("b", torch.ones(2))
    assert len(left_open) == 2
    assert torch.equal(session.get("b"), torch.ones(2))
    assert torch.equal(held, torch.arange(1000.0))
    for fd in left_open:
        os.close(fd)
    session.close()


def reattach_of(session: memd_client.Session) -> Reattach:
    return cast("Reattach", session.transaction.job.streams._retrying)


def test_a_connection_that_a_living_daemon_closes_is_made_anew(
    restarts: Restarts,
) -> None:
    session = memd_client.connect(restarts.daemon.address, job="closed")
    session.put("a", torch.arange(1000.0))
    held = session.get("a")
    closed = reattach_of(session).connection
    closed._socket.send(b"no message of ours")
    assert select.select([closed._socket], [], [], PATIENCE_S)[0]
    session.put("b", torch.ones(300_000))
    assert torch.equal(session.get("b"), torch.ones(300_000))
    assert torch.equal(held, torch.arange(1000.0))
    assert session.daemon_process_id == restarts.daemon.process.pid
    session.close()


def test_a_daemon_that_stays_away_is_waited_for_as_long_as_was_said(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0.5")
    session = memd_client.connect(restarts.daemon.address, job="alone")
    session.put("a", torch.ones(4))
    restarts.kill()
    with pytest.raises(memd_client.DaemonUnavailable, match=r"within 0 s \(MEMD_REATTACH_SECONDS"):
        session.get("a")
    restarts.begin_start()
    restarts.settle()
    assert torch.equal(session.get("a"), torch.ones(4)), "it is back, though late"
    session.close()


def test_a_step_that_nobody_answered_in_time_is_made_once(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0.5")
    training = Training(restarts.daemon)
    for number in range(STEPS):
        training.step(number)
        if number in (1, 3):
            # Whether the daemon has closed the step by now does not matter, nor whether it has
            # answered: then what is resident can still be read, and a gradient finds out.
            restarts.kill()
            with pytest.raises(
                memd_client.DaemonUnavailable,
                match=f"step {number + 1}: it is not known|has not come back within",
            ):
                loss_of(training.model, batch(number + 1)).backward()
            restarts.begin_start()
            restarts.settle()
    training.expect_the_bits_of(*reference())
    assert training.session.committed_step == STEPS
    training.session.close()


def test_a_second_daemon_at_the_same_socket_leaves_the_holder_alone(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="first")
    session.put("a", torch.ones(3))
    assert "another daemon serves" in restarts.made.refusal(name=restarts.name)
    restarts.kill_and_begin_start()
    assert torch.equal(session.get("a"), torch.ones(3))
    session.close()


# Puts what systemd passes where it passes it, and becomes the daemon.
AS_SYSTEMD_STARTS = """
import fcntl, os, sys
passed = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 200) for fd in sys.argv[1].split(",") if fd]
for index, fd in enumerate(passed):
    os.dup2(fd, 3 + index)
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES=sys.argv[2])
os.environ["LISTEN_FDS"] = str(len(passed))
os.execv(sys.argv[3], sys.argv[3:])
"""


class DescriptorStore:
    """systemd's part: its notify socket, and what it keeps of a service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            if text == b"END":
                return
            words = dict(line.split("=", 1) for line in text.decode().splitlines())
            name = words.get("FDNAME", "")
            if words.get("FDSTORE") == "1":
                (self.kept[name],) = fds
            elif words.get("FDSTOREREMOVE") == "1" and name in self.kept:
                os.close(self.kept.pop(name))

    def start(self, made: Daemons, name: str) -> Daemon:
        kept = dict(self.kept)
        passed = ",".join(str(fd) for fd in kept.values())
        before = (sys.executable, "-c", AS_SYSTEMD_STARTS, passed, ":".join(kept))
        environ = {"NOTIFY_SOCKET": str(self.path), "FDSTORE": "4096"}
        return made.start(name=name, before=before, environ=environ, pass_fds=tuple(kept.values()))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"END", str(self.path))
        self._thread.join(PATIENCE_S)
        self._socket.close()
        for fd in self.kept.values():
            os.close(fd)


def test_systemds_store_serves_as_well(daemons: Daemons, tmp_path: Path) -> None:
    store = DescriptorStore(tmp_path / "notify")
    try:
        daemon = store.start(daemons, "service")
        assert not daemon.socket.with_name("holder.sock").exists()
        training = Training(daemon)
        for number in range(STEPS):
            if number == 2:
                daemon.process.kill()
                daemon.process.wait(PATIENCE_S)
                daemon = store.start(daemons, "service")
            if number == 4:
                assert daemon.stop() == 0
                daemon = store.start(daemons, "service")
            training.step(number)
        training.expect_the_bits_of(*reference())
        training.session.close()
        assert daemon.stop() == 0
        assert not [name for name in store.kept if name.startswith(("session.", "doorbell."))]
    finally:
        store.close()
