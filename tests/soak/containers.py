"""The images of deploy/container, run by an engine: a daemon in one container and trainers in
others, which have no network, and PID, mount and user namespaces of their own.

Trainers have the bits of the same steps without memd, also where the daemon is killed under them;
a trainer that is killed is noticed, which takes at most 100 ms in the median of 20 kills or more;
without io_uring in the seccomp profile the daemon says so and uses threads.

As root, with the images of deploy/container/build.sh:

Run: python -m tests.soak.containers [--kills N] [--engine "podman --runtime runc"]
     [--run-flags "--ulimit nofile=20000:20000"] [--unshare-users] [--json FILE]

`--unshare-users` is for engines that make no user namespaces on their storage: the trainer makes
its own, inside its container.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.daemons import BUILD, Attached

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "deploy" / "container" / "seccomp.json"
DAEMON_IMAGE, TRAINER_IMAGE = "memd:0.1.0", "memd-trainer:0.1.0"
MEMD_ID = 2600
# Its root and its users are nobody out here, and the group that may connect is the daemon's.
OTHER_USERS = (
    *("--uidmap", "0:200000:65536"),
    *("--gidmap", f"0:200000:{MEMD_ID}", "--gidmap", f"{MEMD_ID}:{MEMD_ID}:1"),
    *("--gidmap", f"{MEMD_ID + 1}:{200001 + MEMD_ID}:{65535 - MEMD_ID}"),
)
UNSHARED_USERS = ("unshare", "--user", "--map-root-user")
READ_ONLY = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all")
STEPS, KILLED_AT = 100, 10
# No step or start of these takes a minute: who makes none in this time hangs.
PATIENCE_S = 120.0
# Medians of so many kills count: a single one may meet a busy machine.
NOTICED_MS_MAX, KILLS_OF_A_MEDIAN = 100.0, 20
# What a container of its own has of its own.
NAMESPACES = ("pid", "mnt", "user", "net", "ipc")


class Failure(Exception):
    """A promise is broken, or something hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    daemon_image_bytes: int
    trainer_image_bytes: int
    first_ready_s: float  # from `run` to the ready line, which has all volumes written
    next_ready_s: float
    engine_by_default: str
    engine_with_profile: str
    namespaces_apart: list[str]
    steps: int
    steps_computed_again: int
    sessions_fenced: int
    kills: int
    death_ms: list[float]  # from the kill until the process has ended
    death_ms_median: float
    noticed_ms: list[float]  # from the kill until its session has ended
    noticed_ms_median: float


@dataclass
class Engine:
    command: list[str]
    run_flags: list[str]
    logs: Path
    makes_users: bool = True
    names: list[str] = field(default_factory=list)

    def ask(self, *arguments: str) -> str:
        answer = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, check=False
        )
        if answer.returncode != 0:
            raise Failure(f"{shlex.join([*self.command, *arguments])}: {answer.stderr}")
        return answer.stdout.strip()

    def run(self, name: str, *arguments: str) -> Container:
        """`arguments`: flags, the image, its command."""
        command = [*self.command, "run", "--rm", "--name", name, *self.run_flags, *arguments]
        log = self.logs / f"{len(self.names)}-{name}.log"
        self.names.append(name)
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        return Container(self, name, process, log)

    def remove_all(self) -> None:
        for name in set(self.names):
            subprocess.run([*self.command, "rm", "--force", name], capture_output=True, check=False)

    def image_bytes(self, image: str) -> int:
        return int(self.ask("image", "inspect", "--format", "{{.Size}}", image))


@dataclass
class Container:
    engine: Engine
    name: str
    process: subprocess.Popen[str]
    log: Path

    def line(self) -> str:
        """The next; it fails where the container ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failure(f"{self.name} has ended:\n{self.log.read_text()[-3000:]}")
        return line.rstrip("\n")

    def wait(self) -> int:
        """Until the engine has cleaned up after it: the exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} does not end") from None

    def lines(self) -> list[str]:
        """All that were not read yet, when it has ended; a pipe holds them."""
        if (status := self.wait()) != 0:
            raise Failure(f"{self.name} ended with {status}:\n{self.log.read_text()[-3000:]}")
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def first_process_id(self) -> int:
        return int(self.engine.ask("inspect", "--format", "{{.State.Pid}}", self.name))

    def kill(self) -> None:
        """The engine has no part in it."""
        os.kill(self.first_process_id(), signal.SIGKILL)


