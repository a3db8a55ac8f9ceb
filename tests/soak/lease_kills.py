"""Clients are killed with -9 while they hold leases and a worker that they forked lives on: the
leases are gone at once, and nothing is left of any of them.

Run: python -m tests.soak.lease_kills --count 30 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

import memd_client
from memd.client import DaemonClient
from tests.daemons import Daemon, running_daemon
from tests.faults.small_training import batch, build, loss_of
from tests.soak.live_training import import_all

JOB = "leases"
WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    clients_killed: int
    leases_held_min: int
    freed_seconds_median: float
    freed_seconds_p99: float
    freed_seconds_max: float
    descriptors_leaked: int
    host_bytes_leaked: int
    sessions_left: int
    leases_left: int
    steps_committed: int


class Nursery:
    """A process that has imported everything and forks clients; itself it never talks to a daemon,
    as gRPC does not survive a fork."""

    def __init__(self) -> None:
        self._read, their_write = os.pipe()
        their_read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            os.close(self._write)
            self._serve(their_read, their_write)
        os.close(their_read)
        os.close(their_write)

    def start_client(self, address: str) -> tuple[int, int, int]:
        """Its process, its worker, and how many leases it holds."""
        os.write(self._write, address.encode() + b"\n")
        words = self._line().split()
        if len(words) != 3:
            raise RuntimeError(f"a client did not come so far: {words}")
        return int(words[0]), int(words[1]), int(words[2])

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self._read, 256)
            if not part:
                raise RuntimeError("the process that forks clients has ended")
            line += part
        return line.decode()

    def close(self) -> None:
        os.close(self._write)
        os.waitpid(self.pid, 0)
        os.close(self._read)

    @staticmethod
    def _serve(read: int, write: int) -> NoReturn:
        # Children are reaped by the kernel.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with os.fdopen(read, "rb") as orders:
            for order in orders:
                if os.fork() == 0:
                    _hold_leases(order.decode().strip(), write)
        os._exit(0)


def _hold_leases(address: str, write: int) -> NoReturn:
    """A client in mid-step: gradients are in the arena, parameters and a blob are leased."""
    try:
        torch.set_num_threads(1)
        session = memd_client.connect(address, job=JOB)
        model = memd_client.offload(build(), session)
        memd_client.AdamW(model.parameters(), lr=1e-3, session=session)
        blob = session.get("blob")
        loss_of(model, batch(0)).backward()
        with memd_client.gather(model):
            worker = os.fork()
            if worker == 0:
                time.sleep(600)
                os._exit(0)
            held = session.statistics().leases_held
            os.write(write, f"{os.getpid()} {worker} {held}\n".encode())
            time.sleep(600)
            del blob
    except BaseException as error:
        os.write(write, b"failed\n")
        print(f"client: {error!r}", file=sys.stderr)
    os._exit(1)


def run(count: int, daemon: Daemon, nursery: Nursery) -> Outcome:
    _prepare(daemon, nursery)
    seconds = []
    leases = []
    with DaemonClient(daemon.attach_socket) as client:
        before = client.jobs()[0]
        descriptors = _descriptors(daemon)
        for index in range(count):
            pid, worker, held = nursery.start_client(daemon.address)
            leases.append(held)
            try:
                seconds.append(_kill_and_time(client, pid, held))
            finally:
                os.kill(worker, signal.SIGKILL)
            if sys.stderr.isatty():
                print(f"\r{index + 1} of {count} clients killed", end="", file=sys.stderr)
        deadline = time.monotonic() + WAIT_S
        # The last worker's connection is closed a moment after it was killed.
        while _descriptors(daemon) > descriptors and time.monotonic() < deadline:
            time.sleep(0.01)
        after = client.jobs()[0]
        leaked = _descriptors(daemon) - descriptors
    seconds.sort()
    return Outcome(
        clients_killed=count,
        leases_held_min=min(leases),
        freed_seconds_median=seconds[count // 2],
        freed_seconds_p99=seconds[min(count - 1, count * 99 // 100)],
        freed_seconds_max=seconds[-1],
        descriptors_leaked=leaked,
        host_bytes_leaked=after.host_bytes_used - before.host_bytes_used,
        sessions_left=after.session_count,
        leases_left=after.lease_count,
        steps_committed=after.committed_step,
    )


def _prepare(daemon: Daemon, nursery: Nursery) -> None:
    """The first client creates the job; a blob for the others to lease; all of it resident."""
    with memd_client.connect(daemon.address, job=JOB) as session:
        memd_client.offload(build(), session)
        session.put("blob", torch.arange(1000))
    pid, worker, _ = nursery.start_client(daemon.address)
    with DaemonClient(daemon.attach_socket) as client:
        _kill_and_time(client, pid, 1)
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.2)


def _kill_and_time(client: DaemonClient, pid: int, held: int) -> float:
    (job,) = client.jobs()
    if job.lease_count < held or job.session_count != 1:
        raise RuntimeError(f"the daemon does not see the client's {held} leases: {job}")
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while True:
        (job,) = client.jobs()
        took = time.perf_counter() - began
        if job.lease_count == 0 and job.session_count == 0:
            return took
        if took > WAIT_S:
            raise RuntimeError(f"the leases of a dead client stay: {job}")


def _descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import_all()
    nursery = Nursery()  # before gRPC is used here
    with running_daemon() as daemon:
        outcome = run(arguments.count, daemon, nursery)
        nursery.close()
    text = json.dumps(asdict(outcome), indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    leaked = (
        outcome.descriptors_leaked,
        outcome.host_bytes_leaked,
        outcome.sessions_left,
        outcome.leases_left,
        outcome.steps_committed,
    )
    return 1 if any(leaked) else 0


if __name__ == "__main__":
    sys.exit(main())
