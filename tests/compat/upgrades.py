"""Upgrades a node from each earlier release, under a job of each durability.

The old daemon and the old client make a few steps. The daemon ends by SIGTERM, or is killed;
today's starts in its place, on its volume, beside the descriptors that it kept. After SIGTERM no
step may be missing. After kill -9 no step is missing either if both have one version of the ledger;
otherwise the job is where a power cut would have left it, and the log says why the memory was not
taken over. Then today's client goes on, and every bit is that of a training in memory.

If both have one protocol and one ledger, the old client also trains through the upgrade, without
an end, and today's client trains on the old daemon.

A release is its own wheel, which pip installs with what the release asks for into an environment of
its own: gRPC, protobuf and torch are not those that run this.

Run: python -m tests.compat.upgrades [--count N] [--json FILE] [--only RELEASE]; N runs of each.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memd_native.protocol import SPOKEN
from tests.compat import small_job
from tests.compat.built_release import how_built, packages_of, python_of
from tests.compat.releases import ROOT, Release, releases
from tests.daemons import Daemon, Daemons, daemons

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STEPS_BEFORE = 7
STEPS_AFTER = 4
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    durability: str
    ends_by: signal.Signals
    # Where the job goes on; None: it is refused, since its memory was all it had.
    goes_on_at: int | None
    is_memory_lost: bool = False
    # The old client goes on under today's daemon; without this, today's client does.
    is_trained_through: bool = False


CASES_OF_EVERY_LEDGER = (
    *(
        Case(durability=durability, ends_by=signal.SIGTERM, goes_on_at=STEPS_BEFORE)
        for durability in ("step", "every:3", "none")
    ),
    Case(durability="step", ends_by=signal.SIGKILL, goes_on_at=STEPS_BEFORE),
)
CASES_OF_TODAYS_LEDGER = (
    Case(durability="every:3", ends_by=signal.SIGKILL, goes_on_at=STEPS_BEFORE),
    Case(durability="none", ends_by=signal.SIGKILL, goes_on_at=STEPS_BEFORE),
)
CASES_TRAINED_THROUGH = tuple(
    Case(durability=durability, ends_by=ends_by, goes_on_at=STEPS_BEFORE, is_trained_through=True)
    for durability in ("step", "every:3", "none")
    for ends_by in (signal.SIGTERM, signal.SIGKILL)
)
CASES_OF_ANOTHER_LEDGER = (
    Case(
        durability="every:3",
        ends_by=signal.SIGKILL,
        goes_on_at=STEPS_BEFORE // 3 * 3,
        is_memory_lost=True,
    ),
    Case(durability="none", ends_by=signal.SIGKILL, goes_on_at=None, is_memory_lost=True),
)


def ledger_of_today() -> int:
    source = (ROOT / "native" / "store" / "journal" / "ledger_layout.h").read_text(encoding="utf-8")
    (version,) = re.findall(r"\bkLedgerVersion = (\d+);", source)
    return int(version)


def cases_of(release: Release) -> tuple[Case, ...]:
    is_kept = release.ledger == ledger_of_today()
    cases = CASES_OF_EVERY_LEDGER + (CASES_OF_TODAYS_LEDGER if is_kept else CASES_OF_ANOTHER_LEDGER)
    return cases + (CASES_TRAINED_THROUGH if is_kept and is_spoken(release) else ())


def is_spoken(release: Release) -> bool:
    return release.protocol in SPOKEN


class Failure(Exception):
    """An upgrade lost something, or says nothing of what it could not keep."""


def upgrade(release: Release, case: Case) -> None:
    old = python_of(release)
    with daemons() as made:
        daemon = start(made, old)
        with running_job(old, daemon, case.durability, STEPS_BEFORE) as (job, before):
            expect(before["went_on_at"], 0, "the old client began at step")
            in_memory = small_job.train_in_memory(STEPS_BEFORE)
            expect(before["digest"], in_memory, "the old release's state")
            daemon.process.send_signal(case.ends_by)
            daemon.process.wait(TIMEOUT_S)
            job.kill()
        daemon = start(made, Path(sys.executable))
        if case.is_memory_lost:
            expect_in_log(daemon, "starts from disk, its memory is lost")
        if case.goes_on_at is None:
            expect_refusal(daemon, case.durability)
        else:
            steps = STEPS_BEFORE + STEPS_AFTER
            today = Path(sys.executable)
            with running_job(today, daemon, case.durability, steps) as (_, after):
                expect(after["went_on_at"], case.goes_on_at, "today's client went on at step")
                in_memory = small_job.train_in_memory(steps)
                expect(after["digest"], in_memory, "the state after the upgrade")
        if daemon.stop() != 0:
            raise Failure("today's daemon did not end in order:\n" + daemon.log.read_text())


def upgrade_under_training(release: Release, case: Case) -> None:
    old = python_of(release)
    steps = STEPS_BEFORE + STEPS_AFTER
    with daemons() as made:
        daemon = start(made, old)
        with running_job(old, daemon, case.durability, STEPS_BEFORE) as (job, before):
            in_memory = small_job.train_in_memory(STEPS_BEFORE)
            expect(before["digest"], in_memory, "the old release's state")
            daemon.process.send_signal(case.ends_by)
            daemon.process.wait(TIMEOUT_S)
            daemon = start(made, Path(sys.executable))
            assert job.stdin is not None
            job.stdin.write(f"{steps}\n")
            job.stdin.flush()
            after = said(job, daemon)
            expect(after["went_on_at"], case.goes_on_at, "the old client went on at step")
            in_memory = small_job.train_in_memory(steps)
            expect(after["digest"], in_memory, "the old client's state under today's daemon")
        if daemon.stop() != 0:
            raise Failure("today's daemon did not end in order:\n" + daemon.log.read_text())


def serve_todays_client(release: Release) -> None:
    """The old daemon, without an upgrade."""
    with daemons() as made:
        daemon = start(made, python_of(release))
        with running_job(Path(sys.executable), daemon, "step", STEPS_BEFORE) as (_, found):
            in_memory = small_job.train_in_memory(STEPS_BEFORE)
            expect(found["digest"], in_memory, "today's client's state on the old daemon")
        if daemon.stop() != 0:
            raise Failure("the old daemon did not end in order:\n" + daemon.log.read_text())


def start(made: Daemons, python: Path) -> Daemon:
    # Daemons' command begins with the running interpreter; `before` puts another in its place.
    stand_in = "import os, sys; os.execv(sys.argv[1], [sys.argv[1], *sys.argv[3:]])"
    # It and its holder must not import today's packages from the working directory.
    environ = {"PYTHONSAFEPATH": "1"}
    return made.start(before=(sys.executable, "-c", stand_in, str(python)), environ=environ)


@contextmanager
def running_job(
    python: Path, daemon: Daemon, durability: str, steps_to: int
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The job's process, which keeps its session until the block ends, and what it said."""
    program = [str(python), small_job.__file__, daemon.address, durability, str(steps_to)]
    with subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        first = said(job, daemon)
        try:
            yield job, first
        except BaseException:
            job.kill()
            raise
        # The end of its standard input ends it, unless it was killed.
        job.communicate(timeout=TIMEOUT_S)