@dataclass(kw_only=True)
class Scene:
    engine: Engine
    sockets: Path
    data: Path

    def start_daemon(self, *flags: str) -> tuple[Container, float]:
        """And the seconds until it was ready."""
        began = time.monotonic()
        daemon = self.engine.run(
            "memd-soak-daemon",
            *READ_ONLY,
            # Instead of a limit of locked memory, which not everybody may raise.
            "--cap-add=IPC_LOCK",
            "--security-opt=no-new-privileges",
            *flags,
            *("--volume", f"{self.sockets}:/run/memd", "--volume", f"{self.data}:/var/lib/memd"),
            DAEMON_IMAGE,
            *("serve", "--host", "128MiB", "--nvme", "512MiB"),
        )
        line = daemon.line()
        if not line.startswith("memd ready"):
            raise Failure(f"the daemon says {line}")
        return daemon, time.monotonic() - began

    def start_trainer(self, *arguments: str) -> Container:
        return self.engine.run(
            "memd-soak-trainer",
            *READ_ONLY,
            *(OTHER_USERS if self.engine.makes_users else ()),
            "--security-opt=no-new-privileges",
            *("--volume", f"{self.sockets}:/run/memd:ro"),
            *("--volume", f"{ROOT / 'tests'}:/srv/tests:ro", "--workdir", "/srv"),
            TRAINER_IMAGE,
            *(() if self.engine.makes_users else UNSHARED_USERS),
            *("python", "-m", "tests.soak.contained_trainer", *arguments),
        )

    def attached(self) -> Attached:
        return Attached(
            self.sockets / "attach.sock", control_address=f"unix:{self.sockets / 'memd.sock'}"
        )


@contextmanager
def scene(engine: Engine) -> Iterator[Scene]:
    """Folders of the image's user, the data on a file system that takes O_DIRECT."""
    BUILD.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as sockets,
        tempfile.TemporaryDirectory(prefix="containers-", dir=BUILD) as data,
    ):
        for folder, mode in ((sockets, 0o750), (data, 0o700)):
            os.chown(folder, MEMD_ID, MEMD_ID)
            Path(folder).chmod(mode)
        try:
            yield Scene(engine=engine, sockets=Path(sockets), data=Path(data))
        finally:
            engine.remove_all()


METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9464/metrics").read().decode())
"""


def io_engine_of(daemon: Container, *, wanted: str) -> str:
    """As the daemon's status, metrics and, where it uses threads, its log say."""
    said = daemon.engine.ask("exec", daemon.name, "/opt/memd/bin/python", "-c", METRICS)
    found = re.search(r'^memd_io_engine_info\{engine="(\w+)",reason="(.*)"\} 1', said, re.MULTILINE)
    if found is None or found[1] != wanted:
        raise Failure(f"the daemon does not use {wanted}: {found}")
    status = daemon.engine.ask("exec", daemon.name, "memd", "status").splitlines()[0]
    if f"I/O by {wanted}" not in status:
        raise Failure(f"not {wanted}: {status}")
    return f"{found[1]}: {found[2]}" if found[2] else found[1]


def end_in_order(daemon: Container) -> str:
    """What it had to say."""
    os.kill(daemon.first_process_id(), signal.SIGTERM)
    daemon.lines()
    return daemon.log.read_text()


def without_io_uring(stage: Scene) -> tuple[str, float]:
    daemon, ready_s = stage.start_daemon()
    engine = io_engine_of(daemon, wanted="threads")
    if "io_uring is not used" not in end_in_order(daemon):
        raise Failure("the daemon's log does not say that io_uring is not used")
    return engine, ready_s


def namespaces_apart(one: int, other: int) -> list[str]:
    def of(process_id: int, name: str) -> Path:
        return Path(f"/proc/{process_id}/ns/{name}").readlink()

    return [name for name in NAMESPACES if of(one, name) != of(other, name)]


def split(lines: list[str]) -> tuple[list[tuple[int, str]], str, int]:
    """Steps with losses, the hash at the end, and how often a session was given up."""
    steps = [(int(step), loss) for step, loss in map(str.split, filter(_is_step, lines))]
    fenced = sum(line.startswith("fenced ") for line in lines)
    return steps, lines[-1], fenced


def _is_step(line: str) -> bool:
    return line[:1].isdigit()


def expect_the_bits_of(wanted: list[str], got: list[str]) -> tuple[int, int]:
    """How many steps were computed again, and how many sessions given up."""
    right, right_end, _ = split(wanted)
    steps, end, fenced = split(got)
    if end != right_end or not end.startswith("end "):
        raise Failure(f"the state is another: {end}, without memd {right_end}")
    by_step = dict(right)
    for step, loss in steps:
        if by_step[step] != loss:
            raise Failure(f"step {step}: {loss}, without memd {by_step[step]}")
    if {step for step, _ in steps} != set(by_step):
        raise Failure("steps are missing")
    return len(steps) - len(by_step), fenced


