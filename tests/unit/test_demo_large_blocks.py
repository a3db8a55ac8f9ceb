"""The demo returns the memory of gradients to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Frees blocks as large as gradients. A smaller one behind each keeps the heap from shrinking.
PROGRAM = """
import sys
from memd.demo.large_blocks import unmap_large_blocks
if sys.argv[1] == "unmapped":
    unmap_large_blocks()
import gc, re, torch

def resident_bytes():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) << 10

torch.ones(10)
before = resident_bytes()
torch.ones(31 << 18)  # freed at once: glibc raises its threshold to blocks of this size
large, small = [], []
for _ in range(4):
    large.append(torch.ones(10 << 18))
    small.append(torch.ones(1 << 18))
del large
gc.collect()
print(resident_bytes() - before)
"""


def kept_bytes(mode: str, **environ: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return int(ended.stdout)


def test_large_blocks_return_to_the_system_when_they_are_freed() -> None:
    assert kept_bytes("unmapped") < 12 << 20


def test_glibc_keeps_them_where_nobody_asks() -> None:
    """Else the test above could not fail."""
    if os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("this C library is not glibc")
    assert kept_bytes("kept") > 32 << 20


def test_a_setting_of_the_environment_stays() -> None:
    of_user = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    assert kept_bytes("unmapped", **of_user) > 32 << 20
