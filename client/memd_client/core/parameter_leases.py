"""Leases of parameters where they are used: in host memory, or on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.gradient_order import GradientOrder


class ValueLeases(Protocol):
    """Leases of values."""

    def expect_backward(self, shard: Shard) -> None: ...
    def value(self, shard: Shard, mode: int = ...) -> torch.Tensor: ...
    def resident(self, shard: Shard) -> torch.Tensor | None: ...
    def values(self, shards: Sequence[Shard], mode: int = ...) -> list[torch.Tensor]: ...
    def write(self, shard: Shard, value: torch.Tensor) -> None: ...
    def join(self, shard: Shard) -> None:
        """A lease of the value is used once more, perhaps on another stream."""
        ...

    def note_change(self, shard: Shard) -> None:
        """The value has changed, or a step will change it."""
        ...


class GradientLeases(Protocol):
    """Leases of gradients, which are in host memory."""

    @property
    def gradient_order(self) -> GradientOrder: ...
    def gradient(self, shard: Shard, mode: int = ...) -> torch.Tensor: ...
    def overwrite_gradient(self, shard: Shard, gradient: torch.Tensor) -> None: ...
    def add_gradient(self, shard: Shard, part: torch.Tensor) -> None: ...
    def gradient_is_final(self, shard: Shard) -> None: ...


class WatchedLeases(Protocol):
    """Leases of values for reading, through which a program may write all the same."""

    @property
    def read_privately(self) -> bool: ...
    def watch_writes(self, shard: Shard) -> None: ...
    def unwatch_writes(self, shard: Shard) -> None: ...
    def take_written(self, shard: Shard) -> torch.Tensor | None: ...
    def note_shown(self, lease: torch.Tensor) -> None: ...
    def is_written(self, lease: torch.Tensor) -> bool: ...


class ParameterLeases(ValueLeases, GradientLeases, WatchedLeases, Protocol):
    """`leases.Leases`, or `device_leases.DeviceLeases` for parameters that are used there."""


class DepartedGradients(Protocol):
    """Gradients in host memory that have left a device: `departed_gradients.DepartedGradients`."""

    def norm(self, shard: Shard, norm_type: float) -> torch.Tensor:
        """On the device."""
        ...

    def multiply(self, shard: Shard, factor: torch.Tensor) -> None:
        """Before the gradient is used or a step takes it. Returns at once."""
        ...

    def unscale(self, shard: Shard, inverse: torch.Tensor) -> None:
        """As `multiply`, in a GradScaler's way."""
        ...

    def divide(self, shard: Shard, scale: torch.Tensor) -> None:
        """As `multiply`, in the way of a fused optimizer."""
        ...

    def forget(self, shard: Shard) -> None:
        """The gradient is dropped."""
        ...


class LeasesOnDevice(ParameterLeases, Protocol):
    """`device_leases.DeviceLeases`."""

    @property
    def departed(self) -> DepartedGradients:
        """The gradients of its parameters."""
        ...


class DeviceTraffic(Protocol):
    """The copies to and from one device: `DeviceLeases` or `StayingCopies`."""

    @property
    def device(self) -> torch.device: ...
    def send_after(self, begin: Callable[[], StepCall]) -> StepCall:
        """Calls `begin` when all gradients and buffers so far have arrived. Returns at once."""
        ...

    def copy_out(
        self, source: torch.Tensor, box: list[torch.Tensor], then: Callable[[torch.Tensor], None]
    ) -> None:
        """Copies `source` into a lease, the only content of `box`, calls `then` with it when the
        copy has passed, and ends it. Returns at once."""
        ...

    def follow_values(self) -> None:
        """The current stream comes after new values that another thread has brought."""
        ...

    def end_round(self) -> None:
        """A step takes the gradients."""
        ...

    def give_up(self) -> None:
        """Gradients are dropped: waits for what is on its way, and forgets what has failed."""
        ...

    def close(self) -> None:
        """Waits, and ends its threads. A second call does nothing."""
        ...
