"""Refusals of the control plane, in the codes that the data plane uses too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class StatusCode(IntEnum):
    """The numbers are those of native/base/status.h; clients see them in `ErrorDetail.code`."""

    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    ALREADY_EXISTS = 3
    PERMISSION_DENIED = 4
    CAPACITY = 5
    DEVICE = 6
    INTEGRITY = 7
    FENCED = 8
    DEADLINE = 9
    UNAVAILABLE = 10
    NOT_YET = 11
    IN_USE = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """A limit that a request would exceed."""

    holder: str  # "process", "job", "user" or "daemon"
    what: str
    most: int


class Refused(Exception):
    """A request that cannot be served: why, and what to do. The caller gets it as a gRPC status.

    With `retry_after_s` what refuses it passes by itself: the same request may be made again, no
    sooner than that.
    """

    def __init__(
        self,
        code: StatusCode,
        message: str,
        *,
        quota: Quota | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.error_number = 0
        self.quota = quota
        self.retry_after_s = retry_after_s


class Unreachable(Refused):
    """No daemon answers."""
