"""`make matrix`: what a cell is made of, and how it fails. The cells themselves take an hour."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scikit_build_core.cmake import CMake, CMaker

from tests.compat import matrix
from tests.compat.matrix import (
    CLIENT_TESTS,
    DAEMON_TESTS,
    LOWEST,
    NEWEST,
    PYTHONS,
    Cell,
    CellFailure,
    Outcome,
    Workshop,
    cells_of,
    faults,
    forget_interpreter,
    interpreters,
    last_error,
    last_line,
    lowest,
    requirements,
    table,
)

ROOT = Path(__file__).parents[2]
HERE = ".".join(map(str, sys.version_info[:2]))
CELL = Cell(version="3.11", python="/usr/bin/python3.11", packages=LOWEST)
VERSIONS = {"grpcio": "1.76.0", "protobuf": "6.31.1", "torch": "2.13.0+cpu"}


def outcome(*, has_passed: bool = True, torch: str = "2.13.0+cpu") -> Outcome:
    return Outcome(
        cell=CELL,
        has_passed=has_passed,
        result="7 passed in 1.00s" if has_passed else "ERROR: no space left",
        versions={**VERSIONS, "torch": torch},
    )


def test_the_lowest_packages_are_the_lower_bounds_of_pyproject() -> None:
    wanted = requirements("", *matrix.DAEMON_EXTRAS)
    names = {re.split(r"[^\w.-]", each)[0] for each in wanted}
    assert {"grpcio", "protobuf", "prometheus-client", "pyjwt"} <= names
    pinned = lowest(wanted)
    assert {"grpcio==1.76", "protobuf==6.31.1", "grpcio-status==1.76"} <= set(pinned)
    assert len(pinned) == len(wanted)
    assert [each for each in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+", each)] == []


def test_an_interpreter_has_a_cell_for_both_ends_of_the_ranges() -> None:
    cells = cells_of({"3.13": "/b", "3.11": "/a"})
    assert list(cells) == ["3.11-lowest", "3.11-newest", "3.13-lowest", "3.13-newest"]
    assert cells["3.13-newest"] == Cell(version="3.13", python="/b", packages=NEWEST)


def test_this_interpreter_is_found_and_one_that_does_not_start_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert HERE in interpreters()
    shim = tmp_path / "python3"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PYTHONS", f"{shim} /nowhere/python3 {sys.executable}")
    # A cell is made by the interpreter itself, whatever environment it was found in.
    assert interpreters() == {HERE: os.path.realpath(sys.executable)}
    monkeypatch.setenv("PYTHONS", str(shim))
    assert interpreters() == {}


def test_objects_stay_for_the_next_interpreter(tmp_path: Path) -> None:
    """As the build backend of another environment finds them."""
    source, build = tmp_path / "native", tmp_path / "build"
    source.mkdir()
    compiled = build / "CMakeFiles" / "memd_core.dir" / "hash.cc.o"

    def configure() -> None:
        CMaker(CMake.default_search(), source_dir=source, build_dir=build, build_type="Release")

    configure()
    note = build / ".skbuild-info.json"
    note.write_text(note.read_text().replace("scikit_build_core", "another_environment"))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    (build / "CMakeCache.txt").touch()
    forget_interpreter(build)
    assert not (build / "CMakeCache.txt").exists()
    configure()
    assert compiled.exists()
    script = (ROOT / "deploy" / "wheels" / "build.sh").read_text(encoding="utf-8")
    assert all(f'"$build/{name}"' in script for name in ("CMakeCache.txt", note.name))


def test_the_table_names_what_passed_what_failed_and_what_is_not_here() -> None:
    rows = table([outcome(), outcome(has_passed=False)], ["3.14"])
    cells = [[text.strip() for text in row.split("|")] for row in rows]
    assert cells[0] == ["interpreter", "grpcio", "protobuf", "torch", "packages", "result"]
    assert cells[2] == ["3.11", *VERSIONS.values(), LOWEST, "7 passed in 1.00s"]
    assert cells[3][-1] == "FAILED: ERROR: no space left"
    assert cells[4][0] == "3.14"
    assert cells[4][-1] == "not on this machine"


def test_a_run_fails_with_one_cell_of_it() -> None:
    assert faults([outcome()], is_whole=True) == []
    (said,) = faults([outcome(), outcome(has_passed=False)], is_whole=True)
    assert said == "failed: 3.11-lowest"
    assert "no interpreter is here" in faults([], is_whole=True)[0]


def test_a_whole_run_without_torch_has_not_tested_the_client() -> None:
    (said,) = faults([outcome(torch=matrix.NO_TORCH)], is_whole=True)
    assert said.startswith("no cell has tested the client: no build of torch 2.13.0 for CPUs")
    assert faults([outcome(torch=matrix.NO_TORCH)], is_whole=False) == []


def test_a_cell_that_cannot_be_installed_fails_with_the_last_line_of_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its environment is real. The first packages that it lacks are those of the build."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    cell = Cell(version=HERE, python=sys.executable, packages=LOWEST)
    made = Workshop(tmp_path / "matrix").outcome_of(cell)
    assert not made.has_passed
    assert made.result == "ERROR: No matching distribution found for scikit-build-core>=1.1"
    log = (tmp_path / "matrix" / f"{cell.name}.log").read_text()
    assert f"$ {tmp_path}/matrix/wheel-{HERE}/tools/bin/python -m pip " in log
    assert made.result in log


NO_BUILD = "ERROR: No matching distribution found for torch==2.13.0+cpu"
CONSTRAINED = (
    "ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting "
    "dependencies."
)
OTHER_PYTHON = "ERROR: torch-2.13.0-cp311.whl is not a supported wheel on this platform."
NO_ROOM = "ERROR: Could not install packages due to an OSError: No space left on device"


@pytest.mark.parametrize("said", [NO_BUILD, CONSTRAINED, OTHER_PYTHON, NO_ROOM, ""])
def test_a_cell_is_without_torch_only_if_pip_has_no_build_for_it(tmp_path: Path, said: str) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\necho '{said}'\n{'exit 1' if said else ''}\n")
    pip.chmod(0o755)
    workshop = Workshop(tmp_path)
    if said == NO_ROOM:
        with pytest.raises(CellFailure, match="No space left"):
            workshop._install_torch(pip)
    else:
        assert workshop._install_torch(pip) == (said == "")


def test_tests_that_fail_fail_their_cell_with_what_pytest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "test_program.py"
    workshop = Workshop(tmp_path)

    def tested(text: str) -> str:
        program.write_text(text)
        return workshop.run_tests(Path(sys.executable), [str(program)])

    assert tested("def test_one(): pass\n").startswith("1 passed in ")
    with pytest.raises(CellFailure, match=r"^1 failed, 1 passed in "):
        tested("def test_one(): pass\ndef test_two(): assert 0\n")
    with pytest.raises(CellFailure, match=r"^no test passed: 1 skipped in "):
        tested("import pytest\ndef test_one(): pytest.skip()\n")
    with pytest.raises(CellFailure, match="no tests ran"):
        tested("")


def test_hints_that_follow_an_error_of_pip_are_not_its_last_line() -> None:
    assert last_error("ERROR: one\nERROR: two\n\nhint: see above\n") == "ERROR: two"
    assert last_error(f"{CONSTRAINED}\nERROR: ResolutionImpossible: for help\n") == CONSTRAINED
    assert last_error("memd 0.1.0 requires rich, which is not installed.\n").startswith("memd 0")
    assert last_line("===== 3 failed in 2.00s =====\n") == "3 failed in 2.00s"
    assert last_line("\n") == "it said nothing"


@pytest.mark.parametrize("file", [*DAEMON_TESTS, *CLIENT_TESTS])
def test_a_test_of_the_daemon_needs_no_torch(file: str) -> None:
    """Interpreters without a build of torch run these alone."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert ({"torch", "memd_client"} & imported != set()) == (file in CLIENT_TESTS)


def test_the_versions_looked_for_begin_with_the_oldest_that_memd_supports() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={PYTHONS[0]}"' in pyproject
    setup = (ROOT / "deploy" / "setup" / "setup.sh").read_text(encoding="utf-8")
    assert " ".join(f"python{version}" for version in reversed(PYTHONS)) in setup


def test_a_cell_that_is_not_there_is_wrong_use_and_named() -> None:
    command = [sys.executable, "-m", "tests.compat.matrix", "--only", "2.7-lowest"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 2
    assert f"{HERE}-lowest" in answer.stderr


def test_the_makefile_runs_it_and_contributors_are_told_when() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\nmatrix:\n\t@$(SETUP) demo\n\t$(IN_VENV) python -m tests.compat.matrix $(ARGS)\n" in (
        makefile
    )
    assert re.search(r"^# make matrix ", makefile.partition("SHELL :=")[0], re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert "matrix" in phony.split()
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    release = contributing.partition("## Before a release\n")[2]
    assert release.lstrip().startswith("`make sanitize` and `make matrix` pass")
