"""operator.sh --quick: its steps, how it fails, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.higher_version import raise_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "tests" / "e2e" / "operator.sh"
STEPS = 10
TIMEOUT_S = 240.0
# A holder sees that its folder is gone when it looks again.
END_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Sockets lie in it, because a socket's path is short."""
    made = Path(tempfile.mkdtemp(prefix="op-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def _programs() -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is not installed; `make test` fetches it")


def start(folder: Path, *, path: str = "") -> subprocess.Popen[str]:
    environ = {"TMPDIR": str(folder), "PATH": f"{path}{os.environ['PATH']}"}
    return subprocess.Popen(
        [OPERATOR, "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
    )


def processes_that_name(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def nothing_is_left(folder: Path) -> None:
    end = time.monotonic() + END_S
    while left := processes_that_name(folder):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert list(folder.iterdir()) == []


@pytest.mark.more
@pytest.mark.usefixtures("_programs")
def test_each_step_of_an_operator_passes_and_leaves_nothing(folder: Path) -> None:
    operator = start(folder)
    said, _ = operator.communicate(timeout=TIMEOUT_S)
    assert operator.returncode == 0, said
    numbers = re.findall(r"^(\d+)\. ", said, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, STEPS + 1)], said
    assert f"operator: {STEPS} steps passed" in said
    nothing_is_left(folder)


@pytest.mark.soak
@pytest.mark.usefixtures("_programs")
def test_a_step_that_fails_ends_it_with_its_own_sentence(folder: Path) -> None:
    """The program that makes writes fail is another one, so that no volume is fenced."""
    (folder / "prlimit").write_text("#!/bin/sh\necho no such limit >&2\nexit 1\n")
    (folder / "prlimit").chmod(0o755)
    operator = start(folder, path=f"{folder}:")
    said, _ = operator.communicate(timeout=TIMEOUT_S)
    assert operator.returncode == 1, said
    last = said[said.rindex("operator: ") :]
    assert last.startswith("operator: step 6 failed: prlimit ")
    assert "no such limit" in last
    (folder / "prlimit").unlink()
    nothing_is_left(folder)


@pytest.mark.soak
@pytest.mark.usefixtures("_programs")
def test_an_interrupt_leaves_nothing(folder: Path) -> None:
    operator = start(folder)
    assert operator.stdout is not None
    for line in operator.stdout:
        if line.startswith("5. "):
            break
    assert processes_that_name(folder)
    operator.send_signal(signal.SIGTERM)
    said, _ = operator.communicate(timeout=TIMEOUT_S)
    assert operator.returncode == 130, said
    assert "operator: interrupted in step 6" in said
    nothing_is_left(folder)


def test_an_option_that_it_does_not_have_is_refused() -> None:
    answer = subprocess.run([OPERATOR, "--all"], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stdout == "operator: no such option: --all (--quick, or none)\n"


def test_a_missing_program_is_named_with_its_package() -> None:
    tools = {"PATH": ""}
    bash = shutil.which("bash")
    assert bash is not None
    command: list[str | Path] = [bash, OPERATOR, "--quick"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=tools)
    assert answer.returncode == 1
    assert "install these packages: apt-get install" in answer.stdout
    assert answer.stdout.endswith("util-linux\n")


def test_a_raised_wheel_is_the_same_but_for_its_version(tmp_path: Path) -> None:
    wheel = tmp_path / "memd-0.1.9-cp311-cp311-linux_x86_64.whl"
    files = {
        "memd/__init__.py": '"""memd."""\n\n__version__ = "0.1.9"\n',
        "memd/cli.py": "pass\n",
        "memd-0.1.9.dist-info/METADATA": "Name: memd\nVersion: 0.1.9\nRequires-Dist: x\n",
        "memd-0.1.9.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    (tmp_path / "raised").mkdir()
    raised = raise_wheel(wheel, tmp_path / "raised")
    assert raised.name == "memd-0.1.10-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(raised) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    record = found.pop("memd-0.1.10.dist-info/RECORD")
    assert [line.split(",")[0] for line in record.splitlines()] == [
        *found,
        "memd-0.1.10.dist-info/RECORD",
    ]
    assert found == {
        name.replace("0.1.9", "0.1.10"): text.replace("0.1.9", "0.1.10")
        for name, text in files.items()
        if not name.endswith("RECORD")
    }


def test_the_makefile_runs_it() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\noperator:\n\ttests/e2e/operator.sh $(ARGS)\n" in text
    assert re.search(r"^# make operator ", text.partition("SHELL :=")[0], re.MULTILINE)
