"""A process of tests/soak/packaged_training.py, beside a memd that is installed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak.booted_root import TIMEOUT_S, Failure, wait

if TYPE_CHECKING:
    import subprocess

    from tests.soak.booted_root import System

PROGRAMS = ("live_training.py", "packaged_training.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The paths of a training, as its system has them."""

    folder: str
    python: str = "/srv/train/bin/python"
    programs: str = "/srv/trial"
    # A program that takes on another user.
    user: tuple[str, ...] = ()
    # Durability and address, where they are not the program's own.
    arguments: tuple[str, ...] = ()


def copy_programs(folder: Path) -> None:
    """Copies what a training needs of these tests, and nothing of the sources."""
    place = folder / "tests" / "soak"
    place.mkdir(parents=True)
    for name in PROGRAMS:
        shutil.copy(Path(__file__).with_name(name), place)


def user_who_trains(system: System, name: str) -> Trained:
    """A new one, in the group memd."""
    user = ("runuser", "-u", name, "--")
    folder = f"/home/{name}/run"
    system.do("useradd", "--create-home", "--groups", "memd", name)
    system.do(*user, "mkdir", folder)
    return Trained(folder=folder, user=user)


class Trainer:
    def __init__(self, system: System, place: Trained) -> None:
        self._system = system
        self._place = place
        self._folder = system.root / place.folder.lstrip("/")
        self._process: subprocess.Popen[str] | None = None

    def _program(self, what: str) -> tuple[str, ...]:
        place = self._place
        program = (place.python, "-m", "tests.soak.packaged_training", what, place.folder)
        return (*place.user, "env", f"--chdir={place.programs}", *program, *place.arguments)

    def start(self) -> None:
        """Also again, where one before has ended."""
        self._process = self._system.start(*self._program("train"))

    @property
    def steps(self) -> int:
        log = self._folder / "losses"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def status(self) -> int | None:
        """The process's exit status; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait_for_steps(self, count: int = 20) -> None:
        aim = self.steps + count

        def made() -> bool:
            if self.status is not None:
                raise Failure(f"the trainer ended by itself with {self.status}")
            return self.steps >= aim

        wait(made, f"the trainer makes no {count} steps")

    def finish(self) -> dict[str, int]:
        assert self._process is not None
        self._system.do(*self._place.user, "touch", f"{self._place.folder}/stop")
        if self._process.wait(TIMEOUT_S) != 0:
            raise Failure(f"the trainer ended with {self._process.returncode}")
        compared: dict[str, int] = json.loads(self._system.do(*self._program("repeat")))
        return compared

    def end(self) -> None:
        """At once, whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(TIMEOUT_S)