def through_a_restart(
    stage: Scene, daemon: Container, wanted: list[str]
) -> tuple[Container, int, int]:
    """The daemon's container dies while a trainer makes steps, and another one follows it."""
    trainer = stage.start_trainer("--job", "restart", "--steps", str(STEPS))
    got = [trainer.line() for _ in range(KILLED_AT)]
    daemon.kill()
    daemon.wait()
    daemon, _ = stage.start_daemon(f"--security-opt=seccomp={PROFILE}")
    got += trainer.lines()
    return daemon, *expect_the_bits_of(wanted, got)


def death_ms(stage: Scene, client: Attached) -> tuple[float, float]:
    """From the kill to the end of the process, which frees its memory first, and to the end of its
    session."""
    trainer = stage.start_trainer("--job", "killed")
    for _ in range(3):
        trainer.line()
    if client.session_count("killed") != 1:
        raise Failure("the trainer has no session")
    process = os.pidfd_open(trainer.first_process_id())
    killed = time.monotonic()
    signal.pidfd_send_signal(process, signal.SIGKILL)
    select.select([process], [], [])
    ended = time.monotonic()
    os.close(process)
    while client.session_count("killed"):
        if time.monotonic() - killed > PATIENCE_S:
            raise Failure("the daemon does not notice that its trainer has died")
        time.sleep(0.001)  # questions keep the daemon from its work
    noticed = time.monotonic()
    trainer.wait()
    return (ended - killed) * 1e3, (noticed - killed) * 1e3


def run(engine: Engine, kills: int) -> Outcome:
    with scene(engine) as stage:
        by_default, first_s = without_io_uring(stage)
        daemon, next_s = stage.start_daemon(f"--security-opt=seccomp={PROFILE}")
        with_profile = io_engine_of(daemon, wanted="io_uring")
        wanted = stage.start_trainer("--plain", "--steps", str(STEPS)).lines()
        trainer = stage.start_trainer("--job", "undisturbed", "--steps", str(STEPS))
        got = [trainer.line()]
        apart = namespaces_apart(trainer.first_process_id(), daemon.first_process_id())
        if not {"pid", "mnt", "user"} <= set(apart):
            raise Failure(f"trainer and daemon have apart only {apart}")
        expect_the_bits_of(wanted, got + trainer.lines())
        daemon, again, fenced = through_a_restart(stage, daemon, wanted)
        with stage.attached() as client:
            deaths = [death_ms(stage, client) for _ in range(kills)]
        end_in_order(daemon)
    died, noticed = zip(*deaths, strict=True)
    return Outcome(
        daemon_image_bytes=engine.image_bytes(DAEMON_IMAGE),
        trainer_image_bytes=engine.image_bytes(TRAINER_IMAGE),
        first_ready_s=round(first_s, 2),
        next_ready_s=round(next_s, 2),
        engine_by_default=by_default,
        engine_with_profile=with_profile,
        namespaces_apart=apart,
        steps=STEPS,
        steps_computed_again=again,
        sessions_fenced=fenced,
        kills=kills,
        death_ms=[round(each, 1) for each in died],
        death_ms_median=round(statistics.median(died), 1),
        noticed_ms=[round(each, 1) for each in noticed],
        noticed_ms_median=round(statistics.median(noticed), 1),
    )


def late(outcome: Outcome) -> str | None:
    """What is to be said where deaths are noticed too late."""
    median = outcome.noticed_ms_median
    if outcome.kills < KILLS_OF_A_MEDIAN or median <= NOTICED_MS_MAX:
        return None
    return (
        f"deaths are noticed after {median} ms in the median, and not within {NOTICED_MS_MAX:.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", default=os.environ.get("CONTAINER_ENGINE", "podman"))
    parser.add_argument("--run-flags", default=os.environ.get("CONTAINER_RUN_FLAGS", ""))
    parser.add_argument("--unshare-users", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command, flags = shlex.split(arguments.engine), shlex.split(arguments.run_flags)
    if shutil.which(command[0]) is None:
        sys.exit(f"{command[0]} is not installed")
    if os.geteuid() != 0:
        sys.exit(
            "namespaces of users, and folders of the daemon's, need root: sudo make try-containers"
        )
    with tempfile.TemporaryDirectory() as logs:
        try:
            engine = Engine(command, flags, Path(logs), not arguments.unshare_users)
            outcome = run(engine, arguments.kills)
        except Failure as failure:
            print(f"FAILED: {failure}")
            return 1
    text = json.dumps(asdict(outcome), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    if sentence := late(outcome):
        print(f"FAILED: {sentence}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
