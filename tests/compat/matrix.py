"""Tests with other interpreters and packages than those of .venv.

A cell is an interpreter with the oldest or the newest packages that pyproject.toml admits, in an
environment of its own below build/matrix, beside a wheel of this checkout. It runs the tests that
meet these packages: gRPC, protobuf, prometheus-client and torch. torch is the version that the
numerics are compared with, as a build for CPUs; without one for an interpreter, its cells test the
daemon alone, and the table says so.

Run: python -m tests.compat.matrix [--only CELL…]; PYTHONS names other interpreters. What a cell did
is in build/matrix/CELL.log.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.setup.choose_torch import TORCH_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "build" / "matrix"
# deploy/setup/setup.sh looks for the same.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOWEST, NEWEST = "lowest", "newest"
# Lists of pyproject.toml that a cell installs: the daemon's, and with torch the client's.
DAEMON_EXTRAS = ("server", "token")
CLIENT_EXTRAS = ("client",)
# Programs of the tests, with the bounds that the extra `test` has for them.
TEST_PACKAGES = ("pytest", "pytest-timeout")
SHOWN = ("grpcio", "protobuf", "torch")
NO_TORCH = "none"

# A real gRPC server around a fake store answers each call, with tokens, health, reflection and rich
# errors; Prometheus's parser reads the metrics; click and rich make the command line; and a real
# daemon starts, serves and ends.
DAEMON_TESTS = (
    "tests/unit/test_attach.py",
    "tests/unit/test_cli.py",
    "tests/unit/test_metrics.py",
    "tests/unit/test_page.py",
    "tests/unit/test_rank_calls.py",
    "tests/unit/test_service.py",
    "tests/unit/test_tenants.py",
    "tests/unit/test_top.py",
    "tests/integration/test_daemon_life.py",
    "tests/integration/test_daemon_start.py",
)
# The client's channels and retries, messages that earlier releases recorded, tensors that cross
# gRPC and shared memory, and training on a real daemon.
CLIENT_TESTS = (
    "tests/unit/test_client_offload.py",
    "tests/unit/test_control.py",
    "tests/unit/test_negotiation.py",
    "tests/unit/test_reattach.py",
    "tests/unit/test_steps.py",
    "tests/integration/test_client_sessions.py",
    "tests/integration/test_daemon_service.py",
    "tests/integration/test_handshakes.py",
    "tests/integration/test_put_get.py",
)


# pip has no build of torch for an interpreter; the second where its settings have constraints.
_NO_BUILD = re.compile(
    "No matching distribution found for torch|Cannot install torch==|is not a supported wheel"
)


class CellFailure(Exception):
    """A cell that could not be made, or whose tests fail: a line for the table."""

    def __init__(self, line: str, said: str = "") -> None:
        super().__init__(line)
        self.said = said


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    version: str
    python: str
    packages: str

    @property
    def name(self) -> str:
        return f"{self.version}-{self.packages}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    cell: Cell
    has_passed: bool
    result: str
    versions: Mapping[str, str] = field(default_factory=dict)


# Interpreters


def interpreters() -> dict[str, str]:
    """Paths by version. A pyenv shim answers to every name and fails when called, so each candidate
    is run."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = os.environ.get("PYTHONS", "").split() or [
        *(f"python{version}" for version in PYTHONS),
        *(str(path) for path in sorted(pyenv.glob("versions/3.*/bin/python3"))),
    ]
    found: dict[str, str] = {}
    for candidate in candidates:
        version, _, path = _described(candidate).partition(" ")
        if version in PYTHONS:
            found.setdefault(version, path)
    return found


def _described(candidate: str) -> str:
    """The interpreter itself, where the candidate is one of an environment."""
    program = (
        "import os, sys; v = sys.version_info; "
        "print(f'{v[0]}.{v[1]} {os.path.realpath(sys.executable)}') "
        "if sys.implementation.name == 'cpython' else None"
    )
    if (path := shutil.which(candidate)) is None:
        return ""
    said = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
    return said.stdout.strip() if said.returncode == 0 else ""


# Requirements


