"""A step whose gradients are still on their way from a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from memd_client.base.interrupts import Latch
from memd_client.errors import MemdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.calls import StepCall
    from memd_proto.v1 import session_pb2


class DeferredStep:
    """A `StepCall` that another thread sends, or gives up. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_decided = Latch()
        self._call: StepCall | None = None
        self._error: MemdError | None = None

    def send(self, begin: Callable[[], StepCall]) -> None:
        """Once. What `begin` raises, `result` raises."""
        try:
            call = begin()
        except MemdError as error:
            self.fail(error)
        except BaseException as error:  # noqa: BLE001 # `result` raises it
            self.fail(MemdError(f"the step could not be sent: {error}"))
        else:
            with self._lock:
                self._call = call
            self._is_decided.open()

    def fail(self, error: MemdError) -> None:
        """It is not sent."""
        with self._lock:
            self._error = error
        self._is_decided.open()

    def wait_until_sent(self) -> None:
        """See `calls.StepCall`. Waits for the gradients."""
        self._is_decided.wait()
        with self._lock:
            call = self._call
        if call is not None:
            call.wait_until_sent()

    def done(self) -> bool:
        """See `calls.StepCall`."""
        with self._lock:
            call, error = self._call, self._error
        return error is not None or (call is not None and call.done())

    def result(self) -> session_pb2.StepResponse:
        """See `calls.StepCall`."""
        self._is_decided.wait()
        with self._lock:
            call, error = self._call, self._error
        if error is not None:
            raise error
        assert call is not None
        return call.result()

    def seconds(self) -> float:
        """See `calls.StepCall`."""
        with self._lock:
            call = self._call
        return call.seconds() if call is not None else 0.0
