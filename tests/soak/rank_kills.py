"""kill -9 of one rank, of all ranks, or of their daemon, at random moments of live training.

A rank whose neighbour was killed ends by itself and names it, and all ranks start again, as under
torchrun. Each loss that a rank ever computed and all state at the end have the bits of
DistributedDataParallel over gloo with torch's own optimizer, undisturbed.

Run: python -m tests.soak.rank_kills --what rank --count 10 [--micro 3] [--durability every:3]
[--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

# Everything is imported before the first rank is forked, which then starts in milliseconds.
from tests.daemons import Daemon, Daemons, daemons
from tests.soak.live_training import import_all, losses_of, replace
from tests.soak.ranked_training import (
    END_S,
    TOLD,
    WORLD_SIZE,
    RankedTraining,
    repeat_undisturbed,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# No step of this training takes a second: ranks that make none in this time hang.
PROGRESS_S = 90.0
# All ranks read the number of the last step before any of them can be so far ahead.
STEPS_AHEAD = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    what: str
    durability: str
    micro_count: int
    seed: int
    kills: int
    starts: int
    steps: int
    losses_computed_again: int  # because their step was not closed yet
    ranks_told: int  # that ended by themselves since another one, or the daemon, was killed
    ranks_unnamed: int  # of those, the ones that did not name the killed rank
    ranks_late: int  # of those, the ones that were told of its end after a second
    told_s_median: float
    told_s_max: float
    losses_different: int
    state_different: bool
    seconds: float

    @property
    def faults(self) -> int:
        return self.losses_different + self.state_different + self.ranks_unnamed + self.ranks_late


class Failure(Exception):
    """Something hangs or died by itself."""


@dataclass(slots=True)
class Told:
    """How ranks took the ends of others."""

    seconds: list[float] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


class Scene:
    """One daemon and the ranks of one job, started again after they were killed."""

    def __init__(self, made: Daemons, folder: Path, *, durability: str, micro_count: int) -> None:
        self._made = made
        self._folder = folder
        self.daemon: Daemon = self._start_daemon()
        self.training = RankedTraining(
            address=self.daemon.address,
            durability=durability,
            micro_count=micro_count,
            folder=folder,
        )
        for rank in range(WORLD_SIZE):
            self.training.log(rank).touch()
        self.starts = 0
        self.told = Told()
        self.ranks: dict[int, int] = {}  # process ids by rank
        self.start_ranks()

    def start_ranks(self) -> None:
        self.starts += 1
        meeting = self._folder / f"meeting-{self.starts}"
        for rank in range(WORLD_SIZE):
            self.ranks[rank] = _fork(partial(train, self.training, rank, meeting))

    def start_daemon(self) -> None:
        self.daemon = self._start_daemon()

    def kill_daemon(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()

    def kill_rank(self, rank: int) -> None:
        pid = self.ranks.pop(rank)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def kill_ranks(self) -> None:
        for rank in list(self.ranks):
            self.kill_rank(rank)

    def wait_until_told(self, named: int | None) -> None:
        """Each rank that is left ends by itself, and names the killed one."""
        began = time.monotonic()
        for rank, pid in list(self.ranks.items()):
            status = self._wait_for_end(pid, f"rank {rank} is not told")
            del self.ranks[rank]
            if os.waitstatus_to_exitcode(status) != TOLD:
                raise Failure(f"rank {rank} ended with status {status}")
            self.told.seconds.append(time.monotonic() - began - END_S)
            said = losses_of(self.training.log(rank))[1][-1]
            if named is not None and f"rank {named} of {WORLD_SIZE}" not in said:
                self.told.unnamed.append(f"rank {rank}: {said}")

    def sizes(self) -> list[int]:
        return [self.training.log(rank).stat().st_size for rank in range(WORLD_SIZE)]

    def wait_for_progress(self, since: list[int]) -> None:
        def has_moved() -> bool:
            return all(now > then for now, then in zip(self.sizes(), since, strict=True))

        deadline = time.monotonic() + PROGRESS_S
        while not has_moved():
            for rank, pid in list(self.ranks.items()):
                if os.waitpid(pid, os.WNOHANG) != (0, 0):
                    del self.ranks[rank]
                    raise Failure(f"rank {rank} ended by itself")
            if self.daemon.process.poll() is not None:
                raise Failure("the daemon ended by itself:\n" + self.daemon.log.read_text())
            self._refuse_late(deadline, "no step is made")
            time.sleep(0.002)

    def finish(self) -> None:
        done = max(max(losses_of(self.training.log(rank))[0]) for rank in range(WORLD_SIZE))
        replace(self.training.last, str(done // self.training.micro_count + STEPS_AHEAD))
        for rank, pid in list(self.ranks.items()):
            status = self._wait_for_end(pid, "the training does not end")
            del self.ranks[rank]
            if status != 0:
                raise Failure(f"rank {rank} ended with status {status}")
        if self.daemon.stop() != 0:
            raise Failure("the daemon did not end in order:\n" + self.daemon.log.read_text())

    def _wait_for_end(self, pid: int, what: str) -> int:
        deadline = time.monotonic() + PROGRESS_S
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == pid:
                return status
            self._refuse_late(deadline, what)
            time.sleep(0.002)

    def _refuse_late(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise Failure(f"{what} in {PROGRESS_S} s:\n" + self.daemon.log.read_text())

    def _start_daemon(self) -> Daemon:
        return self._made.start(host="64MiB", nvme="256MiB")


def _fork(program: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            program()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def undisturbed(folder: Path, micro_count: int, step_count: int) -> list[tuple[list[str], str]]:
    """The losses of each rank, and the hash of the state that it has at the end."""
    meeting = folder / "meeting-undisturbed"

    def write(rank: int) -> None:
        found = repeat_undisturbed(rank, meeting, micro_count, step_count)
        (folder / f"undisturbed-{rank}").write_text(json.dumps(found))

    pids = [_fork(partial(write, rank)) for rank in range(WORLD_SIZE)]
    for pid in pids:
        if os.waitpid(pid, 0)[1] != 0:
            raise Failure("the undisturbed training ended with an error")
    found = [json.loads((folder / f"undisturbed-{rank}").read_text()) for rank in range(WORLD_SIZE)]
    return [(losses, digest) for losses, digest in found]


def run(*, what: str, count: int, durability: str, micro_count: int, seed: int) -> Outcome:
    began = time.monotonic()
    chance = random.Random(seed)
    with daemons() as made, tempfile.TemporaryDirectory() as folder:
        scene = Scene(made, Path(folder), durability=durability, micro_count=micro_count)
        try:
            for index in range(count):
                kill_once(scene, what, chance)
                if sys.stderr.isatty():
                    print(f"\r{what}: {index + 1} of {count} kills", end="", file=sys.stderr)
            scene.wait_for_progress(scene.sizes())
            scene.finish()
        except BaseException:
            scene.kill_ranks()
            raise
        step_text, digest = scene.training.end.read_text().split()
        step_count = int(step_text)
        references = undisturbed(Path(folder), micro_count, step_count)
        different = computed_again = 0
        for rank, (losses, _) in enumerate(references):
            computed, said = losses_of(scene.training.log(rank))
            lines = len(scene.training.log(rank).read_text().splitlines()) - len(said)
            computed_again += lines - len(computed)
            different += sum(computed.get(index) != {loss} for index, loss in enumerate(losses))
    for unnamed in scene.told.unnamed:
        print(unnamed, file=sys.stderr)
    return Outcome(
        what=what,
        durability=durability,
        micro_count=micro_count,
        seed=seed,
        kills=count,
        starts=scene.starts,
        steps=step_count,
        losses_computed_again=computed_again,
        ranks_told=len(scene.told.seconds),
        ranks_unnamed=len(scene.told.unnamed),
        ranks_late=sum(seconds > 1 for seconds in scene.told.seconds) if what == "rank" else 0,
        told_s_median=round(statistics.median(scene.told.seconds or [0.0]), 2),
        told_s_max=round(max(scene.told.seconds or [0.0]), 2),
        losses_different=different,
        state_different=digest != references[0][1],
        seconds=round(time.monotonic() - began, 1),
    )


def kill_once(scene: Scene, what: str, chance: random.Random) -> None:
    """In the midst of training; of all ranks, now and then while they start, too."""
    if what != "ranks" or chance.random() < 0.75:
        scene.wait_for_progress(scene.sizes())
    time.sleep(chance.uniform(0, 0.25))
    if what == "rank":
        killed = chance.randrange(WORLD_SIZE)
        scene.kill_rank(killed)
        scene.wait_until_told(killed)
    elif what == "ranks":
        order = chance.sample(range(WORLD_SIZE), WORLD_SIZE)
        for rank in order:
            scene.kill_rank(rank)
            time.sleep(chance.choice((0, 0, chance.uniform(0, 0.05))))
    else:
        scene.kill_daemon()
        time.sleep(chance.choice((0, chance.uniform(0, 0.3))))
        scene.start_daemon()
        scene.wait_until_told(None)
    scene.start_ranks()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("rank", "ranks", "daemon"), required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--durability", default="step")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import_all()
    outcome = run(
        what=arguments.what,
        count=arguments.count,
        durability=arguments.durability,
        micro_count=arguments.micro,
        seed=arguments.seed,
    )
    text = json.dumps({**asdict(outcome), "faults": outcome.faults}, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
