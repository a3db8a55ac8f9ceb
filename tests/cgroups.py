"""A bound of the memory that several processes may have together, page cache included."""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_S = 10.0
_JOIN = 'echo $$ > "$0" && exec "$@"'


@contextmanager
def memory_limit(size_bytes: int) -> Iterator[tuple[str, ...]]:
    """A new cgroup. What it gives stands in front of a command, which then runs in the group. They
    must have ended when it ends. Raises OSError without the right to make one."""
    # In the first version of cgroups memory has a hierarchy of its own.
    first = _ROOT / "memory"
    is_first = (first / "memory.limit_in_bytes").exists()
    folder = (first if is_first else _ROOT) / f"memd-{os.getpid()}"
    folder.mkdir()
    try:
        limit = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        limit.write_text(str(size_bytes))
        # Without swap there is no such file.
        swap = folder / ("memory.memsw.limit_in_bytes" if is_first else "memory.swap.max")
        with suppress(FileNotFoundError):
            swap.write_text(str(size_bytes) if is_first else "0")
        yield ("/bin/sh", "-c", _JOIN, str(folder / "cgroup.procs"))
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """The kernel takes a moment to forget processes that have ended."""
    until = time.monotonic() + _REMOVE_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
        time.sleep(0.05)
