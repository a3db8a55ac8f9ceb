"""`memd check` and `memd volume` on real volumes, without a daemon and beside one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import BUILD, running_daemon
from tests.golden import image

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKED = Path(image.__file__).parent / "format-1.0.xz.b64"
BLOCK = 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    data = BUILD / "test-data"
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="volumes-", dir=data) as name:
        yield Path(name)


@pytest.fixture
def filled(folder: Path) -> Path:
    image.unpack(PACKED, folder)
    return folder


def memd(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMD_")}
    answer = subprocess.run(
        [sys.executable, "-m", "memd", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    assert answer.returncode == status, answer
    return answer


def answer_of(*arguments: object, status: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(memd(*arguments, "--json", status=status).stdout)
    return told


def flip(volume: Path, at: int) -> None:
    with volume.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_what_is_whole_is_all_right(filled: Path) -> None:
    answer = memd("check", "--data", filled)
    assert answer.stdout.splitlines()[0].startswith("job golden: all right, step 2, 8 shards")
    assert answer.stdout.splitlines()[-1].startswith("all right: 4.5 MiB read in ")
    assert answer.stderr == ""  # no progress bar in a pipe
    told = answer_of("check", "--data", filled, "--job", image.OTHER_JOB)
    assert [job["job"] for job in told["jobs"]] == [image.OTHER_JOB]
    assert not told["findings"]


def test_what_is_lost_is_named_and_the_exit_code_says_so(filled: Path) -> None:
    whole = answer_of("check", "--data", filled)
    assert not whole["lost"]
    volume = filled / "memd.volume"
    data = volume.read_bytes()
    block = image.pattern("blob", image.UINT8, BLOCK)
    at = next(at for at in range(2 << 20, len(data), BLOCK) if data[at : at + BLOCK] == block)
    flip(volume, at + 5)
    told = answer_of("check", "--data", filled, status=3)
    assert told["lost"]
    (finding,) = told["findings"]
    assert finding["offset_bytes"] == at
    assert finding["path"] == str(volume)
    assert (finding["job"], finding["shards"]) == (image.JOB, ["blob"])
    assert next(job for job in told["jobs"] if job["job"] == image.JOB)["lost_shards"] == ["blob"]
    text = memd("check", "--data", filled, status=3).stdout
    assert f"LOST: {image.JOB}/blob bytes from 0" in text
    assert f"{volume} at {at}, {1 << 20} bytes" in text
    # Another job is none the worse.
    assert not answer_of("check", "--data", filled, "--job", image.OTHER_JOB)["lost"]


def test_a_damaged_superblock_is_a_warning_that_the_next_commits_mend(filled: Path) -> None:
    flip(filled / "memd.volume", 100)
    told = answer_of("check", "--data", filled)
    assert [finding["lost"] for finding in told["findings"]] == [False]
    listed = answer_of("volume", "list", "--data", filled)
    assert listed["volumes"][0]["damaged_superblock_offsets"] == [0]
    with image.opened(filled) as server:
        session_id = server.attach(server.find_job(image.JOB).job_id).session_id
        for _ in range(2):
            image.train_one_step(server, session_id)
    assert not answer_of("check", "--data", filled)["findings"]


def test_formatted_volumes_are_those_that_a_daemon_starts_on(folder: Path) -> None:
    told = answer_of("volume", "format", "--data", folder, "--nvme", f"{image.NVME_BYTES}B")
    (volume,) = told["volumes"]
    assert volume["bytes"] == image.NVME_BYTES
    assert volume["sequence"] == 0
    assert told["jobs"] == []
    with image.opened(folder) as server:
        assert not server.report().formatted
    row = memd("volume", "list", "--data", folder).stdout.splitlines()[1].split()
    assert row[:3] == [str(folder / "memd.volume"), "24", "MiB"]
    assert volume["uuid"] in row


def test_existing_volumes_are_formatted_only_by_force_and_consent(filled: Path) -> None:
    before = (filled / "memd.volume").read_bytes()
    arguments = ("volume", "format", "--data", filled, "--nvme", "16MiB")
    assert "--force removes it" in memd(*arguments, status=2).stderr
    assert "say --yes" in memd(*arguments, "--force", status=2).stderr
    assert (filled / "memd.volume").read_bytes() == before
    told = answer_of(*arguments, "--force", "--yes")
    assert told["jobs"] == []
    assert told["volumes"][0]["bytes"] == 16 << 20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("check", "--data", "/nowhere"), "does not exist"),
        (("check", "--data", "/etc/hostname"), "is not a directory"),
        (("check", "--data", "/etc"), "holds no volume"),
        (("volume", "list", "--data", "/etc"), "holds no volume"),
        (("volume", "format", "--data", "/nowhere"), "does not exist; create it"),
        (("volume", "format", "--data", "/dev/shm", "--nvme", "16MiB"), "lies in memory"),
        (("volume", "format", "--nvme", "16"), "has no unit"),
    ],
)
def test_wrong_use_says_what_is_wrong(arguments: tuple[str, ...], told: str) -> None:
    assert told in memd(*arguments, status=2).stderr


def test_what_is_no_volume_is_refused_and_left_alone(filled: Path) -> None:
    volume = filled / "memd.volume"
    assert (
        "there is no job nobody"
        in memd("check", "--data", filled, "--job", "nobody", status=2).stderr
    )
    volume.write_bytes(b"\x5a" * (8 << 20))
    before = volume.read_bytes()
    for command in (("check",), ("volume", "list")):
        assert "has no valid superblock" in memd(*command, "--data", filled, status=3).stderr
    answer = memd("volume", "format", "--data", filled, "--force", "--yes", status=3)
    assert "has no valid superblock" in answer.stderr
    assert volume.read_bytes() == before


def test_a_volume_in_use_is_listed_and_neither_checked_nor_formatted() -> None:
    with running_daemon() as daemon:
        holder = f"process {daemon.process.pid}"
        refusal = memd("check", "--data", daemon.data, status=2).stderr
        assert holder in refusal
        assert "with --socket" in refusal
        arguments = ("volume", "format", "--data", daemon.data, "--force", "--yes")
        assert holder in memd(*arguments, status=2).stderr
        told = answer_of("volume", "list", "--data", daemon.data)
        assert told["volumes"][0]["in_use_by"] == holder
