"""Calls that are repeated if the daemon restarted: the interface that their callers see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_proto.v1 import session_pb2

    # Called with the answer of the next daemon, and its process id.
    OnReturn = Callable[[session_pb2.AttachResponse, int], None]

T = TypeVar("T")


class Retrying(Protocol):
    """Makes calls, and repeats them: `reattach.Reattach`, or `AtOnce`, which does not."""

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
