"""Large blocks of a process's memory, which gradients are."""

import ctypes
import os

# docs/decisions/freed-memory.md has what they cost. In the environment they act on any program.
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
}
_GLIBC_NUMBERS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}


def unmap_large_blocks() -> None:
    """From here on, a large block returns to the system when it is freed.

    Call it before torch is imported: what the import leaves in the heap counts, and torch reads its
    setting once. A setting of the environment stays. Other C libraries return such blocks anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, value in SETTINGS.items():
        if name in os.environ:
            continue
        os.environ[name] = value  # also for what this process starts
        if name in _GLIBC_NUMBERS:
            mallopt(_GLIBC_NUMBERS[name], int(value))
