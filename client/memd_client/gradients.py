"""Where a parameter's gradient lies: in the arena, from the moment autograd has accumulated it."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.errors import InvalidArgument
from memd_client.leases import MODE_READ, MODE_WRITE

if TYPE_CHECKING:
    from contextlib import ExitStack

    from memd_client.leases import Leases
    from memd_client.shard import Shard


class GradientSlot:
    """The gradient of one parameter, in the parameter's dtype and shape. Any thread may use it.

    `present` from the first accumulation until a step consumed it or it was dropped.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._lock = RLock()
        self._present = False
        # What `p.grad` returned: the same tensor for as long as somebody holds it, because a lease
        # for writing is alone.
        self._held: weakref.ref[torch.Tensor] | None = None

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def present(self) -> bool:
        return self._present

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed other threads neither add to it nor lease it."""
        held.enter_context(self._lock)

    @torch.no_grad()
    def accumulate(self, gradient: torch.Tensor, leases: Leases) -> None:
        """Adds `gradient` in its own dtype, as torch adds to `p.grad`."""
        self._check(gradient)
        with self._lock:
            is_first = not self._present
            if is_first:
                self._overwrite(gradient, leases)
            else:
                self.tensor(leases).add_(gradient)
            leases.gradient_order.came(self, is_first=is_first)

    @torch.no_grad()
    def replace(self, gradient: torch.Tensor, leases: Leases) -> None:
        """What `p.grad = gradient` does."""
        self._check(gradient)
        with self._lock:
            self.let_go()
            self._overwrite(gradient, leases)

    def tensor(self, leases: Leases) -> torch.Tensor:
        """The gradient itself, for reading and changing in place. Only where `present`."""
        with self._lock:
            held = self._held() if self._held is not None else None
            if held is None:
                held = leases.gradient(self._shard, MODE_WRITE)
                self._held = weakref.ref(held)
            return held

    def read(self, leases: Leases) -> torch.Tensor:
        """The gradient for reading only: many may do so at a time. Only where `present`."""
        with self._lock:
            held = self._held() if self._held is not None else None
            return held if held is not None else leases.gradient(self._shard, MODE_READ)

    def let_go(self) -> None:
        """Ends the lease of whoever still holds what `p.grad` returned: their tensor goes on with a
        copy of its own.
        """
        with self._lock:
            held = self._held() if self._held is not None else None
            if held is not None:
                held.data = held.detach().clone()
            self._held = None

    def forget(self) -> None:
        """The gradient is gone: a step consumed it, or it was dropped."""
        with self._lock:
            self.let_go()
            self._present = False

    def take_back(self) -> None:
        """The step that had it came to nothing: memd holds it as before."""
        # Without the lock: a thread that holds it may be waiting in a lease to hear of this.
        self._present = True

    def _overwrite(self, gradient: torch.Tensor, leases: Leases) -> None:
        leases.overwrite_gradient(self._shard, gradient)
        self._present = True

    def _check(self, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise InvalidArgument(
                f"the gradient of {self._shard.name!r} is sparse; memd takes dense gradients: "
                "build its nn.Embedding with sparse=False"
            )
        if gradient.dtype != self._shard.dtype or gradient.shape != self._shard.shape:
            raise InvalidArgument(
                f"the gradient of {self._shard.name!r} has another shape or dtype than the "
                f"parameter: {list(gradient.shape)} {gradient.dtype}, {list(self._shard.shape)} "
                f"{self._shard.dtype}"
            )
