"""The control socket: memd.v1's services, health and reflection behind one bounded gRPC server."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import (  # type: ignore[import-untyped]  # has no types
    health,
    health_pb2,
    health_pb2_grpc,
)
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # has no types

from memd.refusal import Refused, StatusCode
from memd.service.call import Gate
from memd.service.check import CheckService
from memd.service.job import JobService
from memd.service.places import KINDS
from memd.service.session import SessionService
from memd.service.status import StatusService
from memd.service.tensor import TensorService
from memd_proto.v1 import (
    check_pb2_grpc,
    job_pb2_grpc,
    session_pb2_grpc,
    status_pb2_grpc,
    tensor_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memd.identity import Identity
    from memd.peers import Peers
    from memd_native import Server

SERVICES = (
    "memd.v1.CheckService",
    "memd.v1.JobService",
    "memd.v1.SessionService",
    "memd.v1.StatusService",
    "memd.v1.TensorService",
)

# How often the end looks whether a call is under way.
_LOOK_S = 0.05
# Health has no place of its own, and a call that finds none is told so by a thread.
_SPARE = 8
WORKERS_MAX = sum(kind.all_max for kind in KINDS) + _SPARE


class _Health(health.HealthServicer):  # type: ignore[misc]  # has no types
    """Looks before it answers; whoever watches is told at the next look."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self._look()
        return super().Check(request, context)


class ControlServer:
    def __init__(
        self,
        server: Server,
        *,
        peers: Peers,
        jobs_max: Callable[[], int],
        identity: Identity | None = None,
    ) -> None:
        self.gate = Gate(peers, identity=identity)
        # Threads are made as they are needed, enough for as many calls as the gate lets through;
        # calls beyond them are refused, not queued.
        self._workers = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="memd-control")
        self._grpc = grpc.server(
            self._workers,
            interceptors=[self.gate],
            maximum_concurrent_rpcs=WORKERS_MAX,
            options=[("grpc.so_reuseport", 0)],
        )
        self._server = server
        self._health = _Health(self.look)
        sessions = SessionService(server, peers=peers, jobs_max=jobs_max)
        session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, self._grpc)
        tensors = TensorService(server, peers=peers)
        tensor_pb2_grpc.add_TensorServiceServicer_to_server(tensors, self._grpc)
        self._jobs = JobService(server, peers=peers)
        job_pb2_grpc.add_JobServiceServicer_to_server(self._jobs, self._grpc)
        status_pb2_grpc.add_StatusServiceServicer_to_server(StatusService(server), self._grpc)
        check_pb2_grpc.add_CheckServiceServicer_to_server(CheckService(server), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )

    def listen(self, path: Path) -> None:
        """Binds the socket, mode 0660. The caller knows that nobody else listens there."""
        mask = os.umask(0o117)
        try:
            self._grpc.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise Refused(
                StatusCode.DEVICE, f"the control socket {path} cannot be bound: {error}"
            ) from error
        finally:
            os.umask(mask)
        self._grpc.start()
        self.look()

    def look(self) -> None:
        """Updates what health answers: a daemon with fenced volumes commits nothing. Thread-safe;
        does nothing after the stop."""
        is_serving = not self._server.statistics().fence_reason
        kinds = health_pb2.HealthCheckResponse
        for service in ("", *SERVICES):
            self._health.set(service, kinds.SERVING if is_serving else kinds.NOT_SERVING)

    def stop(self, *, grace_s: float) -> None:
        """Takes no new calls, and waits for those under way until the grace is over. Exports are
        ended."""
        self._health.enter_graceful_shutdown()
        self._jobs.end_exports()
        stopped = self._grpc.stop(grace_s)
        # gRPC waits for connections too, and one whose process stands still never answers.
        while not stopped.wait(_LOOK_S) and not self.gate.is_idle():
            pass
        self._grpc.stop(None).wait()
        self._workers.shutdown(wait=False)
