"""`memd serve` with a bug: sessions end with their connection, and not with their process.

A forked data loader keeps the connection open after its trainer was killed. Called as
`planted_daemon.py PYTHON -m memd serve ...`, so that it stands before the command of a daemon.
"""

from __future__ import annotations

import runpy
import selectors
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memd.attach import AttachListener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from memd.peers import Peer

_watch = AttachListener._watch


def _watch_no_process(self: AttachListener, fd: int, ready: Callable[[], None]) -> None:
    if str(Path(f"/proc/self/fd/{fd}").readlink()) != "anon_inode:[pidfd]":
        _watch(self, fd, ready)


def _end_with_the_connection(self: AttachListener, peer: Peer, connection: socket.socket) -> None:
    # _end() takes it out.
    self._selector.register(peer.pidfd, selectors.EVENT_READ, lambda: None)
    self._end(peer, reason="connection closed")


if __name__ == "__main__":
    AttachListener._watch = _watch_no_process  # type: ignore[method-assign]
    AttachListener._close_connection = _end_with_the_connection  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[4:]
    runpy.run_module("memd", run_name="__main__")
