"""Plants each bug of bugs.toml in a copy of the sources and sees whether its test fails.

A bug is caught if its test passes without it, and fails with it. What does not build, and a test
that did not run, is not caught. A run that was interrupted continues with the bugs that have no
outcome for these sources yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import memd_native._core

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "build" / "mutants"
SOURCE = SCRATCH / "source"
NATIVE_BUILD = SCRATCH / "build"
OUTCOMES = SCRATCH / "outcomes.json"
# What bugs are planted in, and what the tests of that need.
PLANTED = ("native", "client", "memd")
COPIED = (*PLANTED, "proto", "tests", "deploy")
PYTHON_PATH = (".", "client", "native/python", "proto", "tests/bench")
# A test may take this long with a bug, beside three times what its program's take without.
TEST_SECONDS_MIN = 60.0
CLEAN_SECONDS_MAX = 300.0
# The editable installation finds modules before PYTHONPATH does.
SITE_CUSTOMIZE = """
import sys

sys.meta_path[:] = [
    each for each in sys.meta_path if type(each).__name__ != "ScikitBuildRedirectingFinder"
]
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    name: str
    file: str
    find: str
    replace: str
    program: str
    test: str

    @property
    def is_native(self) -> bool:
        """The program is one of tests/native, or a file of pytest."""
        return not self.program.endswith(".py")

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    file: str
    program: str
    test: str
    verdict: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        return self.verdict in ("caught", "caught: hangs")


class DoesNotRunError(Exception):
    """The program did not come to the test: its outcome says nothing."""


def bugs() -> list[Bug]:
    with (Path(__file__).parent / "bugs.toml").open("rb") as file:
        return [Bug(**each) for each in tomllib.load(file)["bug"]]


def pattern_of(bug: Bug) -> re.Pattern[str]:
    """White space differs where a formatter broke the line elsewhere."""
    return re.compile(r"\s+".join(map(re.escape, bug.find.split())))


def paths_of(bug: Bug, root: Path) -> list[Path]:
    """The files whose paths end with the bug's."""
    return [
        path
        for folder in PLANTED
        for path in (root / folder).rglob(Path(bug.file).name)
        if f"/{path.relative_to(root)}".endswith(f"/{bug.file}")
    ]


def place_of(bug: Bug, root: Path) -> Path:
    """The one of these files, whose text has the bug's pattern once."""
    found = paths_of(bug, root)
    if len(found) != 1:
        raise LookupError(f"{bug.name}: {len(found)} files are called {bug.file}")
    count = len(pattern_of(bug).findall(found[0].read_text()))
    if count != 1:
        raise LookupError(
            f"{bug.name}: {bug.file} has its text {count} times, not once: {bug.find}"
        )
    return found[0]


def planted_in(text: str, bug: Bug) -> str:
    # The pattern begins and ends without white space, and so does what replaces it.
    return pattern_of(bug).sub(lambda _: bug.replace.strip(), text)


def source_of_test(bug: Bug) -> Path:
    """The file of its native test program."""
    found = list((ROOT / "tests" / "native").rglob(f"{bug.program}.cc"))
    if len(found) != 1:
        raise LookupError(f"{bug.name}: {len(found)} test programs are called {bug.program}")
    return found[0]


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and "out" not in path.parts


def copy_sources() -> str:
    """Returns a digest of all that was copied."""
    digest = hashlib.sha256()
    wanted = {ROOT / "pyproject.toml"}
    for folder in COPIED:
        wanted.update(filter(_is_source, (ROOT / folder).rglob("*")))
    copies = {SOURCE / path.relative_to(ROOT): path.read_bytes() for path in sorted(wanted)}
    # The compiled module lies beside its package, as in a wheel.
    compiled = Path(memd_native._core.__file__)
    copies[SOURCE / "native" / "python" / "memd_native" / compiled.name] = compiled.read_bytes()
    copies[SOURCE / "sitecustomize.py"] = SITE_CUSTOMIZE.encode()
    for copy, data in copies.items():
        digest.update(str(copy.relative_to(SOURCE)).encode() + b"\0" + data)
        # Equal files keep their times, so that only what changed is built again.
        if not copy.exists() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
    for copy in sorted(SOURCE.rglob("*")):
        if copy.is_file() and copy not in copies and "build" not in copy.relative_to(SOURCE).parts:
            copy.unlink()
    return digest.hexdigest()[:16]


