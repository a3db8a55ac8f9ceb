"""A private daemon: a child process that lives as long as this one."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from memd_client.base.address import UnixAddress
from memd_client.base.interrupts import call_user
from memd_client.connection.temporary_folders import TemporaryFolder
from memd_client.errors import DaemonUnavailable

if TYPE_CHECKING:
    from memd_client.base.address import EmbeddedAddress

# The daemon finishes a closed step first, which writes all that a job has at most once.
_STOP_S = 120.0

# A temporary volume is written at every start, which takes some seconds for 10 GiB.
_TEMPORARY_NVME_BYTES = 2 << 30

_LAST_LINES = 10

_daemons: dict[EmbeddedAddress, EmbeddedDaemon] = {}
_lock = threading.Lock()


def embedded_daemon(address: EmbeddedAddress) -> EmbeddedDaemon:
    """This process's daemon for `address`, started at the first call. It ends with the process, not
    with a session, so a later session finds the same jobs.
    """
    with _lock:
        daemon = _daemons.get(address)
        if daemon is None or not daemon.is_alive():
            daemon = _daemons[address] = EmbeddedDaemon(address)
        return daemon


def _make_folder(data: Path) -> None:
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DaemonUnavailable(
            f"the embedded daemon's folder {data} cannot be made: {error.strerror}; choose another"
        ) from error


class EmbeddedDaemon:
    """`memd serve` as a child process, with its socket in a folder of its own. It watches this
    process and stops if that dies. At a normal exit it is stopped, and temporary files are removed;
    after a kill the next start removes them.
    """

    def __init__(self, address: EmbeddedAddress) -> None:
        self._parent = os.getpid()
        # A unix socket's path has at most 107 bytes. A socket may be on tmpfs; data may not.
        sockets = TemporaryFolder(
            Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()), prefix="memd-"
        )
        self._temporary = [sockets]
        self._address = UnixAddress(socket=sockets.path / "memd.sock")
        data = address.data or self._temporary_data()
        _make_folder(data)
        self._log = (sockets.path / "stderr").open("w+b")
        self._process = subprocess.Popen(
            self._command(data, address),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,  # a terminal interrupts the whole group of the trainer
            pass_fds=[folder.lock for folder in self._temporary],
        )
        for folder in self._temporary:
            folder.hand_over()
        atexit.register(self.stop)
        self._wait_until_ready()

    @property
    def address(self) -> UnixAddress:
        return self._address

    @property
    def process_id(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """The last lines of its stderr, which tell why it has ended."""
        if self._log.closed:
            return ""
        self._log.flush()
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def is_alive(self) -> bool:
        return os.getpid() == self._parent and self._process.poll() is None

    def stop(self) -> None:
        """Ends the daemon and removes temporary files. A second call does nothing, and neither does
        one in a forked child.
        """
        if os.getpid() != self._parent:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        for folder in self._temporary:
            folder.remove()
        atexit.unregister(self.stop)

    def _temporary_data(self) -> Path:
        # The temporary folder may be tmpfs, which accepts O_DIRECT and keeps the bytes in memory.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memd"
        cache.mkdir(parents=True, exist_ok=True)
        folder = TemporaryFolder(cache, prefix="embedded-")
        self._temporary.append(folder)
        return folder.path

    def _command(self, data: Path, address: EmbeddedAddress) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "memd",
            "serve",
            "--socket",
            str(self._address.socket),
            "--data",
            str(data),
        ]
        command += ["--metrics", "", "--parent-pid", str(self._parent), "--unlocked-ok"]
        if address.host_bytes is not None:
            command += ["--host", f"{address.host_bytes}B"]
        nvme_bytes = address.nvme_bytes
        if nvme_bytes is None and address.data is None:
            nvme_bytes = _TEMPORARY_NVME_BYTES
        if nvme_bytes is not None:
            command += ["--nvme", f"{nvme_bytes}B"]
        return command

    def _wait_until_ready(self) -> None:
        """The daemon prints one line when it is ready, and closes its output if it cannot start."""
        assert self._process.stdout is not None
        try:
            line = call_user(self._process.stdout.readline)
        except BaseException:
            self.stop()
            raise
        if line:
            return
        status = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        self.stop()
        raise DaemonUnavailable(
            "the embedded daemon did not start (exit status "
            f"{status}):\n{said or 'it printed nothing'}"
        )
