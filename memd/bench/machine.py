"""The machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from memd import __version__
from memd_native import isa_names


def describe_machine() -> dict[str, Any]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "memd": __version__,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "instructions": isa_names()[-1],
        # The load of the minute before: a busy machine shows here.
        "load": os.getloadavg()[0],
    }


def file_system(folder: Path) -> str:
    """The file system that `folder` lies on, such as "ext4"."""
    folder = folder.resolve()
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        mount = Path(fields[1].encode().decode("unicode_escape"))
        if folder.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, fields[2]
    return kind
