"""Clipping of gradients that have left a device: their norms, and the factors that they wait for.

A norm is computed on the device as the gradient leaves, if the last one was clipped; otherwise the
gradient comes back for it. A factor is computed there too. The thread that sends the step
multiplies with it in the slots before; whoever uses a gradient earlier has that done then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _has_foreach_support

from memd_client.core.leases import MODE_WRITE
from memd_client.device.clipping_factor import ClippingFactor
from memd_client.errors import MemdError, retold

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.device.departures import Departures


@dataclass(slots=True)
class _Departed:
    """The last gradient of one parameter."""

    shard: Shard
    # The norm that is computed when the next gradient leaves: of this type, or of none.
    expected: float | None = None
    norm: tuple[float, torch.Tensor] | None = None  # its type, and the value on the device
    has_changed: bool = False  # on the host, since it has left
    factors: list[ClippingFactor] = field(default_factory=list)


class DepartedGradients:
    """Those of the parameters that are used on one device. Any thread may call; none waits for the
    device, but for a gradient to which the host adds."""

    def __init__(
        self,
        leases: Callable[[], Leases],
        device: torch.device,
        departures: Departures,
        *,
        job: str,
    ) -> None:
        self._leases = leases
        self._device = device
        self._departures = departures
        self._job = job
        # Reentrant: garbage that is collected under it may use parameters.
        self._lock = RLock()
        self._departed: dict[int, _Departed] = {}  # by shard id
        self._last: ClippingFactor | None = None  # one clipping multiplies many gradients

    def _of(self, shard: Shard) -> _Departed:
        return self._departed.setdefault(shard.shard_id, _Departed(shard))

    def note_left(self, shard: Shard, gradient: torch.Tensor) -> None:
        """`gradient` leaves the device, in place of any that was there."""
        with self._lock:
            norm_type = self._of(shard).expected
        norm = None if norm_type is None else (norm_type, norm_of(gradient, norm_type))
        with self._lock:
            # A norm that nobody asks for is the last.
            self._departed[shard.shard_id] = _Departed(shard, norm=norm)

    def forget(self, shard: Shard) -> None:
        """The gradient is dropped, or another one comes from the host."""
        with self._lock:
            self._departed[shard.shard_id] = _Departed(shard, self._of(shard).expected)

    def note_use(self, shard: Shard, *, writes: bool) -> None:
        """Somebody is about to use it in its slot, once `Departures.wait_for` returns."""
        for factor in self._take_factors(shard):
            self._departures.multiply(shard, factor, self._lease(shard))
        if writes:
            with self._lock:
                found = self._of(shard)
                found.norm, found.has_changed = None, True

    def norm(self, shard: Shard, norm_type: float) -> torch.Tensor:
        """Its norm, as torch computes it on the device."""
        with self._lock:
            found = self._of(shard)
            found.expected = None if found.has_changed else norm_type
            if found.norm is not None and found.norm[0] == norm_type:
                return found.norm[1]
        return norm_of(self._there(shard), norm_type)

    def multiply(self, shard: Shard, factor: torch.Tensor) -> None:
        """Multiplies it, as torch does on the device."""
        if factor.dtype != shard.dtype:
            # Devices differ in the type that they multiply in.
            there = self._there(shard)
            torch._foreach_mul_([there], factor.to(self._device))
            self._departures.overwrite(shard, there, self._lease(shard))
        with self._lock:
            found = self._of(shard)
            found.norm = None
            if factor.dtype != shard.dtype:
                found.factors = []
                return
            if self._last is None or self._last.factor is not factor:
                self._last = ClippingFactor(factor)
            found.factors.append(self._last)

    def multiply_before_step(self) -> None:
        """A step is about to be sent by the thread, behind what this gives it to do."""
        with self._lock:
            found = [each.shard for each in self._departed.values() if each.factors]
            self._last = None
        for shard in found:
            lease = partial(self._lease_before_step, shard)
            for factor in self._take_factors(shard):
                self._departures.multiply_later(factor, lease)

    def _take_factors(self, shard: Shard) -> list[ClippingFactor]:
        with self._lock:
            found = self._of(shard)
            factors, found.factors = found.factors, []
            return factors

    def _there(self, shard: Shard) -> torch.Tensor:
        """A copy of the gradient on the device."""
        with self._lock:
            found = self._of(shard)
            has_changed, factors = found.has_changed, list(found.factors)
        if has_changed:
            self._departures.wait_for(shard)
        there = self._departures.bring_back(shard, self._lease(shard))
        for factor in factors:
            torch._foreach_mul_([there], factor.factor.to(self._device))
        return there

    def _lease(self, shard: Shard) -> Callable[[], torch.Tensor]:
        return partial(self._leases().gradient, shard, MODE_WRITE)

    def _lease_before_step(self, shard: Shard) -> torch.Tensor:
        try:
            return self._leases().gradient_before_step(shard)
        except MemdError as error:
            raise retold(
                error,
                f"job {self._job!r}: the gradient of {shard.label!r} could not be clipped, so call "
                f"optimizer.zero_grad() and repeat the batch: {error}",
            ) from error


@torch.no_grad()
def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """As `torch.nn.utils.get_total_norm` computes that of each tensor."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm
