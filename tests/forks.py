"""Short programs of one process each, without an import of torch for each: `python -m tests.forks
MODULE…` imports the modules, and runs each program that it is given in a fork of its own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]


class Forks:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, program: str, *arguments: str) -> tuple[int, str]:
        """The exit status, negative after a signal, and what the program said and printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        status, text = json.loads(line)
        return status, text


@contextmanager
def forks(*modules: str) -> Iterator[Forks]:
    """Starts a process that imports `modules` once and forks for each program."""
    command = [sys.executable, "-m", "tests.forks", *modules]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        yield Forks(process)


@cache
def shared_forks(*modules: str) -> Forks:
    """For the tests of all files: the process ends with this one."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forks(*modules))


def _run(program: str, arguments: list[str], output: int) -> None:
    """In the child. It ends without what an interpreter does at its end, which takes a second."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    sys.argv = ["-c", *arguments]
    try:
        exec(program, {"__name__": "__main__"})
    finally:
        error = sys.exc_info()[1]
        status = 0 if error is None else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    for line in sys.stdin:
        program, *arguments = json.loads(line)
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            _run(program, arguments, write_end)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as output:
            text = output.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(json.dumps([status, text]) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
