"""Volumes that released versions wrote are opened by the code of today."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memd_native import StatusError, check_volumes, list_volumes
from tests.daemons import BUILD
from tests.golden import image

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(image.__file__).parent
IMAGES = sorted(GOLDEN.glob("format-*.xz.b64"))


def version_of(packed: Path) -> str:
    return packed.name.removeprefix("format-").removesuffix(".xz.b64")


def expected_of(packed: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(
        (GOLDEN / f"format-{version_of(packed)}.json").read_text()
    )
    return expected


@pytest.fixture(params=IMAGES, ids=lambda path: version_of(path))
def packed(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def folder(packed: Path) -> Iterator[Path]:
    data = BUILD / "test-data"
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="golden-", dir=data) as name:
        image.unpack(packed, Path(name))
        yield Path(name)


def test_there_is_an_image_of_the_first_format() -> None:
    assert "1.0" in [version_of(path) for path in IMAGES]


def test_an_old_image_is_read_in_full_and_trained_on(packed: Path, folder: Path) -> None:
    expected = expected_of(packed)
    with image.opened(folder) as server:
        assert image.content(server) == expected["jobs"]
        assert image.snapshots(server) == expected.get("snapshots", [])
    with image.opened(folder) as server:
        session_id = server.attach(server.find_job(image.JOB).job_id).session_id
        assert image.train_one_step(server, session_id) == image.STEPS + 1
        assert image.content(server) == expected["jobs_after_one_more_step"]
    # And what was then written by today's code is found again by the next start.
    with image.opened(folder) as server:
        assert image.content(server) == expected["jobs_after_one_more_step"]
        assert image.snapshots(server) == expected.get("snapshots", [])
    assert not check_volumes([str(folder)]).anything_lost


def test_an_old_image_is_checked_and_listed_and_not_touched(packed: Path, folder: Path) -> None:
    before = (folder / "memd.volume").read_bytes()
    report = check_volumes([str(folder)])
    assert not report.findings
    expected = expected_of(packed)["jobs"]
    assert {job.name: job.step for job in report.jobs} == {
        name: job["step"] for name, job in expected.items()
    }
    listed = list_volumes([str(folder)])
    assert listed.volumes[0].format == version_of(packed)
    assert [job.name for job in listed.jobs] == [job.name for job in report.jobs]
    kept = expected_of(packed).get("snapshots", [])
    for each in (report, listed):
        assert [
            (job.name, snapshot.name, snapshot.step)
            for job in each.jobs
            for snapshot in job.snapshots
        ] == [(image.JOB, snapshot["name"], snapshot["step"]) for snapshot in kept]
    assert (folder / "memd.volume").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["memd.volume"]


def test_a_flipped_bit_anywhere_in_what_is_used_is_found_by_the_check(
    packed: Path, folder: Path
) -> None:
    volume = folder / "memd.volume"
    clean = volume.read_bytes()
    used = [at for at in range(2 << 20, len(clean) - (2 << 20), 4096) if any(clean[at : at + 4096])]
    found = 0
    of_snapshots: set[str] = set()
    for at in used[:: max(1, len(used) // 25)]:
        with volume.open("r+b") as file:
            file.seek(at + 17)
            file.write(bytes([clean[at + 17] ^ 4]))
        report = check_volumes([str(folder)])
        for finding in report.findings:
            assert finding.is_lost
            assert finding.offset_bytes <= at < finding.offset_bytes + finding.length_bytes
            found += 1
            of_snapshots |= {finding.snapshot} - {""}
        with volume.open("r+b") as file:
            file.seek(at + 17)
            file.write(clean[at + 17 : at + 18])
    # What earlier commits left is in nobody's way and is not compared.
    assert found >= 10
    assert of_snapshots == {each["name"] for each in expected_of(packed).get("snapshots", [])}


def test_an_image_that_was_cut_is_refused_and_left_as_it_is(folder: Path) -> None:
    volume = folder / "memd.volume"
    with volume.open("r+b") as file:
        file.truncate(20 << 20)
    before = volume.read_bytes()
    with pytest.raises(StatusError, match="was cut or grown"), image.opened(folder):
        pass
    with pytest.raises(StatusError, match="was cut or grown"):
        check_volumes([str(folder)])
    assert volume.read_bytes() == before
