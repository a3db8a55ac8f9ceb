"""`memd serve` as a child process, and a client of it that is made of sockets and gRPC alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from memd_native import PROTOCOL_VERSION
from memd_proto.v1 import (
    attach_pb2,
    job_pb2,
    job_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    status_pb2_grpc,
    tensor_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import memd_client

# The temporary folder may be tmpfs, which takes O_DIRECT and keeps the bytes in memory.
BUILD = Path(__file__).parents[1] / "build"
HOST_BYTES = 64 << 20
NVME_BYTES = 512 << 20
TIMEOUT_S = 30.0
# A volume is written once when it is made, on whatever disk this is.
START_S = 120.0


@dataclass(kw_only=True)
class Daemon:
    process: subprocess.Popen[str]
    socket: Path
    data: Path
    log: Path
    ready_line: str

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def attach_socket(self) -> Path:
        return self.socket.with_name("attach.sock")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def get(self, path: str) -> str:
        found = re.search(r"metrics (http://[^ ,]+)/metrics", self.ready_line)
        assert found, self.ready_line
        with urllib.request.urlopen(found[1] + path, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
        return text

    def rss_anon_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found
        return int(found[1]) << 10


@dataclass
class Daemons:
    """Starts daemons in folders of their own, and ends them when the tests are over."""

    sockets: Path
    data: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    nvme_bytes: int = NVME_BYTES

    def command(self, *arguments: str, name: str = "memd", **settings: str) -> list[str]:
        given = {
            "socket": str(self.sockets / name / "memd.sock"),
            "data": str(self.data_folder(name)),
            "host": f"{HOST_BYTES}B",
            "nvme": f"{self.nvme_bytes}B",
            "metrics": "127.0.0.1:0",
            **settings,
        }
        flags = [text for key, value in given.items() for text in (f"--{key}", value)]
        return [sys.executable, "-m", "memd", "serve", *flags, "--unlocked-ok", *arguments]

    def data_folder(self, name: str) -> Path:
        folder = self.data / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(
        self,
        *arguments: str,
        name: str = "memd",
        before: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **settings: str,
    ) -> Daemon:
        """`before` stands in front of the command: a program that runs it."""
        log = self.sockets / f"{name}-{len(self.started)}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*before, *self.command(*arguments, name=name, **settings)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(environ or {})},
                pass_fds=pass_fds,
            )
        self.started.append(process)
        assert process.stdout is not None
        ready_line = process.stdout.readline()
        assert ready_line, f"memd serve did not start:\n{log.read_text()}"
        return Daemon(
            process=process,
            socket=Path(settings.get("socket", str(self.sockets / name / "memd.sock"))),
            data=self.data / name,
            log=log,
            ready_line=ready_line,
        )

    def refusal(
        self,
        *arguments: str,
        name: str = "memd",
        before: Sequence[str] = (),
        status: int = 1,
        **settings: str,
    ) -> str:
        """The last line of a daemon that does not start."""
        answer = subprocess.run(
            [*before, *self.command(*arguments, name=name, **settings)],
            capture_output=True,
            text=True,
            check=False,
            timeout=START_S,
        )
        assert answer.returncode == status, answer
        assert answer.stdout == ""
        return answer.stderr.splitlines()[-1]

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def daemons(*, nvme_bytes: int = NVME_BYTES) -> Iterator[Daemons]:
    """Sockets lie in the temporary folder, because a socket's path is short."""
    test_data = BUILD / "test-data"
    test_data.mkdir(parents=True, exist_ok=True)
    sockets = Path(tempfile.mkdtemp(prefix="memd-"))
    data = Path(tempfile.mkdtemp(prefix="daemon-", dir=test_data))
    made = Daemons(sockets, data, nvme_bytes=nvme_bytes)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(sockets)
        shutil.rmtree(data)


@contextmanager
def running_daemon(
    *, before: Sequence[str] = (), host: str = "64MiB", nvme: str = "512MiB"
) -> Iterator[Daemon]:
    """One daemon, ended in order. `before` is a program, with its arguments, that runs it."""
    with daemons() as made:
        daemon = made.start(before=before, host=host, nvme=nvme)
        yield daemon
        if daemon.process.poll() is None:
            daemon.stop()


class Attached:
    """`with Attached(daemon.attach_socket) as client`: one process's token and stubs."""

    def __init__(self, attach_socket: Path, *, control_address: str = "") -> None:
        """`control_address` leads to the socket that the daemon names, where its path does not."""
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(TIMEOUT_S)
        self.connection.connect(str(attach_socket))
        self.welcome = attach_pb2.Welcome.FromString(self.connection.recv(4096))
        self.channel = grpc.insecure_channel(control_address or self.welcome.control_address)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.tensors = tensor_pb2_grpc.TensorServiceStub(self.channel)
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.channel.close()
        self.connection.close()

    def call(self, method: Any, request: Any) -> Any:
        metadata = (("memd-token", self.welcome.token),)
        return method(request, timeout=TIMEOUT_S, metadata=metadata)

    def attach(self, job: str, **fields: Any) -> session_pb2.AttachResponse:
        request = session_pb2.AttachRequest(
            job=job,
            **{
                "protocol_version": PROTOCOL_VERSION,
                "world_size": 1,
                "without_shared_memory": True,
                **fields,
            },
        )
        answer: session_pb2.AttachResponse = self.call(self.sessions.Attach, request)
        return answer

    def session_count(self, job: str) -> int:
        """0 where there is no such job."""
        jobs = self.call(self.jobs.ListJobs, job_pb2.ListJobsRequest()).jobs
        return {each.name: int(each.session_count) for each in jobs}.get(job, 0)


@contextmanager
def fresh(daemon: Daemon, job: str, **quotas: Any) -> Iterator[memd_client.Session]:
    """A session of a new job, which goes with it."""
    # Tests without torch import this module too.
    import memd_client

    session = memd_client.connect(daemon.address, job=job, fresh=True, **quotas)
    try:
        yield session
    finally:
        session.drop_job()


def chunks_of(data: bytes, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
    for offset in range(0, len(data), chunk_bytes):
        yield data[offset : offset + chunk_bytes]
