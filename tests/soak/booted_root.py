"""Systems that commands run in, with a log of all they said; one is a root that systemd-nspawn
boots, with a real systemd."""

from __future__ import annotations

import os
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 180.0
SETTINGS = ("HOME=/root", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive")
CLEAN = (
    "env",
    "--ignore-environment",
    "--chdir=/",
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
    *SETTINGS,
)


class Failure(Exception):
    """A promise is broken, or a command failed that should not."""


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )
    if answer.returncode != 0:
        tail = (answer.stdout + answer.stderr)[-4000:]
        raise Failure(f"{' '.join(map(str, command))} ended with {answer.returncode}:\n{tail}")
    return answer.stdout


class System(ABC):
    def __init__(self, root: Path, log: Path) -> None:
        """Paths of the system begin at `root` here."""
        self.root = root
        self._log = log.open("w", encoding="utf-8")

    @abstractmethod
    def enter(self, *command: str) -> list[str]:
        """The arguments that run the command there."""

    def do(self, *command: str, may_fail: bool = False) -> str:
        """Returns what the command said; the log has all of it."""
        answer = subprocess.run(
            self.enter(*command), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        said = answer.stdout + answer.stderr
        self.note(f"# {' '.join(command)}\n{said}[{answer.returncode}]")
        if answer.returncode != 0 and not may_fail:
            raise Failure(f"{' '.join(command)} ended with {answer.returncode}:\n{said[-4000:]}")
        return answer.stdout

    def lines_of(self, *command: str) -> list[str]:
        """As `do`, for answers too long for the log."""
        return run(*self.enter(*command)).splitlines()

    def fails(self, *command: str) -> bool:
        answer = subprocess.run(self.enter(*command), capture_output=True, check=False)
        return answer.returncode != 0

    def start(self, *command: str) -> subprocess.Popen[str]:
        self.note(f"# {' '.join(command)} &")
        return subprocess.Popen(
            self.enter(*command), stdout=self._log, stderr=subprocess.STDOUT, text=True
        )

    def note(self, text: str) -> None:
        self._log.write(text.rstrip("\n") + "\n\n")
        self._log.flush()

    def end(self) -> None:
        self._log.close()


class BootedRoot(System):
    """Reaches nothing but its own loopback, and sees `srv` as /srv."""

    def __init__(self, root: Path, log: Path, *, srv: Path) -> None:
        super().__init__(root, log)
        command = ["systemd-nspawn", "--quiet", f"--directory={root}", "--boot"]
        # This machine may have no machined.
        command += ["--machine=memd-trial", "--register=no", "--keep-unit"]
        # memd locks its pool.
        command += ["--private-network", "--capability=CAP_IPC_LOCK", f"--bind-ro={srv}:/srv"]
        self._console = log.with_suffix(".console").open("w", encoding="utf-8")
        self._nspawn = subprocess.Popen(
            [*command, "--console=pipe"],
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SYSTEMD_NSPAWN_LOCK": "0"},
        )
        self._init = 0

    def wait_for_boot(self) -> None:
        wait(self._has_init, "systemd-nspawn starts no system")
        wait(self._is_booted, "the system does not boot")

    def _is_booted(self) -> bool:
        state = self.do("systemctl", "is-system-running", may_fail=True).strip()
        return state in ("running", "degraded")

    def _has_init(self) -> bool:
        if self._nspawn.poll() is not None:
            console = Path(self._console.name).read_text(errors="replace")
            raise Failure(f"systemd-nspawn ended with {self._nspawn.returncode}:\n{console}")
        for child in children_of(self._nspawn.pid):
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                self._init = child
                return True
        return False

    def enter(self, *command: str) -> list[str]:
        namespaces = ["nsenter", "--target", str(self._init), "--mount", "--uts", "--ipc", "--net"]
        return [*namespaces, "--pid", "--root", "--", *CLEAN, *command]

    def end(self) -> None:
        if self._init:
            subprocess.run(self.enter("systemctl", "poweroff"), capture_output=True, check=False)
        try:
            self._nspawn.wait(60)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
        super().end()
        self._console.close()


def children_of(process: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *children_of(child)]
    return found


@contextmanager
def booted(root: Path, log: Path, *, srv: Path) -> Iterator[BootedRoot]:
    made = BootedRoot(root, log, srv=srv)
    try:
        made.wait_for_boot()
        yield made
    finally:
        made.end()


def wait(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise Failure(f"{otherwise} in {TIMEOUT_S:.0f} s")
        time.sleep(0.05)
