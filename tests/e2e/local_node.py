"""This machine: copies of the installed packages in an environment of their own, no systemd. An
upgrade is to the same packages under the next version: quick, and of no other release."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import memd
from tests.daemons import daemons
from tests.e2e.higher_version import after, raise_module
from tests.e2e.node import PROMETHEUS, Node, configuration_of_prometheus
from tests.soak.booted_root import SETTINGS, TIMEOUT_S, System
from tests.soak.packaged_trainer import Trained, copy_programs

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("memd", "memd_client", "memd_native", "memd_proto")
SIZES = {"host": "64MiB", "nvme": "512MiB"}


class LocalSystem(System):
    def enter(self, *command: str) -> list[str]:
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        return ["env", "--ignore-environment", "--chdir=/", path, *SETTINGS, *command]


class LocalNode(Node):
    def __init__(self, folder: Path, data: Path) -> None:
        self._folder = folder
        self._data = data
        self._python = str(folder / "environment" / "bin" / "python")
        self._metrics, self._web = free_addresses(2)
        self._started: list[subprocess.Popen[str]] = []
        # Each daemon's words go on where those of the one before end.
        self._log = folder / "daemon.log"
        (folder / "run").mkdir()
        address = f"unix://{folder / 'memd.sock'}"
        super().__init__(
            LocalSystem(Path("/"), folder / "system.log"),
            memd=(self._python, "-P", "-m", "memd"),
            socket=str(folder / "memd.sock"),
            trained=Trained(
                folder=str(folder / "run"),
                python=self._python,
                programs=str(folder / "trial"),
                arguments=("step", address),
            ),
        )

    @property
    def prometheus(self) -> str:
        return f"http://{self._web}"

    @property
    def _packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self._folder / "environment" / "lib" / version / "site-packages"

    def install(self) -> str:
        environment = self._folder / "environment"
        self.system.do(sys.executable, "-m", "venv", "--without-pip", str(environment))
        # A path in a .pth file has no .pth files itself: what they install in place stays away.
        (self._packages / "others.pth").write_text(sysconfig.get_path("platlib") + "\n")
        for name in PACKAGES:
            found = importlib.util.find_spec(name)
            assert found is not None
            for place in found.submodule_search_locations or ():
                shutil.copytree(
                    place,
                    self._packages / name,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
        copy_programs(self._folder / "trial")
        said = self.system.do(*self._memd, "--version").strip()
        return f"{said} in an environment of its own"

    def start(self) -> None:
        settings = {
            "socket": self._socket,
            "data": str(self._data),
            "metrics": self._metrics,
            **SIZES,
        }
        flags = [text for key, value in settings.items() for text in (f"--{key}", value)]
        command = self.system.enter(*self._memd, "serve", *flags, "--unlocked-ok")
        with self._log.open("a") as log:
            self._started.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)
            )
        self.wait_until_ready()

    def restart(self) -> None:
        self._stop()
        self.start()

    def _stop(self) -> None:
        self._started[-1].terminate()
        self._started[-1].wait(TIMEOUT_S)

    def upgrade(self) -> str:
        module = self._packages / "memd" / "__init__.py"
        module.write_text(raise_module(module.read_text(encoding="utf-8")), encoding="utf-8")
        self.restart()
        return after(memd.__version__)

    def daemon(self) -> int:
        return self._started[-1].pid

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def start_prometheus(self) -> None:
        folder = self._folder / "prometheus"
        folder.mkdir()
        configuration = configuration_of_prometheus(self._metrics)
        (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
        shutil.copy(PROMETHEUS / "rules.yml", folder)
        self._started.insert(
            0,
            self.system.start(
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._web}",
            ),
        )

    def end(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(TIMEOUT_S)
        self.system.end()


@contextmanager
def local_node() -> Iterator[LocalNode]:
    with daemons() as folders:
        node = LocalNode(folders.sockets, folders.data)
        try:
            yield node
        finally:
            node.end()


def free_addresses(count: int) -> list[str]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in taken]
    for each in taken:
        each.close()
    return found
