"""Sums, clipping and unscaling of gradients that have left a device: their norms, and the changes
that they wait for.

A gradient to which another backward adds stays on the device too, where there is room: the sum is
made there, and leaves over it. A norm is computed on the device as the gradient leaves, if one was
asked for the last time; otherwise the gradient comes back for it. The number that changes it is
computed there too. The thread that sends the step makes the change in the slot before; whoever uses
a gradient earlier has it made then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _has_foreach_support

from memd_client.core.leases import MODE_WRITE
from memd_client.device.gradient_change import ChangeKind, GradientChange
from memd_client.device.kept_gradients import KeptGradients
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
    # Types of norms that are computed when the next gradient leaves.
    expected: set[float] = field(default_factory=set)
    norms: dict[float, torch.Tensor] = field(default_factory=dict)  # on the device, by type
    has_changed: bool = False  # on the host, since it has left
    changes: list[GradientChange] = field(default_factory=list)


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
        self._last: GradientChange | None = None  # one number changes many gradients
        self._kept = KeptGradients()

    def _of(self, shard: Shard) -> _Departed:
        return self._departed.setdefault(shard.shard_id, _Departed(shard))

    @property
    def kept(self) -> KeptGradients:
        """Those that stay on the device too."""
        return self._kept

    def note_left(self, shard: Shard, gradient: torch.Tensor) -> None:
        """`gradient` leaves the device, in place of any that was there. Nobody changes it."""
        self.forget(shard)
        if self._kept.note_gradient(shard):
            self._kept.keep(shard, gradient)
            return
        with self._lock:
            expected = list(self._of(shard).expected)
        norms = {norm_type: norm_of(gradient, norm_type) for norm_type in expected}
        with self._lock:
            # A norm that nobody asks for is the last.
            self._departed[shard.shard_id] = _Departed(shard, norms=norms)

    def total(self, shard: Shard, part: torch.Tensor) -> torch.Tensor | None:
        """The gradient with `part`, on the device, if it is kept there; otherwise None, and the
        host adds: see `note_added`."""
        kept = self._kept.take(shard)
        if kept is None:
            return None
        try:
            return kept + part
        except torch.OutOfMemoryError:
            self._kept.lend(0)
            return None

    def note_added(self, shard: Shard) -> None:
        """The host is about to add one to it."""
        self._kept.note_gradient(shard)
        self.note_use(shard, writes=True)

    def forget(self, shard: Shard) -> None:
        """The gradient is dropped, or another one comes from the host."""
        with self._lock:
            self._departed[shard.shard_id] = _Departed(shard, self._of(shard).expected)
            self._kept.drop(shard)

    def note_use(self, shard: Shard, *, writes: bool) -> None:
        """Somebody is about to use it in its slot, once `Departures.wait_for` returns."""
        for change in self._take_changes(shard):
            self._departures.change(shard, change, self._lease(shard))
        if writes:
            with self._lock:
                found = self._of(shard)
                found.has_changed = True
                self._forget_value(found)

    def _forget_value(self, found: _Departed) -> None:
        """Its norms and its copy on the device are those of the value of before."""
        found.norms.clear()
        self._kept.drop(found.shard)

    def norm(self, shard: Shard, norm_type: float) -> torch.Tensor:
        """Its norm, as torch computes it on the device."""
        with self._lock:
            found = self._of(shard)
            if not found.has_changed and not found.changes:
                found.expected.add(norm_type)
            if norm_type in found.norms:
                return found.norms[norm_type]
        return norm_of(self._there(shard), norm_type)

    def multiply(self, shard: Shard, factor: torch.Tensor) -> None:
        """Multiplies it, as torch does on the device."""
        if factor.dtype == shard.dtype:
            self._note_change(shard, ChangeKind.multiply, factor)
            return
        # Devices differ in the type that they multiply in.
        there = self._there(shard)
        torch._foreach_mul_([there], factor.to(self._device))
        self._departures.overwrite(shard, there, self._lease(shard))
        with self._lock:
            found = self._of(shard)
            self._forget_value(found)
            found.changes.clear()

    def unscale(self, shard: Shard, inverse: torch.Tensor) -> None:
        """As a GradScaler, which has checked it."""
        self._note_change(shard, ChangeKind.unscale, inverse)

    def divide(self, shard: Shard, scale: torch.Tensor) -> None:
        """As a fused optimizer under a GradScaler does."""
        self._note_change(shard, ChangeKind.divide, scale)

    def _note_change(self, shard: Shard, kind: ChangeKind, number: torch.Tensor) -> None:
        with self._lock:
            if self._last is None or not self._last.is_by(kind, number):
                self._last = GradientChange(kind, number)
            found = self._of(shard)
            self._forget_value(found)
            found.changes.append(self._last)

    def change_before_step(self) -> None:
        """A step is about to be sent by the thread, behind what this gives it to do."""
        with self._lock:
            found = [each.shard for each in self._departed.values() if each.changes]
            self._last = None
        for shard in found:
            lease = partial(self._lease_before_step, shard)
            for change in self._take_changes(shard):
                self._departures.change_later(change, lease)

    def _take_changes(self, shard: Shard) -> list[GradientChange]:
        with self._lock:
            found = self._of(shard)
            changes, found.changes = found.changes, []
            return changes

    def _there(self, shard: Shard) -> torch.Tensor:
        """A copy of the gradient on the device."""
        with self._lock:
            found = self._of(shard)
            has_changed, changes = found.has_changed, list(found.changes)
        if has_changed:
            self._departures.wait_for(shard)
        there = self._departures.bring_back(shard, self._lease(shard))
        for change in changes:
            change.make_there(there)
        return there

    def _lease(self, shard: Shard) -> Callable[[], torch.Tensor]:
        return partial(self._leases().gradient, shard, MODE_WRITE)

    def _lease_before_step(self, shard: Shard) -> torch.Tensor:
        try:
            return self._leases().gradient_before_step(shard)
        except MemdError as error:
            raise retold(
                error,
                f"job {self._job!r}: the gradient of {shard.label!r} could not be scaled, so call "
                f"optimizer.zero_grad() and repeat the batch: {error}",
            ) from error


@torch.no_grad()
def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """As `torch.nn.utils.get_total_norm` computes that of each tensor."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm
