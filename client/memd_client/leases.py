"""Leases: torch tensors over the arena's own bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import memd_native
from memd_client.dtypes import DTYPE_NUMBERS, dtype_number, torch_dtype
from memd_client.errors import (
    CODE_CAPACITY,
    CODE_DEADLINE,
    CODE_NOT_FOUND,
    CODE_UNAVAILABLE,
    DaemonUnavailable,
    InvalidArgument,
    MemdError,
    from_code,
)
from memd_client.gradient_order import GradientOrder
from memd_client.reattach import AtOnce
from memd_native import MODE_OVERWRITE, MODE_READ, MODE_WRITE, PART_GRADIENT, PART_VALUE

if TYPE_CHECKING:
    from memd_client.reattach import Retrying
    from memd_proto.v1 import types_pb2

__all__ = [
    "MODE_OVERWRITE",
    "MODE_READ",
    "MODE_WRITE",
    "DataPlane",
    "LeaseStatistics",
    "Leases",
    "Shard",
]

# A miss waits for the disk, and perhaps for a step to end.
_TIMEOUT_S = 60.0
# How often a lease that follows a step looks whether that failed before it came to the store.
_LOOK_S = 10.0


class LeaseStatistics(Protocol):
    """What the native session counts."""

    @property
    def lease_count(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def lease_wait_seconds(self) -> float: ...
    @property
    def lease_wait_reason_seconds(self) -> dict[str, float]: ...
    @property
    def leases_held(self) -> int: ...


class DataPlane(Protocol):
    """What leases need of `memd_native.ClientSession`."""

    def lease(
        self,
        shard_id: int,
        part: int,
        mode: int,
        dtype: int,
        shape: tuple[int, ...],
        timeout_s: float,
    ) -> Any: ...
    def lease_resident(self, shard_id: int, dtype: int, shape: tuple[int, ...]) -> Any: ...
    def ask_ahead(self, shard_id: int, part: int, mode: int) -> None: ...
    def forget_asked(self) -> bool: ...
    def prefetch(self, shard_id: int) -> None: ...
    def follow(self, call: int) -> None: ...
    def statistics(self) -> LeaseStatistics: ...
    def close(self) -> None: ...


class FollowedStep(Protocol):
    """What leases need of `steps.Steps`."""

    def settle_answered(self) -> bool: ...
    def settle_for_lease(self) -> None: ...
    def note_unreachable(self, error: DaemonUnavailable) -> None: ...


class NoStep:
    """For leases that follow nothing."""

    def settle_answered(self) -> bool:
        return False

    def settle_for_lease(self) -> None:
        pass

    def note_unreachable(self, error: DaemonUnavailable) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A named tensor of the job, as the daemon declared it."""

    shard_id: int
    name: str
    kind: int
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, shard: types_pb2.Shard) -> Shard:
        spec = shard.spec
        return cls(
            shard_id=shard.shard_id,
            name=spec.name,
            kind=spec.kind,
            dtype=torch_dtype(spec.dtype),
            shape=torch.Size(spec.shape),
        )

    @property
    def element_count(self) -> int:
        return self.shape.numel()

    @property
    def size_bytes(self) -> int:
        return self.element_count * self.dtype.itemsize


class Leases:
    """Leases of one session. Any thread may ask; each waits for at most a minute after the step
    that it follows has ended.

    A lease is over when the last tensor that shares its storage is freed: keep none longer than it
    is used.
    """

    def __init__(self, plane: DataPlane, *, job: str, retrying: Retrying | None = None) -> None:
        self._plane = plane
        self._job = job
        self._retrying = retrying or AtOnce()
        # What leases follow: where it fails they raise its error.
        self.step: FollowedStep = NoStep()
        self.gradient_order = GradientOrder(plane)

    def value(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The bytes of a parameter, buffer or blob, in the shard's shape."""
        if mode == MODE_READ:
            # First without all that a request needs: what is refused or away is None here.
            lease: torch.Tensor | None = self._plane.lease_resident(
                shard.shard_id, DTYPE_NUMBERS[shard.dtype], shard.shape
            )
            if lease is not None:
                return lease
        return self._lease(shard, PART_VALUE, mode)

    def gradient(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The gradient of a parameter, in the parameter's shape and dtype."""
        return self._lease(shard, PART_GRADIENT, mode)

    def write(self, shard: Shard, value: torch.Tensor) -> None:
        """Replaces the bytes of `shard`."""
        if value.shape != shard.shape or value.dtype != shard.dtype:
            raise InvalidArgument(
                f"job {self._job!r}: {shard.name!r} is {shard.dtype} {list(shard.shape)} and "
                f"cannot become {value.dtype} {list(value.shape)}"
            )
        if shard.element_count:
            with torch.no_grad():
                self.value(shard, MODE_OVERWRITE).copy_(value)

    def read(self, shard: Shard) -> torch.Tensor:
        """The bytes of `shard`; a shard without elements has none to lease."""
        return (
            self.value(shard)
            if shard.element_count
            else torch.empty(shard.shape, dtype=shard.dtype)
        )

    def prefetch(self, shard: Shard) -> None:
        def prefetch() -> None:
            try:
                self._plane.prefetch(shard.shard_id)
            except memd_native.StatusError as error:
                raise self._translated(error, shard) from error

        self._retrying.calling(prefetch, lease=True)

    def follow(self, call: int) -> None:
        """Leases from now on come after the step of this call; 0: after none on its way."""
        self._plane.follow(call)

    def statistics(self) -> LeaseStatistics:
        return self._plane.statistics()

    @property
    def plane(self) -> DataPlane:
        """For measurements."""
        return self._plane

    def close(self) -> None:
        self._plane.close()

    def _lease(self, shard: Shard, part: int, mode: int) -> torch.Tensor:
        number = dtype_number(shard.dtype, name=shard.name)

        def ask() -> torch.Tensor:
            was_settled = False
            while True:
                # The step has a deadline of its own, and the lease's begins with its end.
                follows = self.step.settle_answered()
                timeout_s = _LOOK_S if follows else _TIMEOUT_S
                try:
                    lease: torch.Tensor = self._plane.lease(
                        shard.shard_id, part, mode, number, tuple(shard.shape), timeout_s
                    )
                except memd_native.StatusError as error:
                    if follows and error.code == CODE_DEADLINE:
                        continue
                    if follows and error.code != CODE_UNAVAILABLE and not was_settled:
                        # Where the step failed that is why, and its own error says more.
                        self.step.settle_for_lease()
                        was_settled = True
                        continue
                    raise self._translated(error, shard) from error
                return lease

        try:
            return self._retrying.calling(ask, lease=True)
        except DaemonUnavailable as error:
            # What that means for the step that is on its way is what matters most. Its answer is
            # not waited for: the lease has waited for the daemon as long as one may.
            self.step.note_unreachable(error)
            raise

    def _translated(self, error: memd_native.StatusError, shard: Shard) -> MemdError:
        message = f"job {self._job!r}, shard {shard.name!r}: {error}"
        if error.code == CODE_CAPACITY:
            message += "; let go of tensors that share memd's memory, or raise the job's host_bytes"
        if error.code == CODE_NOT_FOUND:
            message += "; was it deleted, or the job dropped, by another process?"
        return from_code(error.code, message, error.error_number)
