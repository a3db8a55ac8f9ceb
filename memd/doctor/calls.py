"""System calls that the kernel, a sysctl or a seccomp filter may refuse."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from memd.doctor import kernel
from memd.doctor.finding import Finding, note, obstacle, ok

_IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")


def io_uring(*, disabled: Path = _IO_URING_DISABLED) -> Finding:
    number = kernel.io_uring_errno()
    if number == 0:
        return ok("io_uring", "usable")
    found = f"refused: {kernel.name_of(number)}; memd reads and writes by threads instead"
    if _is_disabled(disabled):
        return note("io_uring", found, "sysctl kernel.io_uring_disabled=0")
    if is_filtered():
        return note(
            "io_uring",
            found,
            "a seccomp filter refuses it: give the container a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register",
        )
    if number == errno.ENOSYS:
        return note("io_uring", found, "a kernel from 5.6 on with CONFIG_IO_URING")
    return note("io_uring", found, "see dmesg: a security module may refuse it")


def _is_disabled(disabled: Path) -> bool:
    """1: for those without CAP_SYS_ADMIN and outside of kernel.io_uring_group; 2: for all."""
    try:
        return disabled.read_text(encoding="utf-8").strip() in ("1", "2")
    except OSError:  # before Linux 6.6
        return False


def is_filtered(*, status: Path = Path("/proc/self/status")) -> bool:
    found = re.search(r"^Seccomp:\s+2$", status.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None


def needed() -> Finding:
    """Without these there is no daemon: the pool is memfds, and peers are known by their pidfds."""
    refused = []
    try:
        os.close(os.memfd_create("memd-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        refused.append(f"memfd_create: {kernel.name_of(error.errno or 0)}")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        refused.append(f"pidfd_open: {kernel.name_of(error.errno or 0)}")
    if refused:
        return obstacle(
            "system calls",
            f"refused: {', '.join(refused)}",
            "allow them in the container's seccomp profile, as Docker's and systemd's own do; "
            "pidfd_open needs Linux 5.3",
        )
    return ok("system calls", "memfd_create and pidfd_open are allowed")


def peer_pidfds() -> Finding:
    if number := kernel.peer_pidfd_errno():
        return note(
            "peer pidfds",
            f"refused: {kernel.name_of(number)}; trainers in other PID namespaces are refused",
            "Linux 6.5 or newer, or the host's PID namespace for the daemon",
        )
    return ok("peer pidfds", "trainers in other PID namespaces can be told apart")
