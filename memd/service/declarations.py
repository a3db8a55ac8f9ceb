"""Declarations that come in several calls: a model has more shards than a message holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from memd.refusal import Quota, Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_proto.v1 import session_pb2, types_pb2

# All sessions together: some 500 bytes each.
SHARDS_PENDING_MAX = 262_144
# A client that is alive sends the next call at once.
ABANDONED_S = 60.0


@dataclass(kw_only=True, slots=True)
class _Pending:
    declaration: int
    began_s: float
    specs: list[types_pb2.ShardSpec] = field(default_factory=list)


class Declarations:
    """Declarations of which more calls follow. A session has one at a time; a call that is sent
    again replaces itself. Any thread."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = Lock()
        self._pending: dict[int, _Pending] = {}

    def gather(self, request: session_pb2.DeclareRequest) -> list[types_pb2.ShardSpec]:
        """All shards that the call's declaration has up to here."""
        if not request.declaration:
            return list(request.shards)
        with self._lock:
            self._drop_abandoned()
            pending = self._of(request)
            del pending.specs[request.shards_before :]
            count = sum(len(each.specs) for each in self._pending.values())
            if count + len(request.shards) > SHARDS_PENDING_MAX:
                del self._pending[request.session_id]
                raise Refused(
                    StatusCode.CAPACITY,
                    f"the daemon keeps at most {SHARDS_PENDING_MAX} shards of declarations that "
                    "have not ended; declare again",
                    quota=Quota(
                        holder="daemon", what="shards of open declarations", most=SHARDS_PENDING_MAX
                    ),
                )
            pending.specs.extend(request.shards)
            specs = list(pending.specs)
            if not request.more_follows:
                del self._pending[request.session_id]
            return specs

    def _of(self, request: session_pb2.DeclareRequest) -> _Pending:
        pending = self._pending.get(request.session_id)
        if request.shards_before == 0:
            pending = _Pending(declaration=request.declaration, began_s=self._clock_s())
            self._pending[request.session_id] = pending
        if (
            pending is None
            or pending.declaration != request.declaration
            or len(pending.specs) < request.shards_before
        ):
            raise Refused(
                StatusCode.UNAVAILABLE,
                "the calls of this declaration before this one are not known; declare again",
            )
        return pending

    def _drop_abandoned(self) -> None:
        dead_s = self._clock_s() - ABANDONED_S
        for session_id in [key for key, each in self._pending.items() if each.began_s < dead_s]:
            del self._pending[session_id]
