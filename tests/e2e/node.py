"""A machine with memd on it, and what its operator does there."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak.booted_root import Failure, wait

if TYPE_CHECKING:
    from tests.soak.booted_root import System
    from tests.soak.packaged_trainer import Trained

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"


class Node(ABC):
    # A program that takes on the daemon's user, where that is another than the operator.
    daemons_user: tuple[str, ...] = ()

    def __init__(
        self, system: System, *, memd: tuple[str, ...], socket: str, trained: Trained
    ) -> None:
        """`trained` is where the operator's user trains."""
        self.system = system
        self.trained = trained
        self.address = f"unix://{socket}"
        self._memd = memd
        self._socket = socket

    @property
    def readme(self) -> Path:
        """The README of the version that is installed first."""
        return ROOT / "README.md"

    @abstractmethod
    def install(self) -> str:
        """Names for people what was installed."""

    @abstractmethod
    def start(self) -> None:
        """The service, for the first time."""

    @abstractmethod
    def restart(self) -> None: ...

    @abstractmethod
    def upgrade(self) -> str:
        """The version that runs from now on."""

    @abstractmethod
    def daemon(self) -> int:
        """Its process."""

    @abstractmethod
    def log(self) -> str:
        """All that the daemons said."""

    @abstractmethod
    def start_prometheus(self) -> None:
        """With the configuration and rules of deploy/prometheus, only that it looks each second."""

    @property
    @abstractmethod
    def prometheus(self) -> str:
        """Its address."""

    def memd(self, *arguments: str) -> str:
        return self.system.do(*self._memd, *arguments, "--socket", self._socket)

    def is_ready(self) -> bool:
        return not self.system.fails(*self._memd, "status", "--probe", "--socket", self._socket)

    def wait_until_ready(self) -> None:
        wait(self.is_ready, "memd is not ready")

    def series(self, expression: str) -> list[str]:
        """None too while Prometheus does not answer."""
        query = ("promtool", "query", "instant", self.prometheus, expression)
        try:
            return [line for line in self.system.lines_of(*query) if line]
        except Failure:
            return []

    def wait_for_series(self, expression: str, otherwise: str) -> str:
        found: list[str] = []

        def is_there() -> bool:
            found[:] = self.series(expression)
            return bool(found)

        wait(is_there, otherwise)
        return found[0]

    def logged(self, pattern: str) -> list[str]:
        return [line for line in self.log().splitlines() if re.search(pattern, line)]

    def wait_for_log(self, pattern: str) -> str:
        wait(lambda: bool(self.logged(pattern)), f"the daemon's log has no line of {pattern!r}")
        return self.logged(pattern)[-1]


def configuration_of_prometheus(metrics: str) -> str:
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    return text.replace("127.0.0.1:9464", metrics).replace("15s", "1s").replace("10s", "1s")