def said(job: subprocess.Popen[str], daemon: Daemon) -> dict[str, Any]:
    """The job's next line."""
    assert job.stdout is not None
    line = job.stdout.readline()
    if not line:
        _, stderr = job.communicate(timeout=TIMEOUT_S)
        raise Failure(f"{stderr[-3000:]}\n{daemon.log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Failure(f"{what}: {found}, not {wanted}")


def expect_in_log(daemon: Daemon, words: str) -> None:
    if words not in daemon.log.read_text():
        raise Failure(f"the log does not say {words!r}:\n{daemon.log.read_text()[-3000:]}")


def expect_refusal(daemon: Daemon, durability: str) -> None:
    try:
        with running_job(Path(sys.executable), daemon, durability, STEPS_BEFORE):
            raise Failure("a job whose memory is lost goes on")
    except Failure as refused:
        if "what is on disk is no step" not in str(refused):
            raise


def each(chosen: Sequence[Release], count: int) -> list[dict[str, Any]]:
    made = []
    for release in chosen:
        if is_spoken(release) and release.ledger == ledger_of_today():
            serve_todays_client(release)
        print(f"{release.name}: {how_built(release)}, {packages_of(release)}", file=sys.stderr)
        for case in cases_of(release):
            run = upgrade_under_training if case.is_trained_through else upgrade
            began = time.monotonic()
            for _ in range(count):
                run(release, case)
            made.append(
                {
                    "release": release.name,
                    "built_by": how_built(release),
                    "packages": packages_of(release),
                    "durability": case.durability,
                    "ends_by": case.ends_by.name,
                    "goes_on_at": case.goes_on_at,
                    "is_trained_through": case.is_trained_through,
                    "upgrades": count,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            print(made[-1], file=sys.stderr)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--json", type=Path)
    names = [release.name for release in releases()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="RELEASE")
    arguments = parser.parse_args()
    chosen = [release for release in releases() if release.name in arguments.only]
    text = json.dumps(each(chosen, arguments.count), indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
