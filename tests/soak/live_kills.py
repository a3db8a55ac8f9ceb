"""kill -9 of the daemon, of the trainer, or of both, at random moments of live training.

Each loss that was ever computed and all state at the end have the bits of the same training in
memory, undisturbed.

Run: python -m tests.soak.live_kills --what daemon --count 10 [--dtype bf16] [--durability every:5]
[--early] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

# Everything is imported before the first trainer is forked, which then starts in milliseconds.
from tests.daemons import Daemon, Daemons, daemons
from tests.soak.live_training import Training, import_all, losses_of, repeat_in_memory, train

if TYPE_CHECKING:
    from collections.abc import Callable

# No step of this training takes a second: who makes none in this time hangs.
PROGRESS_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    what: str
    dtype: str
    durability: str
    memory: str
    early: bool
    seed: int
    kills: int
    steps: int
    steps_computed_again: int  # because their step was not closed yet
    sessions_fenced: int
    losses_different: int
    state_different: bool
    seconds: float

    @property
    def differences(self) -> int:
        return self.losses_different + self.state_different


class Failure(Exception):
    """Something hangs or died by itself."""


class Scene:
    """One daemon and one trainer, each started again after it was killed."""

    def __init__(
        self, made: Daemons, folder: Path, *, dtype: str, durability: str, memory: str, early: bool
    ) -> None:
        self._made = made
        self.daemon: Daemon = self._start_daemon()
        self.training = Training(
            address=self.daemon.address,
            job="live",
            dtype=dtype,
            durability=durability,
            memory=memory,
            step_in_backward=early,
            log=folder / "losses",
            stop=folder / "stop",
            end=folder / "end",
        )
        self.training.log.touch()
        self.trainer = self._fork_trainer()

    def kill_daemon(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()

    def start_daemon(self) -> None:
        self.daemon = self._start_daemon()

    def kill_trainer(self) -> None:
        os.kill(self.trainer, signal.SIGKILL)
        os.waitpid(self.trainer, 0)

    def start_trainer(self) -> None:
        self.trainer = self._fork_trainer()

    def wait_for_progress(self, since_bytes: int) -> None:
        self._wait(lambda: self.training.log.stat().st_size > since_bytes, "no step is made")

    def finish(self) -> None:
        self.training.stop.touch()
        self._wait(self._trainer_has_ended, "the training does not end")
        if not self.training.end.exists():
            raise Failure("the trainer ended without a word")
        if self.daemon.stop() != 0:
            raise Failure("the daemon did not end in order:\n" + self.daemon.log.read_text())

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PROGRESS_S
        while not holds():
            if self._trainer_has_ended() and not self.training.end.exists():
                raise Failure("the trainer ended by itself")
            if self.daemon.process.poll() is not None:
                raise Failure("the daemon ended by itself:\n" + self.daemon.log.read_text())
            if time.monotonic() > deadline:
                raise Failure(f"{what} in {PROGRESS_S} s:\n" + self.daemon.log.read_text())
            time.sleep(0.002)

    def _trainer_has_ended(self) -> bool:
        if self.trainer == 0:
            return True
        pid, status = os.waitpid(self.trainer, os.WNOHANG)
        if pid == 0:
            return False
        self.trainer = 0
        if status != 0:
            raise Failure(f"the trainer ended with status {status}")
        return True

    def _start_daemon(self) -> Daemon:
        return self._made.start(host="64MiB", nvme="256MiB")

    def _fork_trainer(self) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                train(self.training)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return pid


def run(
    *, what: str, count: int, dtype: str, durability: str, memory: str, early: bool, seed: int
) -> Outcome:
    began = time.monotonic()
    chance = random.Random(seed)
    with daemons() as made, tempfile.TemporaryDirectory() as folder:
        scene = Scene(
            made, Path(folder), dtype=dtype, durability=durability, memory=memory, early=early
        )
        try:
            scene.wait_for_progress(0)
            for index in range(count):
                kill_once(scene, what, chance)
                if sys.stderr.isatty():
                    print(f"\r{what}: {index + 1} of {count} kills", end="", file=sys.stderr)
            scene.wait_for_progress(scene.training.log.stat().st_size)
            scene.finish()
        except BaseException:
            for path in sorted(made.sockets.glob("*.log"))[-2:]:
                print(f"--- {path.name}\n{path.read_text()[-4000:]}", file=sys.stderr)
            if scene.trainer != 0:
                scene.kill_trainer()
            raise
        step_text, digest = scene.training.end.read_text().split()
        computed, said = losses_of(scene.training.log)
        lines = len(scene.training.log.read_text().splitlines()) - len(said)
    step_count = int(step_text)
    losses, state = repeat_in_memory(dtype, step_count)
    different = sum(computed.get(step) != {loss} for step, loss in enumerate(losses))
    return Outcome(
        what=what,
        dtype=dtype,
        durability=durability,
        memory=memory,
        early=early,
        seed=seed,
        kills=count,
        steps=step_count,
        steps_computed_again=lines - len(computed),
        sessions_fenced=len(said),
        losses_different=different,
        state_different=digest != state,
        seconds=round(time.monotonic() - began, 1),
    )


def kill_once(scene: Scene, what: str, chance: random.Random) -> None:
    """Mostly in the midst of training, now and then while the last kill is still recovered from."""
    before = scene.training.log.stat().st_size
    if chance.random() < 0.75:
        scene.wait_for_progress(before)
    time.sleep(chance.uniform(0, 0.25))
    if what == "trainer":
        scene.kill_trainer()
        scene.start_trainer()
        return
    if what == "both":
        first, second = scene.kill_daemon, scene.kill_trainer
        if chance.random() < 0.5:
            first, second = second, first
        first()
        time.sleep(chance.choice((0, 0, chance.uniform(0, 0.1))))
        second()
        scene.start_daemon()
        scene.start_trainer()
        return
    scene.kill_daemon()
    time.sleep(chance.choice((0, chance.uniform(0, 0.3))))
    scene.start_daemon()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("daemon", "trainer", "both"), required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--durability", default="step")
    parser.add_argument("--memory", choices=("resident", "short"), default="resident")
    parser.add_argument("--early", action="store_true", help="updates begin during backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import_all()
    outcome = run(
        what=arguments.what,
        count=arguments.count,
        dtype=arguments.dtype,
        durability=arguments.durability,
        memory=arguments.memory,
        early=arguments.early,
        seed=arguments.seed,
    )
    text = json.dumps({**asdict(outcome), "differences": outcome.differences}, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
