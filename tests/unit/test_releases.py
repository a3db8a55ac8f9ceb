"""tests/compat/releases.toml says of each commit what it has, and its builds are its own."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.compat import built_release
from tests.compat.releases import ROOT, SCRIPTS, Release, newest_that_builds, releases

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = releases()


def has(release: Release, path: str) -> bool:
    command = ["git", "cat-file", "-e", f"{release.commit}:{path}"]
    return subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_release_builds_what_its_commit_has_a_script_for(release: Release) -> None:
    if not has(release, "pyproject.toml"):
        pytest.skip("this checkout has no history")
    assert set(release.builds) == {what for what, path in SCRIPTS.items() if has(release, path)}


def test_the_newest_release_is_upgraded_from_by_every_trial() -> None:
    assert {newest_that_builds(what) for what in SCRIPTS} == {RELEASES[-1]}


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """One that is unpacked, and has no script."""
    monkeypatch.setattr(built_release, "BUILDS", tmp_path)
    made = replace(RELEASES[-1], name="made-up", commit="0" * 40, builds=())
    folder = tmp_path / made.commit[:12]
    (folder / "source" / "deploy" / "debian").mkdir(parents=True)
    (folder / "unpacked").touch()
    return made


def test_its_pins_are_those_of_its_lock(release: Release) -> None:
    assert built_release.pins_of(release) == []
    lock = built_release.source_of(release) / "deploy" / "debian" / "requirements.txt"
    text = "# what\ngrpcio==1.76.0 \\\n  --hash=sha256:0f \\\n    # via memd\nrich==14.0 \\\n"
    lock.write_text(text, encoding="utf-8")
    assert built_release.pins_of(release) == ["grpcio==1.76.0", "rich==14.0"]


def test_what_it_has_no_script_for_is_refused(release: Release) -> None:
    with pytest.raises(SystemExit, match=r"made-up builds no package: it has no deploy/debian"):
        built_release._script(release, "package")


def test_a_commit_that_is_not_here_is_named(release: Release) -> None:
    lost = replace(release, commit="1" * 40)
    with pytest.raises(SystemExit, match="made-up is not in this checkout; fetch its history"):
        built_release.source_of(lost)


def test_today_s_tools_are_shared_only_where_it_asks_for_the_same(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_release, "ROOT", tmp_path)
    here, there = tmp_path / "build" / "wheels", built_release.source_of(release)
    (here / "tools").mkdir(parents=True)
    (here / "tools" / "made").touch()
    project = '[project]\noptional-dependencies = {{ wheels = ["ziglang=={}"] }}\n'
    (tmp_path / "pyproject.toml").write_text(project.format("0.17.1"))
    (there / "pyproject.toml").write_text(project.format("0.16.0"))
    built_release._share_tools(release)
    assert not (there / "build").exists()
    (there / "pyproject.toml").write_text(project.format("0.17.1"))
    built_release._share_tools(release)
    assert (there / "build" / "wheels" / "tools").resolve() == here / "tools"