def _run_test(
    command: list[str], folder: Path, timeout_s: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`environment` comes on top of this process's. The output is kept in test.log as well.

    Raises:
        TimeoutExpired: it did not end within `timeout_s`.
    """
    run = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    (SCRATCH / "test.log").write_text(run.stdout)
    return run


class NativeTests:
    """Programs of tests/native."""

    def __init__(self) -> None:
        self._is_configured = False

    def build(self, bug: Bug) -> bool:
        if not self._is_configured:
            self._configure()
            self._is_configured = True
        command = ["ninja", "-C", str(NATIVE_BUILD), bug.program]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        (SCRATCH / "build.log").write_text(run.stdout)
        return run.returncode == 0

    def fails(self, bug: Bug, tests: Iterable[str], timeout_s: float) -> str | None:
        # The second and third are those of a TEST_P.
        names = ":".join(f"{test}:{test}/*:*/{test}/*" for test in tests)
        command = [str(NATIVE_BUILD / bug.program), f"--gtest_filter={names}"]
        run = _run_test(command, NATIVE_BUILD, timeout_s)
        if "[ RUN      ]" not in run.stdout:
            raise DoesNotRunError(f"{bug.program}: exit {run.returncode}")
        return None if run.returncode == 0 else run.stdout

    def _configure(self) -> None:
        launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        subprocess.run(
            [
                *("cmake", "-S", SOURCE / "native", "-B", NATIVE_BUILD, "-G", "Ninja"),
                *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DMEMD_TESTS=ON"),
                *("-DMEMD_BINDING=OFF", "-DMEMD_FAULTS=ON", "-DMEMD_UNITY=OFF", *launcher),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )


class PythonTests:
    """Tests that pytest runs in the copy."""

    def build(self, bug: Bug) -> bool:
        """Whether every module that the bug may be planted in still compiles."""
        for path in paths_of(bug, SOURCE):
            try:
                compile(path.read_text(), str(path), "exec")
            except SyntaxError:
                return False
        return True

    def fails(self, bug: Bug, tests: Iterable[str], timeout_s: float) -> str | None:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [f"{bug.program}::{test}" for test in tests]
        environment = {
            "PYTHONPATH": os.pathsep.join(str(SOURCE / each) for each in PYTHON_PATH),
            # Times of a second are too coarse for what is planted and restored within one.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        run = _run_test(command, SOURCE, timeout_s, environment)
        # At its exit an interpreter may write below pytest's own last line.
        lines = run.stdout.splitlines()
        ends = [
            line
            for line in lines
            if re.fullmatch(r".*\b[0-9]+ (failed|passed|errors?)\b.* in .*", line)
        ]
        last = ends[-1] if ends else "".join(lines[-1:])
        # An error is a fixture's, before or after a test: what can't be collected exits with 2.
        if run.returncode == 1 and re.search(r"\b[0-9]+ (failed|errors?)\b", last):
            return run.stdout
        if run.returncode == 0 and re.search(r"\b[0-9]+ passed\b", last):
            return None
        raise DoesNotRunError(f"{bug.program}: exit {run.returncode}, {last}")


class Runner:
    def __init__(self, chosen: list[Bug]) -> None:
        self._native = NativeTests()
        self._python = PythonTests()
        self._tests_of: dict[str, list[str]] = {}
        for bug in chosen:
            tests = self._tests_of.setdefault(bug.program, [])
            if bug.test not in tests:
                tests.append(bug.test)
        # Seconds of each test without a bug; or why it can't tell anything.
        self._clean: dict[tuple[str, str], float | str] = {}

    def outcome(self, bug: Bug) -> Outcome:
        began = time.monotonic()
        verdict = self._verdict(bug)
        return Outcome(
            name=bug.name,
            file=str(place_of(bug, SOURCE).relative_to(SOURCE)),
            program=bug.program,
            test=bug.test,
            verdict=verdict,
            seconds=round(time.monotonic() - began, 1),
        )

    def _verdict(self, bug: Bug) -> str:
        clean = self._without_bug(bug)
        if isinstance(clean, str):
            return clean
        path = place_of(bug, SOURCE)
        text = path.read_text()
        path.write_text(planted_in(text, bug))
        try:
            programs = self._programs(bug)
            if not programs.build(bug):
                return "does not build"
            try:
                failed = programs.fails(bug, [bug.test], TEST_SECONDS_MIN + 3 * clean)
            except subprocess.TimeoutExpired:
                return "caught: hangs"
            except DoesNotRunError as error:
                return f"does not run: {error}"
            return "MISSED" if failed is None else "caught"
        finally:
            path.write_text(text)

    def _without_bug(self, bug: Bug) -> float | str:
        if (bug.program, bug.test) not in self._clean:
            # All tests of the program at once; where one fails, each by itself.
            tests = self._tests_of[bug.program]
            together = self._run_clean(bug, tests)
            for test in tests:
                alone = self._run_clean(bug, [test]) if isinstance(together, str) else together
                self._clean[bug.program, test] = alone
        return self._clean[bug.program, bug.test]

    def _run_clean(self, bug: Bug, tests: list[str]) -> float | str:
        programs = self._programs(bug)
        if not programs.build(bug):
            return "does not build without the bug"
        began = time.monotonic()
        try:
            failed = programs.fails(bug, tests, CLEAN_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return "hangs without the bug"
        except DoesNotRunError as error:
            return f"does not run: {error}"
        return "fails without the bug" if failed is not None else time.monotonic() - began

    def _programs(self, bug: Bug) -> NativeTests | PythonTests:
        return self._native if bug.is_native else self._python


def _read_outcomes(digest: str) -> dict[str, Outcome]:
    """Those of these very sources, by the key of the bug."""
    if not OUTCOMES.exists():
        return {}
    kept = json.loads(OUTCOMES.read_text())
    if kept["sources"] != digest:
        return {}
    return {key: Outcome(**each) for key, each in kept["outcomes"].items()}


def _write_outcomes(digest: str, outcomes: dict[str, Outcome]) -> None:
    table = {key: asdict(each) for key, each in outcomes.items()}
    OUTCOMES.write_text(json.dumps({"sources": digest, "outcomes": table}, indent=2) + "\n")


def table_of(outcomes: list[Outcome]) -> str:
    """In Markdown."""
    lines = ["| bug | file | caught by | verdict | s |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.name} | `{each.file}` | `{each.program}`: `{each.test}` | {each.verdict} "
        f"| {each.seconds:.0f} |"
        for each in outcomes
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name, file or test has this text")
    parser.add_argument("--again", action="store_true", help="plant those with an outcome as well")
    parser.add_argument("--list", action="store_true", help="what there is, and nothing else")
    parser.add_argument("--json", type=Path, help="where the table goes as well")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in bugs()
        if arguments.only in f"{each.name} {each.file} {each.program} {each.test}"
    ]
    # The bugs of one program follow each other, so that it is built once without any.
    chosen.sort(key=lambda each: (each.program, each.file))
    if arguments.list:
        for bug in chosen:
            sys.stdout.write(f"{bug.file:24} {bug.name}  [{bug.program}: {bug.test}]\n")
        sys.stdout.write(f"{len(chosen)} bugs\n")
        return 0
    digest = copy_sources()
    for bug in chosen:
        place_of(bug, SOURCE)
    kept = _read_outcomes(digest)
    runner = Runner(chosen)
    outcomes = []
    for index, bug in enumerate(chosen, 1):
        found = None if arguments.again else kept.get(bug.key)
        before = " (before)" if found is not None else ""
        if found is None:
            found = kept[bug.key] = runner.outcome(bug)
            _write_outcomes(digest, kept)
        outcomes.append(found)
        sys.stdout.write(
            f"[{index}/{len(chosen)}] {found.verdict:>8} {found.seconds:6.1f} s  {found.file}: "
            f"{found.name}  [{found.test}]{before}\n"
        )
        sys.stdout.flush()
    caught = sum(each.is_caught for each in outcomes)
    sys.stdout.write(f"\n{table_of(outcomes)}\n{caught} of {len(outcomes)} caught\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
