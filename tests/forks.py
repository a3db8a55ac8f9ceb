"""Programs of one process each, without an import of torch for each: `python -m tests.forks FD
MODULE…` imports the modules, and runs each program that comes over the socket in a fork."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
_REQUEST_BYTES_MAX = 128 * 1024


class Program:
    """One in a fork, used as a `subprocess.Popen`. Its output goes to memory, so a child that
    outlives it keeps nobody waiting."""

    def __init__(self, control: socket.socket, request: dict[str, Any]) -> None:
        self._output = os.fdopen(os.memfd_create("output"), "w+b")
        self._errors = os.fdopen(os.memfd_create("errors"), "w+b")
        self._status, theirs = socket.socketpair()
        with theirs:
            files = [each.fileno() for each in (self._output, self._errors, theirs)]
            socket.send_fds(control, [json.dumps(request).encode()], files)
        self.pid = int(self._line(None))
        self.returncode: int | None = None
        """Negative after a signal."""

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._line(None))
        return self.returncode

    def lines(self) -> Iterator[str]:
        """Yields each line of its output as it comes, until the program ends."""
        given_bytes = 0
        while True:
            has_ended = self.poll() is not None
            # The program's own file: a seek would move where it writes.
            printed = os.pread(self._output.fileno(), 1 << 20, given_bytes)
            lines = printed[: printed.rfind(b"\n") + 1]
            given_bytes += len(lines)
            yield from lines.decode().splitlines()
            if not has_ended:
                select.select([self._status], [], [], 0.01)
            elif not lines:
                return

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end, and returns its output and its errors."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
        texts = []
        for file in (self._output, self._errors):
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], texts[1]

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for each in (self._output, self._errors, self._status):
            each.close()

    def _line(self, timeout: float | None) -> str:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout or 0)
        line = b""
        while not line.endswith(b"\n"):
            part = self._status.recv(1)
            assert part, "the process that forks has ended"
            line += part
        return line.decode()


class Forks:
    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def start(self, module: str | Path, *arguments: str, environ: dict[str, str]) -> Program:
        """As `python -m MODULE ARGUMENTS`, or `python FILE ARGUMENTS`."""
        key = "file" if isinstance(module, Path) else "module"
        request = {key: str(module), "arguments": arguments, "environ": environ}
        return Program(self._control, request)

    def run(self, program: str, *arguments: str) -> tuple[int, str]:
        """As `python -c PROGRAM ARGUMENTS`: the exit status, and what it printed and said."""
        request = {"program": program, "arguments": arguments, "environ": dict(os.environ)}
        with Program(self._control, request) as ran:
            text = "".join(ran.communicate())
            assert ran.returncode is not None
            return ran.returncode, text


@contextmanager
def forks(*modules: str) -> Iterator[Forks]:
    """Starts a process that imports `modules` once and forks for each program."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *modules]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT):
        theirs.close()
        with control:
            yield Forks(control)


@cache
def shared_forks(*modules: str) -> Forks:
    """For the tests of all files: the process ends with this one."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forks(*modules))


def _execute(request: dict[str, Any]) -> None:
    if "program" in request:
        exec(request["program"], {"__name__": "__main__"})
        return
    if "file" in request:
        runpy.run_path(request["file"], run_name="__main__")
        return
    module = request["module"]
    sys.modules.pop(module, None)  # runpy warns of one that has been imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(request: dict[str, Any], output: int, errors: int) -> NoReturn:
    """In a child. It does what was registered for its end, and leaves out that each module goes:
    torch's take a second."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.dup2(output, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = ["-c", *request["arguments"]]
    try:
        _execute(request)
    finally:
        error = sys.exc_info()[1]
        status = 0 if error is None else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code
        elif error is not None:
            traceback.print_exception(error)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait_for(request: dict[str, Any], output: int, errors: int, told: int) -> NoReturn:
    """In a child that has one program: it tells the program's process and how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        os.close(told)
        _run(request, output, errors)
    os.write(told, f"{child}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(told, f"{status}\n".encode())
    os._exit(0)


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as control:
        for module in sys.argv[2:]:
            import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
        while True:
            request, files, _, _ = socket.recv_fds(control, _REQUEST_BYTES_MAX, 3)
            if not request:
                os._exit(0)
            if not os.fork():
                control.close()
                _wait_for(json.loads(request), *files)
            for file in files:
                os.close(file)


if __name__ == "__main__":
    _main()
