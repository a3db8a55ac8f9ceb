"""Compiles the simulation against the torch that is installed, once for each state of its sources.

One compiler run over all files: torch's headers take most of the time.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
FOLDER = Path(__file__).parents[2] / "build" / "device"
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def library() -> Path:
    """The shared library, built where there is none of these sources and this torch."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in {".cc", ".h"})
    key = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode())
    for path in sources:
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    built = FOLDER / f"simulation-{key.hexdigest()[:16]}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile([path for path in sources if path.suffix == ".cc"], built)
    return built


def _compile(sources: list[Path], built: Path) -> None:
    for old in FOLDER.glob("simulation-*"):
        old.unlink()
    torch_folder = Path(torch.__file__).parent
    partial = built.with_suffix(".partial")
    command = ["g++", *FLAGS, f"-I{SOURCES}"]
    command += ["-isystem", str(torch_folder / "include"), "-x", "c++", "-", "-o", str(partial)]
    command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    unit = "".join(f'#include "{path}"\n' for path in sources)
    subprocess.run(command, input=unit, text=True, check=True)
    partial.rename(built)
