"""`memd top`: looks at the daemon, one after the other."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from memd.client import DaemonClient
from memd.failures import NoDaemon
from memd.printing import as_dict
from memd.probe import probe
from memd.refusal import Unreachable
from memd.top.rates import Rates, rates_between
from memd.top.screen import Pages, Screen
from memd.top.view import lines_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from memd.config import Settings
    from memd.top.screen import Output
    from memd_proto.v1 import status_pb2


class Looks:
    """At the daemon, over one connection as long as it answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._daemon: DaemonClient | None = None
        self._before: status_pb2.GetStatusResponse | None = None
        self._has_been_there = False

    def look(self) -> tuple[status_pb2.GetStatusResponse, Rates]:
        """Unreachable or NoDaemon where none answers; the next look connects anew."""
        try:
            answer = self._connected().status()
        except Unreachable:
            self.close()
            raise
        before, self._before = self._before, answer
        return answer, rates_between(before, answer) if before is not None else Rates()

    def _connected(self) -> DaemonClient:
        if self._daemon is None:
            # systemd listens on the attach socket of a daemon that was stopped, and would start it.
            if self._has_been_there:
                probe(self._settings.socket, wants_ready=False)
            self._daemon = DaemonClient(self._settings.attach_socket)
            self._has_been_there = True
        return self._daemon

    def close(self) -> None:
        """The next daemon may be another one, whose counters are its own."""
        self._before = None
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None


class View:
    """Looks as lines, for people or for programs."""

    def __init__(self, looks: Looks, *, as_json: bool) -> None:
        self._looks = looks
        self._as_json = as_json

    def lines(self) -> list[str]:
        answer, rates = self._looks.look()
        if not self._as_json:
            return lines_of(answer, rates)
        return [json.dumps({"status": as_dict(answer), "rates": asdict(rates)})]

    def lines_of_absence(self, error: Unreachable | NoDaemon) -> list[str]:
        return [json.dumps({"away": str(error)}) if self._as_json else f"{error}; waiting for it"]


def run(
    settings: Settings, *, interval_s: float, count: int | None, as_json: bool, is_colored: bool
) -> None:
    """Until Ctrl-C, which is how one leaves it, or `count` looks. Unreachable or NoDaemon where the
    first look or the last finds none."""
    looks = Looks(settings)
    view = View(looks, as_json=as_json)
    try:
        first = view.lines()
        with _output(as_json=as_json, is_colored=is_colored) as output:
            output.show(first)
            _go_on(view, output, interval_s=interval_s, count=count)
    except KeyboardInterrupt:
        return
    finally:
        looks.close()


def _go_on(view: View, output: Output, *, interval_s: float, count: int | None) -> None:
    shown = 1
    began_s = time.monotonic()
    while count is None or shown < count:
        # Looks are as far apart as they should, however long one takes; those that are missed are
        # left out.
        time.sleep(interval_s - (time.monotonic() - began_s) % interval_s)
        shown += 1
        try:
            output.show(view.lines())
        except (Unreachable, NoDaemon) as error:
            if shown == count:
                raise
            output.show(view.lines_of_absence(error))


def _output(*, as_json: bool, is_colored: bool) -> AbstractContextManager[Output]:
    if sys.stdout.isatty() and not as_json:
        return Screen.of(sys.stdout, is_colored=is_colored)
    return nullcontext(Pages(sys.stdout, is_apart=not as_json))
