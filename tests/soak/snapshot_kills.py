"""kill -9 of the caller or of the daemon, at random moments of making a snapshot or of dropping it.

The snapshot is whole or absent, and as its caller was told. Another one stays, both verify, and the
job is at its commit with all values and moments.

Run: python -m tests.soak.snapshot_kills --what create|drop --killed caller|daemon --count 10
[--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memd.client import DaemonClient
from memd.refusal import Refused
from tests.daemons import daemons
from tests.faults.killed_checkpoint import ALL_OLD, JOB, OLD, begin, connect, in_child, look
from tests.faults.restarts import Restarts
from tests.soak.checkpoint_kills import FENCED, Failure, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEPT, DISTURBED = "kept", "disturbed"
_REFUSED = 4


class Kills:
    """One call after the other, each disturbed."""

    def __init__(self, what: str, killed: str, restarts: Restarts, seed: int) -> None:
        self._what = what
        self._killed = killed
        self._restarts = restarts
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        if in_child(lambda: begin(OLD)) != 1 or in_child(self._keep) != 0:
            raise Failure("the job does not begin")
        self._took_s = torch.zeros(1, dtype=torch.float64).share_memory_()  # by the last call
        # The first calls of a daemon take longer.
        self._seconds = min(self._undisturbed() for _ in range(3))

    # ---- In forked processes: gRPC hangs in the child of a process that has used it ------------

    def _daemon(self) -> DaemonClient:
        return DaemonClient(self._restarts.daemon.attach_socket)

    def _keep(self) -> int:
        with self._daemon() as daemon:
            daemon.create_snapshot(JOB, KEPT)
        return 0

    def _call(self, begins: Callable[[], None]) -> int:
        if self._what == "create":
            with connect() as session, self._timed(begins):
                # It waits for the next daemon, which may find that the one before has made it.
                step: int = session.snapshot(DISTURBED)
            return 0 if step == 1 else 99
        with self._daemon() as daemon, self._timed(begins):
            try:
                daemon.drop_snapshot(JOB, DISTURBED)
            except Refused:
                return _REFUSED
        return 0

    @contextmanager
    def _timed(self, begins: Callable[[], None]) -> Iterator[None]:
        begins()
        began = time.monotonic()
        yield
        self._took_s[0] = time.monotonic() - began

    def _prepare(self) -> int:
        """The disturbed one is there if it is to be dropped, and not if it is to be made."""
        with self._daemon() as daemon:
            is_there = DISTURBED in [each.name for each in daemon.snapshots(JOB)]
            if is_there and self._what == "create":
                daemon.drop_snapshot(JOB, DISTURBED)
            if not is_there and self._what == "drop":
                daemon.create_snapshot(JOB, DISTURBED)
        return 0

    def _look(self) -> int:
        """Whether the disturbed one is there; all of both is whole."""
        with self._daemon() as daemon:
            steps = {each.name: each.step for each in daemon.snapshots(JOB)}
            *_, last = daemon.check(JOB)
        if last.findings:
            raise Failure(f"damage: {last.findings}")
        verified = {each.name for each in last.report.jobs[0].snapshots if each.extent_count > 0}
        if verified != steps.keys():
            raise Failure(f"not all snapshots are whole: {steps.keys() - verified}")
        if steps not in ({KEPT: 1}, {KEPT: 1, DISTURBED: 1}):
            raise Failure(f"other snapshots: {steps}")
        return int(DISTURBED in steps)

    # --------------------------------------------------------------------------------------------

    def _begin(self) -> Trainer:
        if in_child(self._prepare) != 0:
            raise Failure("the snapshot of before is not there")
        trainer = Trainer(self._call)
        trainer.wait_until_it_begins()
        return trainer

    def _undisturbed(self) -> float:
        if self._begin().status() != 0:
            raise Failure("an undisturbed call")
        if not self._is_made():
            raise Failure("an undisturbed call did nothing")
        return float(self._took_s[0])

    def disturb(self) -> None:
        """One kill."""
        trainer = self._begin()
        time.sleep(self._random.uniform(0, self._seconds))
        allowed = {0}
        if self._killed == "caller":
            trainer.kill()
            allowed.add(-signal.SIGKILL)
        else:
            allowed.add(_REFUSED)
            if self._random.random() < 1 / 3:
                os.kill(self._restarts.holder_process_id(), signal.SIGKILL)
                allowed.add(FENCED)
            self._restarts.kill_and_begin_start()
        status = trainer.status()
        self._restarts.settle()
        if status not in allowed:
            raise Failure(f"the caller ended with {status}")
        is_made = self._is_made()
        if status == 0 and not is_made:
            raise Failure("the call had returned, and its outcome is gone")
        self.seen["made" if is_made else "not_made"] += 1
        self.seen["came_through"] += status == 0

    def _is_made(self) -> bool:
        """Whether the call was made; all else is as it was."""
        if (found := in_child(look)) != ALL_OLD:
            raise Failure(f"the job has a mixture, or another step: {found}")
        if (is_there := in_child(self._look)) not in (0, 1):
            raise Failure(f"the snapshots are not what they were: {is_there}")
        return bool(is_there) == (self._what == "create")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", required=True, choices=["create", "drop"])
    parser.add_argument("--killed", required=True, choices=["caller", "daemon"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with daemons() as made:
        restarts = Restarts(made, "kills", made.start(name="kills"))
        os.environ["MEMD_ADDRESS"] = restarts.daemon.address
        kills = Kills(arguments.what, arguments.killed, restarts, arguments.seed)
        for number in range(arguments.count):
            try:
                kills.disturb()
            except Failure as error:
                raise Failure(f"kill {number} of seed {arguments.seed}: {error}") from error
        restarts.settle().stop()
    report = {
        "what": arguments.what,
        "killed": arguments.killed,
        "seed": arguments.seed,
        "kills": arguments.count,
        "made": kills.seen["made"],
        "not_made": kills.seen["not_made"],
        "came_through": kills.seen["came_through"],
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
