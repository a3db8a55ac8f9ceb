"""The data folders: whether a volume can be there, and what a commit will cost."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memd.doctor.finding import Finding, note, obstacle, ok
from memd.sizes import exact_size, format_size
from memd_native import StatusError, inspect_volume

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE = "memd.doctor"
_BLOCK_BYTES = 4096
_MIB = 1 << 20
_SYNCS = 25
# A drive with power-loss protection answers a flush in some 50 µs; two of them make a commit.
_SYNC_SECONDS_MAX = 2e-3
_IN_MEMORY = ("tmpfs", "ramfs")


def look(folder: Path, *, volume_bytes: int) -> Iterator[Finding]:
    name = f"data {folder}"
    if not folder.is_dir():
        yield obstacle(
            name,
            "does not exist" if not folder.exists() else "is no folder",
            f"install -d -o memd -g memd -m 700 {folder}, on the drive that shall hold the volume",
        )
        return
    kind = file_system_of(folder)
    if kind in _IN_MEMORY:
        yield obstacle(name, f"lies on {kind}, which is memory", "choose a folder on a disk")
        return
    volume = folder / "memd.volume"
    try:
        with _probe(folder / _PROBE) as probe:
            refusal = _direct_io_refusal(probe)
            if refusal is None:
                yield ok(name, f"{kind}, takes O_DIRECT")
                yield from _about_syncs(folder, probe)
            else:
                yield obstacle(name, *refusal)
    except FileExistsError:
        yield obstacle(
            name,
            f"has a {_PROBE} that is no plain file, or that another doctor writes",
            f"rm {folder / _PROBE}",
        )
    except OSError as error:
        yield obstacle(
            name,
            f"cannot be written: {os.strerror(error.errno or 0)}",
            f"chown memd:memd {folder}; in a unit, ReadWritePaths={folder}",
        )
    if volume.exists():
        yield _about_the_volume(volume, volume_bytes=volume_bytes)
        return
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < volume_bytes:
        yield obstacle(
            f"space {folder}",
            f"{format_size(free_bytes)} are free, and the volume takes {format_size(volume_bytes)}",
            "choose a smaller nvme, free space, or add a folder on another drive",
        )


def _about_the_volume(volume: Path, *, volume_bytes: int) -> Finding:
    name = f"volume {volume.parent}"
    try:
        found = inspect_volume(str(volume.parent))
    except StatusError as error:
        return obstacle(name, str(error), f"`memd check --data {volume.parent}` says what is lost")
    if found.holder:
        return obstacle(
            name,
            f"{volume} is in use by {found.holder}",
            "stop that daemon, or say where it is with --socket or MEMD_ADDRESS",
        )
    if volume_bytes // _MIB != found.bytes // _MIB:
        return obstacle(
            name,
            f"{volume} has {format_size(found.bytes)}, and the setting nvme gives it "
            f"{format_size(volume_bytes)}",
            f'nvme = "{exact_size(found.bytes)}" for each folder; a volume keeps its size',
        )
    damaged = len(found.damaged_superblock_offsets)
    if damaged:
        return note(
            name,
            f"{damaged} of 4 superblocks are damaged; its next commits mend them",
            f"`memd check --data {volume.parent}` looks at the rest",
        )
    return ok(name, f"{format_size(found.bytes)}, format {found.format}")


@contextmanager
def _probe(path: Path) -> Iterator[int]:
    """A new file's descriptor. The folder may be another user's, and this process root: it follows
    no link there, and opens no file that it has not made. OSError."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):  # of a doctor that was killed
            path.unlink()
    except FileNotFoundError:
        pass
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        made = os.fstat(fd)
        os.close(fd)
        try:
            if os.path.samestat(made, path.lstat()):
                path.unlink()
        except FileNotFoundError:
            pass


def _direct_io_refusal(probe: int) -> tuple[str, str] | None:
    """The refusal and what to do, or None: a block can be written past the kernel's cache."""
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return "its file system takes no O_DIRECT", "use ext4 or xfs, or another that does"
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned, as O_DIRECT wants it
            os.pwrite(probe, block, 0)
    except OSError as error:
        return (
            f"a block of {_BLOCK_BYTES} bytes cannot be written with O_DIRECT: "
            f"{os.strerror(error.errno or 0)}",
            "free space on it, or use a file system with blocks of 4 KiB",
        )
    return None


def _about_syncs(folder: Path, probe: int) -> Iterator[Finding]:
    seconds = sync_seconds(probe)
    cache = write_cache_of(folder)
    found = f"{seconds * 1e3:.2f} ms for a write and its sync{f', cache: {cache}' if cache else ''}"
    if seconds > _SYNC_SECONDS_MAX:
        yield note(
            f"sync {folder}",
            f"{found}: a commit waits for two",
            "a drive with power-loss protection, where a flush costs nothing; or "
            'durability="every:k" for jobs that may lose steps',
        )
    else:
        yield ok(f"sync {folder}", found)


def sync_seconds(probe: int) -> float:
    """The median of a block's write and its sync, as a superblock's are. `probe` is a descriptor
    with O_DIRECT."""
    times = []
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        for _ in range(_SYNCS):
            began = time.monotonic()
            os.pwrite(probe, block, 0)
            os.fdatasync(probe)
            times.append(time.monotonic() - began)
    return statistics.median(times)


def write_cache_of(folder: Path, *, devices: Path = Path("/sys/dev/block")) -> str:
    """ "write back": a sync must flush the drive's cache. "write through": it has none, or protects
    it. Empty where the kernel does not say."""
    number = folder.stat().st_dev
    device = devices / f"{os.major(number)}:{os.minor(number)}"
    for queue in (device / "queue", device / ".." / "queue"):  # a partition's is its drive's
        try:
            return (queue / "write_cache").read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return ""


def file_system_of(folder: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the mount that `folder` lies on: by device, which each mount has."""
    number = folder.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if words[2] == wanted:
            return words[words.index("-") + 1]
    return "an unknown file system"
