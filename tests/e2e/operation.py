"""An operator's work with memd, from its installation to a job that is dropped. Each step checks
and prints one line; the first that fails ends it all with its own sentence.

Run: tests/e2e/operator.sh [--quick]
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from tests.integration.test_readme import first_script
from tests.soak.booted_root import Failure, booted, wait
from tests.soak.packaged_trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.node import Node

JOB = "packaged"
FIRING = 'ALERTS{alertname="MemdVolumeFenced", alertstate="firing"}'
# The superblocks and the log are written on, and the state of jobs is not.
FILE_BYTES_MAX = 1 << 20


@contextmanager
def trainer_on(node: Node) -> Iterator[Trainer]:
    trainer = Trainer(node.system, node.trained)
    try:
        yield trainer
    finally:
        trainer.end()


def operate(node: Node) -> Iterator[str]:
    yield f"installed: {node.install()}"
    began = time.monotonic()
    node.start()
    yield f"the service is up after {time.monotonic() - began:.1f} s: {first_line(node)}"
    yield train_readme(node)
    yield watch(node)
    with trainer_on(node) as trainer:
        trainer.start()
        trainer.wait_for_steps()
        yield f"a trainer runs: {trainer.steps} steps"
        yield fence(node, trainer)
        yield cure(node, trainer)
        yield upgrade(node, trainer)
        yield compare(trainer)
    yield drop(node)


def first_line(node: Node) -> str:
    return node.memd("status").splitlines()[0]


def train_readme(node: Node) -> str:
    script = first_script(node.readme).replace('"embedded:", ', "")
    place = node.trained
    program = ("env", f"MEMD_ADDRESS={node.address}", place.python, "-c", script)
    printed = [line.split() for line in node.system.do(*place.user, *program).splitlines()]
    losses = [float(loss) for _, loss in printed]
    if [step for step, _ in printed] != [str(step) for step in range(10)]:
        raise Failure(f"README's script does not print ten steps: {printed}")
    if losses != sorted(losses, reverse=True):
        raise Failure(f"the losses of README's script do not fall: {losses}")
    return f"README's script trains: loss {losses[0]:.4f} to {losses[-1]:.4f}"


def watch(node: Node) -> str:
    node.start_prometheus()
    node.wait_for_series('up{job="memd"} == 1', "Prometheus does not reach the daemon")
    seen = node.wait_for_series("memd_build_info", "Prometheus has no series of the daemon")
    return f"Prometheus watches: {seen}"


def fence(node: Node, trainer: Trainer) -> str:
    """The kernel fails writes of this daemon from now on: EFBIG in place of a drive's EIO."""
    if node.series(FIRING):
        raise Failure("MemdVolumeFenced fires before anything is fenced")
    limit = ("prlimit", "--pid", str(node.daemon()), f"--fsize={FILE_BYTES_MAX}")
    node.system.do(*node.daemons_user, *limit)
    wait(lambda: trainer.status is not None, "a trainer whose commits fail goes on")
    fenced = node.wait_for_log("volumes fenced")
    fires = node.wait_for_series(FIRING, "MemdVolumeFenced does not fire")
    reason = re.search(r'reason="([^"]*)"', fenced)
    if reason is None or "File too large" not in reason[1]:
        raise Failure(f"the log does not say what failed: {fenced}")
    if trainer.status == 0:
        raise Failure("a trainer whose commits failed ended with 0")
    failed = reason[1].rpartition("look at the device first: ")[2]
    return f"the volumes are fenced ({failed}), and the rule fires: {fires}"


def cure(node: Node, trainer: Trainer) -> str:
    """A new process has no such limit."""
    steps = trainer.steps
    node.restart()
    trainer.start()
    trainer.wait_for_steps()
    wait(lambda: not node.series(FIRING), "MemdVolumeFenced fires after the restart")
    seen = "after a restart the rule is silent and training goes on"
    return f"{seen}: {steps} to {trainer.steps} steps"


def upgrade(node: Node, trainer: Trainer) -> str:
    before, steps = node.daemon(), trainer.steps
    taken_over = len(node.logged("is taken over"))
    version = node.upgrade()
    if node.daemon() == before:
        raise Failure(f"the upgrade left the daemon's process {before}")
    if version not in first_line(node):
        raise Failure(f"after the upgrade to {version} the daemon says: {first_line(node)}")
    trainer.wait_for_steps()
    seen = f'memd_build_info{{version="{version}"}}'
    node.wait_for_series(seen, f"Prometheus does not see {version}")
    if len(node.logged("is taken over")) != taken_over + 1:
        raise Failure("the daemon after the upgrade did not take over the memory of the one before")
    return f"upgraded to {version} under the trainer: {steps} to {trainer.steps} steps"


def compare(trainer: Trainer) -> str:
    compared = trainer.finish()
    if wrong := {name: value for name, value in compared.items() if name != "steps" and value}:
        raise Failure(f"the training differs from the same steps in memory: {wrong}")
    return f"{compared['steps']} losses and the state at the end equal those of plain PyTorch"


def drop(node: Node) -> str:
    node.memd("job", "drop", JOB, "--yes")
    line = node.wait_for_log(rf'event="job dropped".* job={JOB}\b')
    if JOB in node.memd("job", "list"):
        raise Failure(f"{JOB} is listed after it was dropped")
    return f"dropped: {line.partition('level=')[2]}"


# --- where ----------------------------------------------------------------------------------------


@contextmanager
def local() -> Iterator[Node]:
    from tests.e2e.local_node import local_node

    with local_node() as node:
        yield node


@contextmanager
def in_booted_root() -> Iterator[Node]:
    from tests.e2e.booted_node import FOLDER, SRV, BootedNode, build_upgrade, make_root

    FOLDER.mkdir(parents=True, exist_ok=True)
    upgrade = build_upgrade()
    root = make_root(upgrade)
    try:
        with booted(root, FOLDER / "operator.log", srv=SRV) as system:
            yield BootedNode(system, upgrade)
    finally:
        shutil.rmtree(root)


def interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="on this machine, without a root")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    began = time.monotonic()
    count = 0
    try:
        with local() if arguments.quick else in_booted_root() as node:
            for count, line in enumerate(operate(node), 1):
                print(f"{count}. {line}", flush=True)
    except (Failure, subprocess.TimeoutExpired) as failure:
        print(f"operator: step {count + 1} failed: {failure}", flush=True)
        return 1
    except KeyboardInterrupt:
        print(
            f"operator: interrupted in step {count + 1}; all that it started has ended", flush=True
        )
        return 130
    print(f"operator: {count} steps passed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
