"""System calls that Python has no name for, asked as memd will ask them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_IO_URING_SETUP = 425  # on every architecture
_IO_URING_PARAMS_BYTES = 120
_MLOCK_ONFAULT = 1
_SO_PEERPIDFD = 77


def io_uring_errno() -> int:
    """0 where this process may make a ring."""
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = _LIBC.syscall(_IO_URING_SETUP, 1, parameters)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def lock_errno(length_bytes: int) -> int:
    """0 where this process may lock that much, which is asked without touching a page of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _LIBC.mmap(None, length_bytes, _PROT_NONE, flags, -1, 0)
    if address == _MAP_FAILED:
        return ctypes.get_errno()
    try:
        length = ctypes.c_size_t(length_bytes)
        result = _LIBC.mlock2(ctypes.c_void_p(address), length, _MLOCK_ONFAULT)
        return ctypes.get_errno() if result != 0 else 0
    finally:
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes))


def peer_pidfd_errno() -> int:
    """0 where the kernel hands out the pidfd of who connected."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        try:
            fd = one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError as error:
            return error.errno or errno.EIO
    os.close(fd)
    return 0


def name_of(number: int) -> str:
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
