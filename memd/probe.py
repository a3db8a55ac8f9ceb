"""`memd status --probe`: whether a daemon answers and takes work, for what starts and ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import grpc
from grpc_health.v1 import (  # type: ignore[import-untyped]  # has no types
    health_pb2,
    health_pb2_grpc,
)

from memd.failures import NoDaemon

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S = 5.0


def probe(socket: Path, *, wants_ready: bool) -> str:
    """The state, asked without a token. NoDaemon where none answers; ClickException where one does
    and is not ready, because it drains or its volumes are fenced."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            details = getattr(error, "details", lambda: None)()
            raise NoDaemon(f"no daemon answers at {socket}: {details or error}") from error
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return "ready"
    if wants_ready:
        raise click.ClickException("the daemon answers and takes no work: see `memd status`")
    return "live"
