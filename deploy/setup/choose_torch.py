"""Prints the pip requirement of the torch build that suits this machine.

The CPU build (200 MB) where a package index offers it and there is no NVIDIA GPU; else the plain
one, which brings the CUDA libraries along: its size is said first, on standard error. Decided by
asking pip what it would install.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The version whose fused Adam kernels the numerics tests compare with, bit for bit.
TORCH_VERSION = "2.13.0"


def has_nvidia_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def resolve(requirement: str, *options: str) -> list[dict[str, Any]] | None:
    """What pip would install for `requirement`, or None where it finds nothing that fits."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--report", "-", *options, requirement]
    if index := os.environ.get("TORCH_INDEX"):
        command += ["--extra-index-url", index]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return list(json.loads(answer.stdout)["install"])
    if "No matching distribution found" in answer.stderr:
        return None
    sys.exit(f"pip could not look up {requirement}:\n{answer.stderr}")


def download_bytes(package: dict[str, Any]) -> int:
    """The size of one package's file; 0 where its server does not say."""
    url = package["download_info"]["url"]
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as head:
            return int(head.headers.get("Content-Length", 0))
    except OSError:
        return 0


def main() -> None:
    cpu, any_build = f"torch=={TORCH_VERSION}+cpu", f"torch=={TORCH_VERSION}"
    preferred = f"{any_build},!={TORCH_VERSION}+cpu" if has_nvidia_gpu() else cpu
    if preferred == cpu and resolve(cpu, "--no-deps") is not None:
        print(cpu)
        return
    for requirement in (preferred, any_build):
        packages = resolve(requirement)
        if packages is None:
            continue
        with ThreadPoolExecutor(8) as pool:
            total_bytes = sum(pool.map(download_bytes, packages))
        print(
            f"memd set-up: {requirement} means {len(packages)} packages, "
            f"{total_bytes / 1e9:.1f} GB to download and about twice that on disk. Choose another "
            "with TORCH=<requirement or wheel> or TORCH_INDEX=<address of an index of CPU builds>.",
            file=sys.stderr,
        )
        print(requirement)
        return
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.exit(
        f"memd set-up: no package index offers torch {TORCH_VERSION} for Python {python}; "
        "name a build: TORCH=<requirement or wheel>"
    )


if __name__ == "__main__":
    main()
