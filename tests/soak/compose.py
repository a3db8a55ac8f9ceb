"""deploy/container/compose.yaml, run by podman-compose: daemon, trainer and Prometheus.

The trainer makes all steps of its script and ends; Prometheus has found the daemon and its last
step. Debian's Prometheus in the base image stands in for its own, since no registry may be in
reach; Grafana is not started. podman-compose is installed below build.

As root, with the images of `DEBOOTSTRAP=1 deploy/container/build.sh`, and Prometheus installed:

Run: python -m tests.soak.compose [--runtime runc] [--limit nofile=20000 --limit nproc=8192]

`--limit` lowers what the engine would set, for hosts where nobody may raise a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.daemons import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
ENVIRONMENT, PACKAGE = BUILD / "podman-compose", "podman-compose==1.6.0"
BASE_IMAGE = "localhost/memd-base:bookworm"
SIZES = {"HOST_SIZE": "128MiB", "NVME_SIZE": "512MiB"}
STEPS = 20  # of train.py
PATIENCE_S = 120.0
QUESTION = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1]).read().decode())
"""


class Failure(Exception):
    """A promise is broken, or something hangs."""


def podman(*arguments: str, may_fail: bool = False) -> str:
    answer = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode != 0 and not may_fail:
        raise Failure(f"podman {' '.join(arguments)}: {answer.stderr[-2000:]}")
    return answer.stdout.strip()


def until(what: str, is_done: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_done():
        if time.monotonic() - began > PATIENCE_S:
            raise Failure(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.5)


def overrides(limits: Sequence[str]) -> dict[str, Any]:
    """What this host cannot do as compose.yaml says."""
    ulimits = {name: int(value) for name, value in (limit.split("=") for limit in limits)}
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise Failure("prometheus is not installed (Debian package prometheus)")
    services: dict[str, Any] = {name: {} for name in ("memd", "trainer", "prometheus")}
    for service in services.values():
        if ulimits:
            service["ulimits"] = dict(ulimits)
    if ulimits:
        # Instead of a limit of locked memory, which not everybody may raise.
        services["memd"]["cap_add"] = ["IPC_LOCK"]
        services["memd"]["ulimits"]["memlock"] = 8 << 20
    services["prometheus"] |= {
        "image": BASE_IMAGE,
        "volumes": [f"{prometheus}:{prometheus}:ro"],
        "command": [
            prometheus,
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
        ],
    }
    return {"services": services}


@dataclass(frozen=True, kw_only=True)
class Project:
    command: tuple[str, ...]

    def run(self, *arguments: str) -> None:
        # In its folder: podman-compose leaves the path of the seccomp profile as it is.
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=FOLDER,
            env={**os.environ, **SIZES},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Failure(f"podman-compose {' '.join(arguments)}: {done.stderr[-2000:]}")

    def start(self, *services: str) -> None:
        self.run("up", "--detach", "--no-build", *services)


@contextmanager
def project(runtime: str, limits: Sequence[str]) -> Iterator[Project]:
    program = ENVIRONMENT / "bin" / "podman-compose"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        subprocess.run(
            [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", PACKAGE], check=True
        )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(overrides(limits), file)
        file.flush()
        flags = (f"--podman-args=--runtime {runtime}",) if runtime else ()
        made = Project(
            command=(str(program), *flags, "-f", "compose.yaml", "-f", file.name),
        )
        made.run("down", "--volumes")  # what one that was killed has left
        try:
            yield made
        finally:
            made.run("down", "--volumes")


def container(service: str) -> str:
    return f"memd_{service}_1"


def is_healthy() -> bool:
    """Asked by hand: podman's own timer is one of systemd's."""
    command = ["podman", "healthcheck", "run", container("memd")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def introduce(service: str, other: str) -> None:
    """A name for an engine whose networks have none; where they have, it is the same address."""
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = podman("inspect", "--format", template, container(other))
    hosts = Path(podman("inspect", "--format", "{{.HostsPath}}", container(service)))
    with hosts.open("a") as file:
        file.write(f"{address} {other}\n")


def trained() -> list[str]:
    """A line a step, once the trainer has ended by itself."""
    name = container("trainer")
    until(
        "the trainer has ended",
        lambda: podman("inspect", "--format", "{{.State.Status}}", name) == "exited",
    )
    status = podman("inspect", "--format", "{{.State.ExitCode}}", name)
    said = podman("logs", name).splitlines()
    if status != "0" or [line.split()[0] for line in said] != [str(n) for n in range(STEPS)]:
        raise Failure(f"the trainer ended with {status}: {said}")
    return said


def answer_of_prometheus(query: str) -> list[Any]:
    """Asked from the daemon's container, which is in its network."""
    url = f"http://prometheus:9090/api/v1/query?query={query}"
    python = ("/opt/memd/bin/python", "-c", QUESTION, url)
    said = podman("exec", container("memd"), *python, may_fail=True)
    return list(json.loads(said)["data"]["result"]) if said else []


def committed_steps() -> list[float]:
    return [float(each["value"][1]) for each in answer_of_prometheus("memd_committed_step")]


def run(made: Project) -> None:
    made.start("memd")
    until("the daemon is healthy", is_healthy)
    print("the daemon is healthy", flush=True)
    made.start("trainer", "prometheus")
    introduce("prometheus", "memd")
    introduce("memd", "prometheus")
    said = trained()
    print(f"{len(said)} steps: loss {said[0].split()[1]} to {said[-1].split()[1]}", flush=True)
    until("Prometheus has the last step", lambda: committed_steps() == [float(STEPS)])
    print(f"Prometheus: memd_committed_step {STEPS}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runtime", default="", help="instead of the engine's own, such as runc")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("podman") is None:
        parser.error("networks of containers need root, and podman has to be installed")
    try:
        with project(arguments.runtime, arguments.limit) as made:
            run(made)
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
