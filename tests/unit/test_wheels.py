"""How wheels are built: deploy/wheels, and the settings that it shares with others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.wheels import check
from memd import __version__
from memd_native import _core

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "deploy" / "wheels"
BUILT = sorted((ROOT / "dist").glob("memd-*.whl"))
HERE = os.uname().machine
OTHER = next(machine for machine in check.MACHINES if machine != HERE)


def project() -> Any:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def wheel_of(
    folder: Path, module: bytes, *, tag: str, suffix: str, inner: str | None = None
) -> Path:
    """With the two entries that the check reads."""
    wheel = folder / f"memd-{__version__}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"memd_native/_core.{suffix}.so", module)
        archive.writestr(f"memd-{__version__}.dist-info/WHEEL", f"Tag: {inner or tag}\n")
    return wheel


@pytest.fixture(scope="module")
def installed() -> bytes:
    return Path(str(_core.__file__)).read_bytes()


def test_the_module_of_this_machine_is_refused_for_what_it_needs_and_exports(
    tmp_path: Path, installed: bytes
) -> None:
    """It was compiled for here: with libstdc++ beside it, and against this system's glibc."""
    tag = f"cp312-abi3-manylinux_2_28_{HERE}"
    found = list(check.faults(wheel_of(tmp_path, installed, tag=tag, suffix="abi3")))
    assert any("libstdc++.so.6" in fault for fault in found)
    assert any("glibc 2.28 does not have" in fault for fault in found)
    assert not any(check.ENTRY in fault and "does not export" in fault for fault in found)


def test_a_module_for_another_machine_is_refused(tmp_path: Path, installed: bytes) -> None:
    tag = f"cp311-cp311-manylinux_2_28_{OTHER}"
    suffix = f"cpython-311-{OTHER}-linux-gnu"
    found = list(check.faults(wheel_of(tmp_path, installed, tag=tag, suffix=suffix)))
    assert f"the module is for {check.MACHINES[HERE]}" in found


@pytest.mark.parametrize(
    ("tag", "suffix", "inner", "fault"),
    [
        ("cp312-abi3-linux_x86_64", "abi3", None, "the name is not that"),
        ("cp313-cp313-manylinux_2_28_x86_64", "abi3", None, "the name is not that"),
        ("cp312-abi3-manylinux_2_28_x86_64", "cpython-312-x86_64-linux-gnu", None, "its compiled"),
        ("cp311-cp311-manylinux_2_28_x86_64", "abi3", None, "its compiled"),
        (
            "cp312-abi3-manylinux_2_28_x86_64",
            "abi3",
            "cp312-abi3-manylinux_2_35_x86_64",
            "the tags in it",
        ),
    ],
)
def test_a_name_that_promises_something_else_is_refused(
    tmp_path: Path, installed: bytes, tag: str, suffix: str, inner: str | None, fault: str
) -> None:
    wheel = wheel_of(tmp_path, installed, tag=tag, suffix=suffix, inner=inner)
    assert next(check.faults(wheel)).startswith(fault)


def test_a_library_path_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "module.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(module)]
    source = 'extern "C" void PyInit__core() {} extern "C" void other() {}'
    subprocess.run([*command, "-Wl,-rpath,/opt/lib"], input=source, text=True, check=True)
    found = list(check.module_faults(module.read_bytes(), HERE))
    assert "it looks for libraries in /opt/lib" in found
    assert any("it exports 1 symbols beside PyInit__core: other" in fault for fault in found)


@pytest.mark.skipif(not BUILT, reason="dist/ has no wheels; `make wheels` builds them")
@pytest.mark.parametrize("wheel", BUILT, ids=lambda wheel: wheel.name)
def test_the_wheels_in_dist_are_what_their_names_promise(wheel: Path) -> None:
    assert list(check.faults(wheel)) == []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = project()["tool"]["scikit-build"]["wheel"]["packages"]
    for package, folder in packages.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder)}" in names
    assert not {name for name in names if name.startswith(("tests/", "deploy/", "native/"))}


def test_compiler_tag_and_check_mean_the_same_glibc() -> None:
    script = (WHEELS / "build.sh").read_text(encoding="utf-8")
    toolchain = (WHEELS / "zig.cmake").read_text(encoding="utf-8")
    major, minor = check.GLIBC_NEWEST
    assert set(re.findall(r"-target \S+?gnu\.([\d.]+)|\}\.(\d\.\d+)\)", toolchain)) == {
        ("", f"{major}.{minor}")
    }
    assert set(re.findall(r"manylinux_(\d+_\d+)", script)) == {f"{major}_{minor}"}


def test_what_judges_and_compiles_a_release_is_pinned() -> None:
    wheels = project()["project"]["optional-dependencies"]["wheels"]
    assert all("==" in requirement for requirement in wheels)
    assert {requirement.partition("==")[0] for requirement in wheels} >= {
        "abi3audit",
        "auditwheel",
        "ziglang",
    }


def test_the_stable_abi_begins_where_nanobind_has_all_of_it() -> None:
    assert project()["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    cmake = (ROOT / "native" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert re.search(r"nanobind_add_module\(_core .*\bSTABLE_ABI\b", cmake)
    assert "${SKBUILD_SABI_COMPONENT}" in cmake


def test_an_unknown_architecture_is_refused_in_a_sentence(tmp_path: Path) -> None:
    answer = subprocess.run(
        [WHEELS / "build.sh", "riscv64"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONS": sys.executable},
    )
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == (
        "memd wheels: no such architecture: riscv64 (x86_64, aarch64)"
    )


def test_an_interpreter_that_is_too_old_is_refused_in_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    answer = subprocess.run(
        [WHEELS / "build.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONS": str(old)},
    )
    assert answer.returncode == 1
    assert "no CPython 3.11 or later starts" in answer.stderr


@pytest.mark.parametrize(
    ("asked", "python", "is_kept"),
    [
        (["zig==1", "wheel==2"], sys.executable, True),
        (["zig==1", "wheel==3"], sys.executable, False),
        (["zig==1", "wheel==2"], "/bin/false", False),
    ],
    ids=["by another interpreter", "with other packages", "whose interpreter is gone"],
)
def test_tools_stay_as_they_are_for_another_interpreter(
    tmp_path: Path, asked: list[str], python: str, *, is_kept: bool
) -> None:
    """New ones would have new headers, and every object would be compiled again."""
    script = (WHEELS / "build.sh").read_text(encoding="utf-8")
    (function,) = re.findall(r"^ensure_tools\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(python)
    (tmp_path / "made").write_text("/where/it/was/python3 zig==1 wheel==2")
    program = "ensure_environment() { echo installs; }; pythons=(/usr/bin/python3)\n"
    answer = subprocess.run(
        ["bash", "-euc", f'tools={tmp_path}\n{program}{function}ensure_tools "$@"', "bash", *asked],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == ("" if is_kept else "installs\n")


@pytest.mark.parametrize("script", sorted(WHEELS.glob("*.sh")), ids=lambda path: path.name)
def test_bash_takes_the_script(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("target", ["wheels", "try-wheels"])
def test_the_makefile_runs_the_scripts(target: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        ["make", "--dry-run", target, "ARGS=aarch64"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    ).stdout
    script = {"wheels": "build.sh", "try-wheels": "try.sh"}[target]
    assert f"deploy/wheels/{script} aarch64" in plan
    help_text = (ROOT / "Makefile").read_text(encoding="utf-8").partition("SHELL :=")[0]
    assert f"# make {target} " in help_text
