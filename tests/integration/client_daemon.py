"""One `memd serve` for the tests of a module."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BUILD = Path(__file__).parents[2] / "build"


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    address: str
    attach_socket: Path
    process: subprocess.Popen[str]
    ready_line: str


@contextmanager
def running_daemon(
    *, host: str = "64MiB", nvme: str = "512MiB", wrapper: Sequence[str] = ()
) -> Iterator[RunningDaemon]:
    """Its data lies under the build folder, because the temporary folder may be tmpfs; its socket
    in the temporary folder, because paths of sockets are short. `wrapper` is a program, with its
    arguments, that starts the command it is given."""
    _BUILD.mkdir(exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="client-daemon-", dir=_BUILD))
    sockets = Path(tempfile.mkdtemp(prefix="memd-"))
    socket = sockets / "memd.sock"
    command = [*wrapper, sys.executable, "-m", "memd", "serve"]
    command += ["--socket", str(socket), "--data", str(data)]
    command += ["--host", host, "--nvme", nvme, "--metrics", "", "--unlocked-ok"]
    with (sockets / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            ready_line = process.stdout.readline() if process.stdout is not None else ""
            if not ready_line:
                log.seek(0)
                raise RuntimeError(f"memd serve did not start:\n{log.read()}")
            yield RunningDaemon(
                f"unix://{socket}", socket.with_name("attach.sock"), process, ready_line
            )
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                if process.stdout is not None:
                    process.stdout.close()
                shutil.rmtree(data)
                shutil.rmtree(sockets)
