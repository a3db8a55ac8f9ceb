"""Each exit code that `memd --help` names, by commands that meet what it stands for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.golden import image
from tests.integration.test_scrub import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemons

BLOCK = 4096
SUPERBLOCK_BYTES = 1 << 20
TIMEOUT_S = 120.0
MEANINGS = {
    0: "done",
    1: "failed",
    2: "wrong use",
    3: "data is lost or damaged",
    4: "no daemon answers",
}
SERVE = "serve --socket {none} --host 64MiB --unlocked-ok"
# Code, command, and a part of what it says. Names in braces are those of `Places`.
CASES = (
    (0, "status --socket {socket}", "memd 0.1.0, up "),
    (0, "job list --socket {socket}", image.JOB),
    (1, "job show nobody --socket {socket}", "there is no job 'nobody'"),
    (1, f"job weight {image.JOB} 99 --socket {{socket}}", "is a number from 0.1 to 10"),
    (1, f"{SERVE} --data /nowhere/at/all", "does not exist; create it"),
    (1, "doctor --data /nowhere/at/all --socket {none} --host 64MiB", "obstacles: "),
    (2, "statsu", "No such command"),
    (2, f"job drop {image.JOB} --socket {{socket}}", "say --yes"),
    (2, "config --host 64", "has no unit"),
    (2, "serve --nvme ten --socket {none}", "is not a size"),
    (2, "check --data {data}", "with --socket"),
    (3, "check --socket {socket}", f"LOST: {image.JOB}/blob"),
    (3, "check --data {flipped}", f"LOST: {image.JOB}/blob"),
    (3, "check --data {broken}", "has no valid superblock"),
    (3, "volume list --data {broken}", "has no valid superblock"),
    (3, f"{SERVE} --data {{broken}} --nvme {{nvme}}", "superblock"),
    (4, "status --socket {none}", "no daemon answers"),
    (4, "status --probe --socket {none}", "no daemon answers"),
    (4, "job list --socket {none}", "no daemon answers"),
    (4, "check --socket {none}", "no daemon answers"),
    (4, "top --count 1 --socket {none}", "no daemon answers"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    socket: Path  # of a daemon on a volume with a flipped bit in a blob
    data: Path  # its folder
    nvme: str
    flipped: Path  # another such volume, without a daemon
    broken: Path  # without a whole superblock
    none: Path  # a socket where nobody listens


@pytest.fixture(scope="module")
def places(daemons: Daemons) -> Iterator[Places]:
    sockets = Path(tempfile.mkdtemp(prefix="codes-"))
    (held, nvme), (flipped, _), (broken, _) = (
        unpacked(daemons, name) for name in ("codes", "flipped", "broken")
    )
    for volume in (held, flipped):
        flip_a_blob(volume)
    length = broken.stat().st_size
    with broken.open("r+b") as file:
        for at in (0, SUPERBLOCK_BYTES, length - 2 * SUPERBLOCK_BYTES, length - SUPERBLOCK_BYTES):
            file.seek(at + 100)
            file.write(b"damage")
    daemon = daemons.start(name="codes", nvme=nvme, environ={"MEMD_SCRUB": "0"})
    yield Places(
        socket=daemon.socket,
        data=held.parent,
        nvme=nvme,
        flipped=flipped.parent,
        broken=broken.parent,
        none=sockets / "none.sock",
    )
    shutil.rmtree(sockets)


def flip_a_blob(volume: Path) -> None:
    data = volume.read_bytes()
    block = image.pattern("blob", image.UINT8, BLOCK)
    at = next(at for at in range(2 << 20, len(data), BLOCK) if data[at : at + BLOCK] == block)
    with volume.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([data[at + 5] ^ 1]))


def memd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={key: value for key, value in os.environ.items() if not key.startswith("MEMD_")},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(("code", "command", "says"), CASES, ids=lambda value: str(value))
def test_a_command_exits_with_the_code_of_what_it_met(
    places: Places, code: int, command: str, says: str
) -> None:
    given = {name: str(getattr(places, name)) for name in Places.__slots__}
    answer = memd(*command.format(**given).split())
    assert (answer.returncode, says in answer.stdout) == (code, True), answer


def test_the_help_names_each_code_that_is_tried_here() -> None:
    said = " ".join(memd("--help").stdout.split())
    found = re.search(r"Exit codes: (.*?)\.", said)
    assert found
    named = dict(re.findall(r"(\d) ([^,]+)", found[1]))
    assert named == {str(code): meaning for code, meaning in MEANINGS.items()}
    assert {code for code, _, _ in CASES} == MEANINGS.keys()
