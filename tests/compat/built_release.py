"""A release's own wheel, Debian package and environment: made of its commit by its own scripts,
once, below build/compat. No package of this checkout's environment has a part in them."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from tests.compat.releases import ROOT, SCRIPTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.compat.releases import Release

BUILDS = ROOT / "build" / "compat"
SHOWN = ("grpcio", "protobuf", "torch")
WHEEL = "memd-*-cp311-cp311-*" if sys.version_info < (3, 12) else "memd-*-abi3-*"


def source_of(release: Release) -> Path:
    folder = BUILDS / release.commit[:12]
    source, mark = folder / "source", folder / "unpacked"
    if not mark.exists():
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", release.commit], capture_output=True, check=False, cwd=ROOT
        )
        if archive.returncode != 0:
            sys.exit(
                f"release {release.name} is not in this checkout; fetch its history (git fetch "
                f"--unshallow): {archive.stderr.decode().strip()}"
            )
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
        mark.touch()
    return source


def wheel_of(release: Release) -> Path:
    """For this machine and the running interpreter."""
    dist = source_of(release) / "dist"
    if not (found := _wheels_in(dist)):
        if "wheel" in release.builds:
            _share_tools(release)
            environ = {"PYTHONS": os.path.realpath(sys.executable)}
            _script(release, "wheel", platform.machine(), **environ)
        else:
            _compile_with_the_systems(release)
        found = _wheels_in(dist)
    (wheel,) = found
    return wheel


def _wheels_in(dist: Path) -> list[Path]:
    return list(dist.glob(f"{WHEEL}_{platform.machine()}.whl"))


def package_of(release: Release) -> Path:
    """The package of revision 1, for this machine's Debian."""
    wheel_of(release)
    dist = source_of(release) / "dist"
    if not (found := list(dist.glob("memd_*-1_*.deb"))):
        _script(release, "package", REVISION="1")
        found = list(dist.glob("memd_*-1_*.deb"))
    (package,) = found
    return package


def how_built(release: Release) -> str:
    return SCRIPTS["wheel"] if "wheel" in release.builds else "pip wheel, this machine's compiler"


def pins_of(release: Release) -> list[str]:
    """The versions that it locks, "name==version"; none before it had a package."""
    lock = source_of(release) / "deploy" / "debian" / "requirements.txt"
    if not lock.exists():
        return []
    return re.findall(r"^[a-z0-9-]+==[^\s;\\]+", lock.read_text(encoding="utf-8"), re.MULTILINE)


def python_of(release: Release) -> Path:
    """The interpreter of an environment that pip made for its wheel."""
    environment = BUILDS / release.commit[:12] / "environment"
    python, mark = environment / "bin" / "python", environment / "installed"
    if not mark.exists():
        wheel = wheel_of(release)
        pins = environment.with_name("constraints.txt")
        pins.write_text("".join(f"{each}\n" for each in pins_of(release)), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        index = os.environ.get("TORCH_INDEX")
        extra = ("--extra-index-url", index) if index else ()
        pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        wanted = (f"{wheel}[client,server]", torch_of(release, python))
        subprocess.run([*pip, "--constraint", str(pins), *extra, *wanted], check=True)
        mark.touch()
    return python


def packages_of(release: Release) -> dict[str, str]:
    """Versions of the packages that its interpreter imports beside memd."""
    program = (
        "import json; from importlib.metadata import version; import grpc, google.protobuf, torch; "
        f"print(json.dumps({{name: version(name) for name in {SHOWN}}}))"
    )
    command = [str(python_of(release)), "-I", "-c", program]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def torch_of(release: Release, python: Path) -> str:
    """The requirement that its own set-up would choose here."""
    if chosen := os.environ.get("TORCH"):
        return chosen
    program = source_of(release) / "deploy" / "setup" / "choose_torch.py"
    answer = subprocess.run([str(python), str(program)], stdout=subprocess.PIPE, check=True)
    return answer.stdout.decode().strip()


def _script(release: Release, what: str, *arguments: str, **environ: str) -> None:
    source = source_of(release)
    if what not in release.builds:
        sys.exit(f"release {release.name} builds no {what}: it has no {SCRIPTS[what]}")
    command = [str(source / SCRIPTS[what]), *arguments]
    _run(release, command, {**os.environ, **environ})


def _compile_with_the_systems(release: Release) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    command = [*pip, "--no-deps", "--wheel-dir", "dist", "."]
    _run(release, command, {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2"})


def _run(release: Release, command: list[str], environ: dict[str, str]) -> None:
    done = subprocess.run(command, check=False, cwd=source_of(release), env=environ)
    if done.returncode != 0:
        sys.exit(f"release {release.name}: {command[0]} ended with {done.returncode}, see above")


def _share_tools(release: Release) -> None:
    """zig and what it has compiled before, which is kept by content, where the release asks for the
    same tools; otherwise it installs its own."""
    source, here = source_of(release), ROOT / "build" / "wheels"
    if _tools_asked_for(source) != _tools_asked_for(ROOT) or not (here / "tools" / "made").exists():
        return
    there = source / "build" / "wheels"
    there.mkdir(parents=True, exist_ok=True)
    for name in ("tools", "zig"):
        if not (there / name).exists():
            (there / name).symlink_to(here / name)


def _tools_asked_for(checkout: Path) -> list[str]:
    project: dict[str, Any] = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    asked: list[str] = project["optional-dependencies"]["wheels"]
    return asked