def requirements(*names: str) -> list[str]:
    """The lists with these names in pyproject.toml; "" is what memd always needs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return [each for name in names for each in lists[name] if not each.startswith("memd[")]


def build_requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["build-system"]["requires"])


def lowest(wanted: Iterable[str]) -> list[str]:
    """The same requirements at their lower bounds."""
    return [re.sub(r"^([\w.-]+).*?>=\s*([\w.]+).*$", r"\1==\2", each) for each in wanted]


def requirements_of_tests() -> list[str]:
    names = {re.split(r"[^\w.-]", each)[0]: each for each in requirements("test")}
    return [names[name] for name in TEST_PACKAGES]


# One cell


class Workshop:
    """Makes the environments below `folder` and runs tests in them, one cell at a time. They are
    kept, so that a second run installs only what has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wheels: dict[str, Path] = {}
        self._log = folder / "matrix.log"

    def outcome_of(self, cell: Cell) -> Outcome:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = self._folder / f"{cell.name}.log"
        self._log.write_text("")
        versions: dict[str, str] = {}
        try:
            wheel = self._wheel(cell)
            python = self._environment(self._folder / cell.name, cell.python)
            has_torch = self._install_torch(python)
            self._install(cell, python, wheel, has_torch=has_torch)
            versions = self._versions(python)
            result = self.run_tests(python, [*DAEMON_TESTS, *(CLIENT_TESTS if has_torch else ())])
        except CellFailure as failure:
            return Outcome(cell=cell, has_passed=False, result=str(failure), versions=versions)
        scope = "" if has_torch else ", of the daemon alone"
        return Outcome(cell=cell, has_passed=True, result=f"{result}{scope}", versions=versions)

    def _wheel(self, cell: Cell) -> Path:
        """Compiled once for each interpreter. Objects that no interpreter has a part in stay."""
        if cell.version not in self._wheels:
            folder, native = self._folder / f"wheel-{cell.version}", self._folder / "native"
            python = self._environment(folder / "tools", cell.python)
            self._pip(python, "install", "--upgrade", *build_requirements())
            shutil.rmtree(folder / "wheel", ignore_errors=True)
            forget_interpreter(native)
            options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheel")]
            options += ["--config-settings", f"build-dir={native}"]
            jobs = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
            self._pip(python, "wheel", *options, str(ROOT), environ=jobs)
            (self._wheels[cell.version],) = (folder / "wheel").glob("memd-*.whl")
        return self._wheels[cell.version]

    def _environment(self, folder: Path, python: str) -> Path:
        """Made anew where it is another interpreter's, or was not finished."""
        made, inside = folder / "made", folder / "bin" / "python"
        if not made.exists() or made.read_text() != python:
            done = self._run(python, "-m", "venv", "--clear", str(folder))
            if done.returncode != 0:
                raise CellFailure(last_line(done.stdout))
            made.write_text(python)
        return inside

    def _install_torch(self, python: Path) -> bool:
        """False if no build for CPUs is offered. The other builds bring gigabytes of libraries."""
        wanted = os.environ.get("TORCH") or f"torch=={TORCH_VERSION}+cpu"
        index = os.environ.get("TORCH_INDEX")
        options = ["--extra-index-url", index] if index else []
        try:
            # Without its dependencies nothing but its own absence can be in the way.
            self._pip(python, "install", "--no-deps", *options, wanted)
        except CellFailure as failure:
            if not _NO_BUILD.search(failure.said):
                raise
            return False
        return True

    def _install(self, cell: Cell, python: Path, wheel: Path, *, has_torch: bool) -> None:
        """Bounds of the daemon's packages are what a cell tries; torch stays as it is."""
        wanted = requirements("", *DAEMON_EXTRAS)
        constraints = lowest(wanted) if cell.packages == LOWEST else []
        if has_torch:
            wanted += requirements(*CLIENT_EXTRAS)
            constraints.append(f"torch=={self._versions(python)['torch']}")
        file = self._folder / f"{cell.name}.constraints.txt"
        file.write_text("".join(f"{each}\n" for each in constraints))
        eagerly = ("--upgrade", "--upgrade-strategy", "eager", "--constraint", str(file))
        self._pip(python, "install", *eagerly, *wanted, *requirements_of_tests())
        self._pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))
        self._pip(python, "check")

    def _versions(self, python: Path) -> dict[str, str]:
        program = (
            "import sys; from importlib.metadata import PackageNotFoundError, version\n"
            "for name in sys.argv[1:]:\n"
            "    try: print(name, version(name))\n"
            "    except PackageNotFoundError: pass\n"
        )
        lines = self._run(str(python), "-c", program, *SHOWN).stdout.splitlines()
        found = dict(line.split() for line in lines)
        return {name: found.get(name, NO_TORCH) for name in SHOWN}

    def run_tests(self, python: Path, files: Sequence[str]) -> str:
        """pytest's last line."""
        options = ("-q", "-m", "not more and not soak", "-p", "no:cacheprovider")
        # Tests look for programs of their own environment.
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        done = self._run(
            *(str(python), "-m", "pytest", *options, *files),
            environ={"PATH": path, "OMP_WAIT_POLICY": "passive"},
        )
        last = last_line(done.stdout)
        if done.returncode != 0:
            raise CellFailure(last)
        if not re.search(r"\d+ passed", last):
            raise CellFailure(f"no test passed: {last}")
        return last

    def _pip(self, python: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        quiet = () if arguments == ("check",) else ("--quiet",)
        pip = (str(python), "-m", "pip", "--disable-pip-version-check", arguments[0], *quiet)
        done = self._run(*pip, *arguments[1:], environ=environ)
        if done.returncode != 0:
            raise CellFailure(last_error(done.stdout), done.stdout)

    def _run(
        self, *command: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        outside = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MEMD_", "MAKE", "PYTHON", "VIRTUAL_ENV"))
        }
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
            env={**outside, **(environ or {})},
        )
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        return done


