"""Plants each bug of bugs.toml in a copy of the sources and sees whether its test fails.

Run: python -m tests.mutants.run [--only TEXT] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "build" / "mutants"
TEST_SECONDS_MAX = 300
COPIED = ("native", "tests/native")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    name: str
    file: str
    find: str
    replace: str
    program: str
    test: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    test: str
    verdict: str  # "caught", or why it was not
    seconds: float


def bugs() -> list[Bug]:
    with (Path(__file__).parent / "bugs.toml").open("rb") as file:
        return [Bug(**each) for each in tomllib.load(file)["bug"]]


def pattern_of(bug: Bug) -> re.Pattern[str]:
    """White space differs where a formatter broke the line elsewhere."""
    return re.compile(r"\s+".join(map(re.escape, bug.find.split())))


def place_of(bug: Bug, root: Path) -> Path:
    """The one file of this name whose text has the bug's pattern, once."""
    found = [path for path in (root / "native").rglob(bug.file) if path.is_file()]
    if len(found) != 1:
        raise LookupError(f"{bug.name}: {len(found)} files are called {bug.file}")
    count = len(pattern_of(bug).findall(found[0].read_text()))
    if count != 1:
        raise LookupError(
            f"{bug.name}: {bug.file} has its text {count} times, not once: {bug.find}"
        )
    return found[0]


def copy_sources() -> None:
    for folder in COPIED:
        # Equal files keep their times, so that only what changed is built again.
        for path in sorted((ROOT / folder).rglob("*")):
            copy = SCRATCH / "source" / path.relative_to(ROOT)
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif not copy.exists() or copy.read_bytes() != path.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        for copy in sorted((SCRATCH / "source" / folder).rglob("*"), reverse=True):
            if not (ROOT / copy.relative_to(SCRATCH / "source")).exists():
                shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def configure() -> None:
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    subprocess.run(
        [
            *("cmake", "-S", SCRATCH / "source" / "native", "-B", SCRATCH / "build", "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DMEMD_TESTS=ON"),
            *("-DMEMD_BINDING=OFF", *launcher),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def build(program: str) -> bool:
    command = ["ninja", "-C", str(SCRATCH / "build"), program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def fails(bug: Bug) -> str | None:
    """Why its test fails; nothing where it passes."""
    command = [str(SCRATCH / "build" / bug.program), f"--gtest_filter={bug.test}"]
    try:
        run = subprocess.run(
            command,
            cwd=SCRATCH / "build",
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if "Running 0 tests" in run.stdout:
        raise LookupError(f"{bug.name}: {bug.program} has no test {bug.test}")
    return None if run.returncode == 0 else "fails"


def plant(bug: Bug) -> str:
    path = place_of(bug, SCRATCH / "source")
    text = path.read_text()
    path.write_text(pattern_of(bug).sub(lambda _: bug.replace, text))
    try:
        if not build(bug.program):
            return "does not compile"
        return "caught" if fails(bug) else "MISSED"
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name or file has this text")
    parser.add_argument("--json", type=Path, help="where the table goes as well")
    arguments = parser.parse_args()
    chosen = [each for each in bugs() if arguments.only in f"{each.name} {each.file}"]
    copy_sources()
    configure()
    for bug in chosen:
        place_of(bug, SCRATCH / "source")
    outcomes = []
    for bug in chosen:
        started = time.monotonic()
        verdict = plant(bug)
        seconds = round(time.monotonic() - started, 1)
        outcomes.append(Outcome(name=bug.name, test=bug.test, verdict=verdict, seconds=seconds))
        sys.stdout.write(f"{verdict:>8}  {seconds:6.1f} s  {bug.name}  [{bug.test}]\n")
        sys.stdout.flush()
    # A test that fails without any bug catches nothing.
    broken = []
    for bug in {each.test: each for each in chosen}.values():
        if not build(bug.program) or fails(bug):
            broken.append(bug.test)
            sys.stdout.write(f"fails without a bug as well: {bug.test}\n")
    caught = sum(each.verdict == "caught" for each in outcomes)
    sys.stdout.write(f"{caught} of {len(outcomes)} caught\n")
    if arguments.json:
        table = {"bugs": [asdict(each) for each in outcomes], "broken_tests": broken}
        arguments.json.write_text(json.dumps(table, indent=2) + "\n")
    return 0 if caught == len(outcomes) and not broken else 1


if __name__ == "__main__":
    raise SystemExit(main())
