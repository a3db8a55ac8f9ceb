"""Earlier versions of memd: what releases.toml says of them, and their build."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILDS = ROOT / "build" / "compat"
# The wheel's packages and where their sources lie, as in [tool.scikit-build.wheel.packages].
PACKAGES = {
    "memd": "memd",
    "memd_client": "client/memd_client",
    "memd_native": "native/python/memd_native",
    "memd_proto": "proto/memd_proto",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    name: str
    commit: str
    format: str
    protocol: int
    ledger: int


def releases() -> list[Release]:
    with (HERE / "releases.toml").open("rb") as file:
        return [Release(**entry) for entry in tomllib.load(file)["release"]]


def python_of(release: Release) -> Path:
    """An interpreter that imports this release, built on the first call. torch, gRPC and the rest
    are those of the running interpreter."""
    folder = BUILDS / release.commit[:12]
    python = folder / "venv" / "bin" / "python"
    if not (folder / "built").exists():
        _unpack(release, folder / "source")
        _build(folder)
        _make_environment(folder)
        (folder / "built").touch()
    return python


def _unpack(release: Release, source: Path) -> None:
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


def _build(folder: Path) -> None:
    build = folder / "build"
    command = ["cmake", "-S", str(folder / "source" / "native"), "-B", str(build), "-G", "Ninja"]
    command += ["-DCMAKE_BUILD_TYPE=Release", "-DMEMD_BINDING=ON", "-DMEMD_TESTS=OFF"]
    subprocess.run([*command, f"-DPython_EXECUTABLE={sys.executable}"], check=True)
    subprocess.run(["cmake", "--build", str(build), "-j", "2", "--target", "_core"], check=True)


def _make_environment(folder: Path) -> None:
    """A path in a .pth file is searched, and .pth files in there are not read: the editable install
    of today's version stays out."""
    venv = folder / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)], check=True
    )
    (site,) = venv.glob("lib/python*/site-packages")
    for package, source in PACKAGES.items():
        shutil.copytree(folder / "source" / source, site / package)
    (module,) = (folder / "build").glob("_core.*.so")
    shutil.copy(module, site / "memd_native")
    here = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "packages_of_today.pth").write_text("\n".join(here) + "\n")