def forget_interpreter(build: Path) -> None:
    """CMake's cache names the one that was found, and scikit-build-core deletes all objects for an
    environment other than the one in its note."""
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (build / name).unlink(missing_ok=True)


def last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "it said nothing"


def last_error(said: str) -> str:
    """pip's last line, without hints that may follow an error."""
    errors = [line for line in said.splitlines() if re.match("ERROR: (?!ResolutionImpos)", line)]
    return errors[-1] if errors else last_line(said)


# The table


def table(outcomes: Sequence[Outcome], missing: Sequence[str]) -> list[str]:
    header = ("interpreter", *SHOWN, "packages", "result")
    rows = [
        (
            outcome.cell.version,
            *(outcome.versions.get(name, "-") for name in SHOWN),
            outcome.cell.packages,
            outcome.result if outcome.has_passed else f"FAILED: {outcome.result}",
        )
        for outcome in outcomes
    ]
    rows += [(version, *("-" for _ in SHOWN), "-", "not on this machine") for version in missing]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return [lines[0], "-|-".join("-" * width for width in widths), *lines[1:]]


def cells_of(found: Mapping[str, str]) -> dict[str, Cell]:
    made = [
        Cell(version=version, python=found[version], packages=packages)
        for version in PYTHONS
        if version in found
        for packages in (LOWEST, NEWEST)
    ]
    return {cell.name: cell for cell in made}


def faults(outcomes: Sequence[Outcome], *, is_whole: bool) -> list[str]:
    """Why the run has failed, beside cells that say so themselves."""
    failed = [outcome.cell.name for outcome in outcomes if not outcome.has_passed]
    said = [f"failed: {', '.join(failed)}"] if failed else []
    if not outcomes:
        said.append("no interpreter is here; name some: PYTHONS=/path/to/python3")
    elif is_whole and all(each.versions.get("torch", NO_TORCH) == NO_TORCH for each in outcomes):
        said.append(
            f"no cell has tested the client: no build of torch {TORCH_VERSION} for CPUs is "
            "offered; name one: TORCH=<requirement or wheel> or TORCH_INDEX=<address of an index>"
        )
    return said


def main() -> int:
    found = interpreters()
    cells = cells_of(found)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=cells, metavar="CELL", default=list(cells))
    chosen = parser.parse_args().only
    workshop = Workshop(MATRIX)
    outcomes = []
    for name in chosen:
        print(f"matrix: {name} with {cells[name].python}", flush=True)
        outcomes.append(workshop.outcome_of(cells[name]))
        print(f"matrix: {name}: {outcomes[-1].result}", flush=True)
    missing = [version for version in PYTHONS if version not in found]
    print(*table(outcomes, missing), sep="\n")
    wrong = faults(outcomes, is_whole=set(chosen) == set(cells))
    print(*(f"matrix: {line}" for line in wrong), sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
