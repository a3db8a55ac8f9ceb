""".ci/run, on a small repository whose targets say what they see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = """
test lint test-more:
	@echo "$@: $$(stat -c %a ..) $$HOME $$(git rev-parse HEAD) $${SECRET-unset} $$(cat file)"
	@test ! -e fails-$@
"""


@pytest.fixture
def repository(disk_path: Path) -> Path:
    (disk_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", disk_path / ".ci")
    (disk_path / "Makefile").write_text(MAKEFILE)
    (disk_path / "file").write_text("committed")
    git(disk_path, "init")
    commit(disk_path)
    return disk_path


def git(repository: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=ci", "-c", "user.email=ci@example.org")
    command = ["git", *identity, "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit(repository: Path) -> None:
    git(repository, "add", ".")
    git(repository, "commit", "--message", "one")


def run(repository: Path) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run(
        [repository / ".ci" / "run"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SECRET": "told"},
    )
    if "GiB free" in answer.stderr:
        pytest.skip(answer.stderr)
    return answer


def targets_of(answer: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [line.split() for line in answer.stdout.splitlines()]


def test_a_clone_in_a_closed_home_is_tested_and_removed(repository: Path) -> None:
    (repository / "file").write_text("changed")
    answer = run(repository)
    assert answer.returncode == 0, answer.stderr
    lines = targets_of(answer)
    assert [line[0] for line in lines] == ["test:", "lint:", "test-more:"]
    head = git(repository, "rev-parse", "HEAD").split()[0]
    for _, mode, home, *seen in lines:
        assert mode == "700"
        assert not Path(home).exists()
        assert seen == [head, "unset", "committed"]
    assert "not committed is not tested" in answer.stderr


@pytest.mark.parametrize("failing", ["test", "lint", "test-more"])
def test_what_fails_is_named_and_the_rest_runs(repository: Path, failing: str) -> None:
    (repository / f"fails-{failing}").touch()
    commit(repository)
    answer = run(repository)
    assert answer.returncode == 1
    lines = targets_of(answer)
    assert len(lines) == 3
    assert not Path(lines[0][2]).exists()
    outcomes = dict(re.findall(r"^ci: make ([\w-]+): (\w+) in \d+ s$", answer.stderr, re.MULTILINE))
    expected = dict.fromkeys(("test", "lint", "test-more"), "passed") | {failing: "FAILED"}
    assert outcomes == expected


def test_another_users_checkout_is_cloned(repository: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 65534, 65534)
    answer = run(repository)
    assert answer.returncode == 0, answer.stderr
    # git writes nothing there that its owner may not change.
    assert {path.stat().st_uid for path in repository.rglob("*")} == {65534}


def test_the_command_of_the_readme_is_what_is_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^make test +#", readme, re.MULTILINE)
    assert "for target in test lint test-more; do" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.more
def test_the_device_tests_are_asked_for_alone() -> None:
    """They are left out of every other run, so both targets have one for them."""
    mixed = ("tests/device/test_clock.py", "tests/unit/test_ci.py")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *mixed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == pytest.ExitCode.USAGE_ERROR
    assert "run tests/device in a process of its own" in answer.stderr
    # Without what a `make test` around this one was given.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target in ("test", "test-more"):
        plan = subprocess.run(
            ["make", "--dry-run", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        )
        assert len(re.findall(r"-m pytest .*tests/device ", plan.stdout)) == 1


def test_more_tests_have_a_browser_and_the_others_do_not_wait_for_it() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target, purpose in (("test", "test"), ("sanitize", "test"), ("test-more", "test-more")):
        plan = subprocess.run(
            ["make", "--dry-run", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        )
        assert re.findall(r"^deploy/setup/setup.sh (.*)$", plan.stdout, re.MULTILINE) == [purpose]
    setup = (ROOT / "deploy/setup/setup.sh").read_text(encoding="utf-8")
    assert "[[ $purpose != test-more ]] || need chromium-headless-shell has_browser" in setup
