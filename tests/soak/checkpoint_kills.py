"""kill -9 of the trainer or of the daemon, at random moments of a save or a load of a checkpoint.

The job is at its commit, with all values and moments of before or all new ones; a folder has the
earlier checkpoint or the new one; one of several safetensors files may have no index. Beside
`dcp.async_save` the job makes a step, which is made or not. A trainer whose daemon is killed goes
on, unless the daemon's memory is lost too, as it is in one kill of three.

Run: python -m tests.soak.checkpoint_kills --what save|dcp-save|async-save|load|dcp-load|state
--killed trainer|daemon --count 10 [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException

import memd_client
from memd.client import DaemonClient
from tests.daemons import daemons
from tests.faults.killed_checkpoint import (
    ALL_NEW,
    ALL_OLD,
    AT_STEP_2,
    JOB,
    NEW,
    OLD,
    begin,
    in_child,
    load,
    look,
    prepared,
    save_all,
    save_values,
    save_while_training,
    written,
    written_all,
)
from tests.faults.restarts import Restarts

if TYPE_CHECKING:
    from collections.abc import Callable

# A trainer that goes on with another daemon takes a second or two.
PATIENCE_S = 90.0
FENCED = 3
SAVES = {"save": save_values, "dcp-save": save_all, "async-save": save_while_training}
_NO_INDEX = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    what: str
    killed: str
    seed: int
    kills: int
    old: int
    new: int
    came_through: int  # trainers that ended by themselves
    fenced: int
    no_index: int  # of the old ones: files whose index is gone
    stepped: int  # of the jobs that were saved while they train: whose step was made
    seconds: float


class Failure(Exception):
    """A mixture, a step too many or too few, or something that hangs."""


class Trainer:
    """A forked process that makes one call. Its parent learns when that begins."""

    def __init__(self, work: Callable[[Callable[[], None]], int]) -> None:
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 99
            try:
                code = work(lambda: os.close(write))
            except BaseException as error:  # its parent says what it is
                if _is_fenced(error):
                    code = FENCED
                else:
                    print(f"trainer: {error!r}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(write)

    def wait_until_it_begins(self) -> None:
        os.read(self._read, 1)  # ends when it is closed there
        os.close(self._read)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def status(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        self.kill()
        os.waitpid(self._pid, 0)
        raise Failure("the trainer hangs")


def _is_fenced(error: BaseException) -> bool:
    """torch wraps errors of its distributed checkpoint."""
    if isinstance(error, CheckpointException):
        return all(_is_fenced(each) for each, _ in error.failures.values())
    return isinstance(error, memd_client.SessionFenced)


class Kills:
    """One call after the other, each disturbed."""

    def __init__(self, what: str, killed: str, restarts: Restarts, folder: Path, seed: int) -> None:
        self._what = what
        self._killed = killed
        self._restarts = restarts
        self._folder = folder
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._both = folder / "both"
        self._prepare()
        # The first calls of a daemon take longer.
        self._seconds = min(self._undisturbed() for _ in range(3))
        self.seen.clear()

    def _prepare(self) -> None:
        if self._what in SAVES:
            for seed in (OLD, NEW):
                self._begin(seed)
                if in_child(partial(SAVES[self._what], self._folder / str(seed))) != 0:
                    raise Failure("the first save")
            self._begin(NEW)
        else:
            self._source = prepared(self._folder, self._what)
            self._begin(OLD)

    def _begin(self, seed: int) -> None:
        if in_child(lambda: begin(seed)) != 1:
            raise Failure("the job does not begin")

    def _start(self) -> Trainer:
        if self._what in SAVES:
            shutil.rmtree(self._both, ignore_errors=True)
            shutil.copytree(self._folder / str(OLD), self._both)
            save = SAVES[self._what]
            return Trainer(lambda begins: save(self._both, begins=begins))
        return Trainer(lambda begins: load(self._what, self._source, begins=begins))

    def _undisturbed(self) -> float:
        trainer = self._start()
        trainer.wait_until_it_begins()
        began = time.monotonic()
        if trainer.status() != 0:
            raise Failure("an undisturbed call")
        took = time.monotonic() - began
        self._look()
        return took

    def disturb(self) -> None:
        """One kill."""
        trainer = self._start()
        trainer.wait_until_it_begins()
        time.sleep(self._random.uniform(0, self._seconds))
        is_lost = False
        if self._killed == "trainer":
            trainer.kill()
        else:
            is_lost = self._random.random() < 1 / 3
            if is_lost:
                os.kill(self._restarts.holder_process_id(), signal.SIGKILL)
            self._restarts.kill_and_begin_start()
        status = trainer.status()
        self._restarts.settle()
        allowed = {0, -signal.SIGKILL} if self._killed == "trainer" else {0}
        if is_lost:
            allowed.add(FENCED)
        if status not in allowed:
            raise Failure(f"the trainer ended with {status}")
        is_new = self._look()
        if status == 0 and not is_new:
            raise Failure("the call had returned, and its outcome is gone")
        self.seen["new" if is_new else "old"] += 1
        self.seen["came_through"] += status == 0
        self.seen["fenced"] += status == FENCED

    def _look(self) -> bool:
        """Whether the call was made; the job is as before afterwards."""
        found = in_child(look)
        if self._what in SAVES:
            if self._what == "async-save" and found == AT_STEP_2:
                self.seen["stepped"] += 1
                self._begin(NEW)
            elif found != ALL_NEW["dcp-load"]:
                raise Failure(f"a save has changed the job: {found}")
            if self._what == "save":
                return self._look_at_values()
            found = written_all(self._both)
            if found not in (ALL_OLD, ALL_NEW["dcp-load"]):
                raise Failure(f"the folder has a mixture: {found}")
            return found != ALL_OLD
        if found not in (ALL_OLD, ALL_NEW[self._what]):
            raise Failure(f"the job has a mixture, or another step: {found}")
        if found != ALL_OLD:
            self._begin(OLD)
        return found != ALL_OLD

    def finish(self) -> None:
        """No snapshot of a killed save stays."""
        if in_child(look) not in (ALL_OLD, ALL_NEW["dcp-load"]):  # it has the job for itself
            raise Failure("the last look at the job")
        with DaemonClient(self._restarts.daemon.attach_socket) as client:
            left = client.snapshots(JOB)
        if left:
            raise Failure(f"snapshots are left: {left}")

    def _look_at_values(self) -> bool:
        found = written(self._both)
        if found not in (OLD, NEW, _NO_INDEX):
            raise Failure(f"the folder has a mixture: {found}")
        self.seen["no_index"] += found == _NO_INDEX
        return found == NEW


def run(what: str, killed: str, count: int, seed: int) -> Outcome:
    began = time.monotonic()
    with daemons() as made, tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(made, "kills", made.start(name="kills"))
        os.environ["MEMD_ADDRESS"] = restarts.daemon.address
        kills = Kills(what, killed, restarts, Path(folder), seed)
        for number in range(count):
            try:
                kills.disturb()
            except Failure as error:
                raise Failure(f"kill {number} of seed {seed}: {error}") from error
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {count} kills", end="", file=sys.stderr)
        kills.finish()
        restarts.settle().stop()
    return Outcome(
        what=what,
        killed=killed,
        seed=seed,
        kills=count,
        old=kills.seen["old"],
        new=kills.seen["new"],
        came_through=kills.seen["came_through"],
        fenced=kills.seen["fenced"],
        no_index=kills.seen["no_index"],
        stepped=kills.seen["stepped"],
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", required=True, choices=[*SAVES, *ALL_NEW])
    parser.add_argument("--killed", required=True, choices=["trainer", "daemon"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    outcome = run(arguments.what, arguments.killed, arguments.count, arguments.seed)
    text = json.dumps(asdict(outcome), indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
