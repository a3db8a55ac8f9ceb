"""Details of an error beside its code and message, in the forms of google.rpc."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # googleapis has no types

from memd.refusal import Quota, Refused, StatusCode
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from memd.peers import Peer
    from memd_native import StatusError

DOMAIN = "memd"
# As long as a job's name may be: the caller's own text has to fit into HTTP/2 headers.
_JOB_CHARACTERS_MAX = 128
# Their `name` is that of a job.
_OF_JOBS = (job_pb2.GetJobRequest, job_pb2.DropJobRequest, job_pb2.SetJobWeightRequest)
# Quotas of bytes that the native part names: whose they are, and what they limit.
_BYTE_QUOTAS = {
    "host_bytes": ("job", "bytes of host_bytes"),
    "nvme_bytes": ("job", "bytes of nvme_bytes"),
    "host": ("daemon", "bytes of host, which are free"),
    "nvme": ("daemon", "bytes of nvme, which are free"),
}
# FAILED_PRECONDITION: the call is refused until this holds.
_PRECONDITIONS = {
    StatusCode.DEVICE: "a device or system call has to work again",
    StatusCode.IN_USE: "others have to end their use first",
}


def job_of(request: Any, peer: Peer) -> str:
    """The job that the caller named, or that its session is of; empty where it is not known."""
    session = peer.sessions.get(getattr(request, "session_id", 0))
    if session is not None:
        return session.job_name
    name = getattr(request, "name" if isinstance(request, _OF_JOBS) else "job", "")
    return name if len(name) <= _JOB_CHARACTERS_MAX else ""


def details_of(error: Refused | StatusError, *, method: str, job: str) -> list[any_pb2.Any]:
    """memd's own detail comes first."""
    code = StatusCode(error.code)
    retry_after_ms = _retry_after_ms(error)
    own = types_pb2.ErrorDetail(
        code=code, error_number=error.error_number, retry_after_ms=retry_after_ms
    )
    messages: list[Message] = [own, _error_info(error, code, method=method, job=job)]
    if code in _PRECONDITIONS:
        messages.append(_precondition(code, job))
    if (quota := _quota_of(error)) is not None:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=quota.holder, description=f"at most {quota.most} {quota.what}"
        )
        messages.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return [_packed(message) for message in messages]


def _retry_after_ms(error: Refused | StatusError) -> int:
    if not isinstance(error, Refused) or error.retry_after_s is None:
        return 0
    return round(error.retry_after_s * 1e3)


def _quota_of(error: Refused | StatusError) -> Quota | None:
    if isinstance(error, Refused):
        return error.quota
    if not error.quota_name:
        return None
    holder, what = _BYTE_QUOTAS[error.quota_name]
    return Quota(holder=holder, what=what, most=error.quota_bytes)


def _error_info(
    error: Refused | StatusError, code: StatusCode, *, method: str, job: str
) -> Message:
    metadata = {"method": method}
    if job:
        metadata["job"] = job
    if error.error_number:
        metadata["errno"] = errno.errorcode.get(error.error_number, str(error.error_number))
    info: Message = error_details_pb2.ErrorInfo(reason=code.name, domain=DOMAIN, metadata=metadata)
    return info


def _precondition(code: StatusCode, job: str) -> Message:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=code.name, subject=job, description=_PRECONDITIONS[code]
    )
    failure: Message = error_details_pb2.PreconditionFailure(violations=[violation])
    return failure


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
