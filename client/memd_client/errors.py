"""The exceptions of the client.

MemdError
├── InvalidArgument(ValueError)        the call is not possible; nothing has changed
├── UnknownName(KeyError)              no shard or job of this name
├── NotYet(NotImplementedError)        a promised feature that this version does not have
├── PermissionDenied(PermissionError)  the job belongs to another user
├── DaemonUnavailable                  no daemon listens, or it stopped; connect again
├── DeadlineExceeded(TimeoutError)     a wait took too long; the message says for what
├── CapacityError                      memory or disk is full; end leases or raise host_bytes
├── DeviceError(OSError)               a device failed: .errno
├── IntegrityError                     a checksum did not match, twice
├── NotDurable                         committed in memory, but not on disk as requested
├── SessionFenced                      the daemon gave this session up; connect again
├── NotResident(RuntimeError)          the bytes are in memd and were needed here; see gather
└── DaemonFailed                       any other error of the daemon

The class in parentheses is a second base.
"""

from __future__ import annotations


class MemdError(Exception):
    """Base of everything that memd_client raises. The message names the job, the shard and what to
    do.
    """

    _retry_after_s: float | None = None

    @property
    def retry_after_s(self) -> float | None:
        """Set where the refusal passes by itself: the same call may be made again, no sooner than
        that."""
        return self._retry_after_s


class InvalidArgument(MemdError, ValueError):
    """The caller asked for something that cannot be done. Nothing has changed."""


class InUse(InvalidArgument):
    """Somebody else uses what the call needs, and has to end first."""


class UnknownName(MemdError, KeyError):
    """No shard or job has this name."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would quote the whole sentence.
        return str(self.args[0])


class NotYet(MemdError, NotImplementedError):
    """A promised feature that this version does not have. Nothing has changed."""


class PermissionDenied(MemdError, PermissionError):
    """The job belongs to another user."""


class DaemonUnavailable(MemdError):
    """No daemon listens at the address, or it stopped."""


class DeadlineExceeded(MemdError, TimeoutError):
    """The daemon waited too long for something; the message says for what."""


class CapacityError(MemdError):
    """Host memory or disk space is full, and nothing in it can be freed; end leases, or request
    more when connecting.
    """


class DeviceError(MemdError, OSError):
    """A device failed. `errno` is that of the system call."""

    def __init__(self, message: str, error_number: int = 0) -> None:
        super().__init__(message)
        self.errno = error_number


class IntegrityError(MemdError):
    """Bytes on disk were read twice and do not match their checksum. They are never returned."""


class NotDurable(MemdError):
    """A step is committed in memory, but writing it to disk failed. The step is made: go on with
    the next one, which tries the disk again.
    """


class SessionFenced(MemdError):
    """The daemon gave this session up; connect again."""


class NotResident(MemdError, RuntimeError):
    """A parameter whose bytes are in memd was used in a way that needs them in place;
    `memd_client.gather` puts them there.
    """


class DaemonFailed(MemdError):
    """The daemon answered with an error that has no class of its own; its log tells more."""


# The numbers of StatusCode in native/base/status.h.
_BY_CODE: dict[int, type[MemdError]] = {
    1: InvalidArgument,
    2: UnknownName,
    3: InvalidArgument,
    4: PermissionDenied,
    5: CapacityError,
    7: IntegrityError,
    8: SessionFenced,
    9: DeadlineExceeded,
    10: DaemonUnavailable,
    11: NotYet,
    12: InUse,
}
_DEVICE = 6
CODE_NOT_FOUND = 2
CODE_CAPACITY = 5
CODE_DEADLINE = 9
CODE_UNAVAILABLE = 10


def from_code(
    code: int, message: str, error_number: int = 0, *, retry_after_s: float | None = None
) -> MemdError:
    """The exception for a StatusCode of native/base/status.h."""
    if code == _DEVICE:
        return DeviceError(message, error_number)
    error = _BY_CODE.get(code, DaemonFailed)(message)
    error._retry_after_s = retry_after_s
    return error


def retold(error: MemdError, message: str) -> MemdError:
    """The same error with another message."""
    if isinstance(error, DeviceError):
        return DeviceError(message, error.errno or 0)
    return type(error)(message)
