"""The pool: whether it fits, may be locked, and gets its huge pages."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from memd.doctor import kernel
from memd.doctor.finding import Finding, note, obstacle, ok
from memd.peers import DESCRIPTORS_MAX
from memd.sizes import format_size

_HUGE_BYTES = 2 << 20
_HUGE_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def room(
    host_bytes: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Finding:
    """Against what is available, here and within the process's cgroup."""
    meminfo = (proc / "meminfo").read_text(encoding="utf-8")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    limits = {"of memory is available": int(found[1]) << 10 if found else 0}
    limits |= {
        f"is what its control group {path} has left": left
        for path, left in _cgroup_rooms(proc, cgroups)
    }
    what, least = min(limits.items(), key=lambda limit: limit[1])
    if host_bytes > least:
        return obstacle(
            "memory",
            f"host is {format_size(host_bytes)}, and {format_size(least)} {what}",
            "choose a smaller host, free memory, or raise the limit of the container or unit",
        )
    return ok("memory", f"{format_size(least)} {what}")


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[tuple[str, int]]:
    """Memory left in the control groups of this process, from its own one upwards. A limit is one
    of version 1 where that has the memory controller, else of version 2."""
    rooms = []
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers:
            layout, mounted = _VERSION_2, cgroups
        elif "memory" in controllers.split(","):
            layout, mounted = _VERSION_1, cgroups / "memory"
        else:
            continue
        group = Path(own)
        for path in (group, *group.parents):
            room = layout.room_of(mounted / str(path).lstrip("/"))
            if room is not None:
                rooms.append((str(path), room))
    return rooms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """The files in which a version of control groups shows what a group and those below it have."""

    limit: str
    used: str
    # In memory.stat: the page cache, which the kernel gives up before the limit refuses anything.
    cached: tuple[str, str]

    def room_of(self, folder: Path) -> int | None:
        """None without a limit."""
        try:
            most = (folder / self.limit).read_text(encoding="utf-8").strip()
            used = int((folder / self.used).read_text(encoding="utf-8"))
            statistics = (folder / "memory.stat").read_text(encoding="utf-8")
        except OSError:  # the root has no limit, and a container shows no groups above its own
            return None
        if most == "max" or int(most) >= _NO_LIMIT_BYTES:
            return None
        by_name = dict(line.split() for line in statistics.splitlines())
        cached = sum(int(by_name.get(name, 0)) for name in self.cached)
        return max(int(most) - max(used - cached, 0), 0)


_VERSION_1 = _Layout(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cached=("total_active_file", "total_inactive_file"),
)
_VERSION_2 = _Layout(
    limit="memory.max", used="memory.current", cached=("active_file", "inactive_file")
)
# Version 1 shows the largest number of whole pages instead of a word.
_NO_LIMIT_BYTES = 1 << 62


def locking(host_bytes: int) -> Finding:
    number = kernel.lock_errno(host_bytes)
    if number == 0:
        return ok("memlock", f"{format_size(host_bytes)} may be locked")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "infinity" if limit == resource.RLIM_INFINITY else format_size(limit)
    return obstacle(
        "memlock",
        f"host is {format_size(host_bytes)}, which may not be locked: "
        f"{kernel.name_of(number)}; the memlock limit is {shown}",
        "LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited` in a shell, --ulimit memlock=-1 "
        "for a container, or the capability IPC_LOCK",
    )


def descriptors() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < DESCRIPTORS_MAX:
        return note(
            "descriptors",
            f"at most {most} open files, and clients may take {DESCRIPTORS_MAX}",
            "LimitNOFILE=65536 in the unit, or `ulimit -Hn 65536` before it starts",
        )
    return ok("descriptors", f"at most {most} open files")


def huge_pages(host_bytes: int, *, wanted: bool, free: Path = _HUGE_FREE) -> Finding:
    if not wanted:
        return ok("huge pages", "not asked for: the setting huge_pages is false")
    needed = -(-host_bytes // _HUGE_BYTES)
    try:
        free_count = int(free.read_text(encoding="utf-8"))
    except OSError:
        return note(
            "huge pages",
            "this kernel has no pages of 2 MiB to reserve",
            "set huge_pages = false, or use a kernel with hugetlbfs",
        )
    if free_count < needed:
        return note(
            "huge pages",
            f"{free_count} of the {needed} that host needs are reserved and free",
            f"sysctl vm.nr_hugepages={needed}, best at boot, when memory is not fragmented",
        )
    return ok("huge pages", f"{free_count} reserved and free, {needed} needed")
