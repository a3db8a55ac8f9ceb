"""An offloaded parameter that an optimizer updates, as one shard or as several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memd_client.device.departed_gradients import norm_of
from memd_client.parameters.parameter import take_gradient
from memd_client.updates.stateful_target import StatefulTarget, UpdatedTarget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from memd_client.connection.shard import Shard
    from memd_client.parameters.early import EarlyUpdates
    from memd_client.parameters.parameter import StreamedParameter
    from memd_client.parameters.tiles import Tiling


class StreamedTarget(UpdatedTarget):
    """An offloaded parameter. Its gradient is in memd already."""

    def __init__(self, entry: StreamedParameter, *, keeps_maximum: bool) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._entry = entry

    @property
    def shard(self) -> Shard:
        return self._entry.shard

    @property
    def stays(self) -> bool:
        return False  # the next lease shows the new value

    @property
    def is_viewed(self) -> bool:
        return self._entry.residency.is_viewed

    @property
    def has_sealed_gradient(self) -> bool:
        return False  # `seal` forgets it

    @property
    def update_count(self) -> int:
        return self._entry.update_count

    def replace_update_count(self, count: int) -> None:
        self._entry.replace_update_count(count)

    def update_early(self, early: EarlyUpdates | None) -> None:
        """From now on `early` is told of each gradient, for as long as it lives."""
        self._entry.update_early(early)

    def take_pending(self) -> None:
        """Takes a gradient that autograd has accumulated."""
        parameter = self._entry.parameter
        if parameter is not None:
            take_gradient(parameter)

    @property
    def has_gradient(self) -> bool:
        return self._entry.gradient.present

    def gradient_for_reading(self) -> torch.Tensor:
        return self._entry.gradient.read(self._entry.job.gradient_leases_of(self.shard))

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """As torch computes it where the parameter is used."""
        job = self._entry.job
        if self._entry.gradient.is_departed(job.gradient_leases_of(self.shard)):
            return job.unordered_leases.devices.departed(self.shard).norm(self.shard, norm_type)
        return norm_of(self.gradient_for_reading().to(self.shard.device), norm_type)

    def refuse_gradient_change(self) -> None:
        """See `GradientSlot.refuse_change`."""
        self._entry.gradient.refuse_change()

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        self._entry.gradient.multiply(factor, self._entry.job.gradient_leases_of(self.shard))

    def follow_multiplied(self, factor: torch.Tensor) -> None:
        """Another rank has multiplied the gradient, which all share, by `factor`."""
        del factor
        leases = self._entry.job.gradient_leases_of(self.shard)
        self._entry.gradient.prepare_change(leases)
        self._entry.gradient.show_in_assigned(leases)

    def unscale(self, scale: torch.Tensor) -> None:
        """Divides the gradient by `scale`, in host memory; once, if the step is not made and asked
        for again."""
        self._entry.gradient.unscale(scale, self._entry.job.gradient_leases_of(self.shard))

    def follow_assigned(self) -> None:
        """Before its gradient is used: see `GradientSlot.follow_assigned`."""
        self._entry.gradient.follow_assigned(self._entry.job.gradient_leases_of(self.shard))

    def drop_gradient(self) -> bool:
        """Returns whether the daemon has to drop it too."""
        return self._entry.drop_gradient("zero_grad()")

    def set_gradient_to_zero(self) -> None:
        self._entry.gradient.set_to_zero()

    def put_zeros(self) -> None:
        """Before a step takes the gradient: zeros that are due are in memd."""
        self._entry.gradient.put_zeros()

    @property
    def would_repeat(self) -> bool:
        """In plain PyTorch a step would find the gradient that the last step took."""
        return self._entry.gradient.would_repeat

    def take_writes(self) -> None:
        self._entry.take_writes()

    def hold_still(self, held: ExitStack) -> None:
        self._entry.hold_still(held)

    def refuse_if_in_use(self) -> None:
        self._entry.residency.refuse_if_in_use("step()")
        self._entry.gradient.refuse_if_in_use("step()")

    def seal(self) -> None:
        """Values that autograd has saved so far are out of date from now on."""
        self._entry.begin_update()

    def hide(self) -> None:
        """Its next use is a lease, which is refused."""

    def show(self) -> None:
        """The next lease shows the new value."""

    def undo(self) -> None:
        self._entry.undo_update()

    def finish(self) -> None:
        self._entry.finish_update()


class TiledTarget(StatefulTarget):
    """An offloaded parameter that is several shards in memd. Steps update its tiles; its gradient
    is one where torch would see one."""

    def __init__(self, tiling: Tiling, tiles: Sequence[StreamedTarget]) -> None:
        self._tiling = tiling
        self._tiles = list(tiles)

    @property
    def shard(self) -> Shard:
        return self._tiling.shard

    @property
    def parts(self) -> Sequence[StreamedTarget]:
        """The targets that a step updates: its tiles."""
        return self._tiles

    @property
    def stays(self) -> bool:
        return False

    @property
    def update_count(self) -> int:
        return self._tiles[0].update_count

    def replace_update_count(self, count: int) -> None:
        for tile in self._tiles:
            tile.replace_update_count(count)

    @property
    def keeps_maximum(self) -> bool:
        return self._tiles[0].keeps_maximum

    def note_maximum(self, *, keeps_maximum: bool) -> None:
        """All have one, or none: a step decides for all of them."""
        for tile in self._tiles:
            tile.note_maximum(keeps_maximum=keeps_maximum)

    def take_pending(self) -> None:
        for tile in self._tiles:
            tile.take_pending()

    @property
    def has_gradient(self) -> bool:
        return any(tile.has_gradient for tile in self._tiles)

    def gradient_for_reading(self) -> torch.Tensor:
        """A copy in this process: torch's norm is a sum over all of it, in order."""
        self._tiling.refuse_changed_assigned()
        whole = torch.empty(self.shard.shape, dtype=self.shard.dtype)
        for tile, (first, end) in zip(self._tiles, self._tiling.rows(), strict=True):
            whole[first:end].copy_(tile.gradient_for_reading())
        return whole

    def follow_assigned(self) -> None:
        """Before its gradient is used: see `Tiling.refuse_changed_assigned`."""
        self._tiling.refuse_changed_assigned()
        for tile in self._tiles:
            tile.follow_assigned()

    def refuse_gradient_change(self) -> None:
        self._tiling.refuse_changed_assigned()
        for tile in self._tiles:
            tile.refuse_gradient_change()

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        for tile in self._tiles:
            tile.multiply_gradient(factor)
        self._tiling.change_assigned(lambda assigned: assigned.mul_(factor))

    def follow_multiplied(self, factor: torch.Tensor) -> None:
        for tile in self._tiles:
            tile.follow_multiplied(factor)
        self._tiling.change_assigned(lambda assigned: assigned.mul_(factor))

    def refuse_changed_assigned(self) -> None:
        """See `Tiling.refuse_changed_assigned`."""
        self._tiling.refuse_changed_assigned()

    def forget_assigned(self) -> None:
        """See `Tiling.forget_assigned`."""
        self._tiling.forget_assigned()
