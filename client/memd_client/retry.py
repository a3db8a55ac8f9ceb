"""Calls that are made again after the daemon was away: what their callers know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_proto.v1 import session_pb2

    # Gets what the next daemon answered, and its process id.
    OnReturn = Callable[[session_pb2.AttachResponse, int], None]

T = TypeVar("T")


class Retrying(Protocol):
    """Makes calls: `reattach.Reattach`, or `AtOnce`."""

    def calling(
        self, call: Callable[[], T], *, lease: bool = False, epoch: int | None = None
    ) -> T: ...
    def tell_returns(self, listener: OnReturn) -> None: ...


class AtOnce:
    """Calls once: for tests of the layers above."""

    def calling(self, call: Callable[[], T], *, lease: bool = False, epoch: int | None = None) -> T:
        del lease, epoch
        return call()

    def tell_returns(self, listener: OnReturn) -> None:
        """No daemon ever returns."""
