"""The gradient of a parameter, kept in the arena once autograd has accumulated it."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.errors import InvalidArgument, MemdError
from memd_client.leases import MODE_READ, MODE_WRITE

if TYPE_CHECKING:
    from contextlib import ExitStack

    from memd_client.leases import Leases
    from memd_client.shard import Shard


class GradientSlot:
    """The gradient of one parameter, in the parameter's dtype and shape. `present` from the first
    accumulation until a step consumes it or it is dropped. Any thread may call.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._lock = RLock()
        self._present = False
        # The tensor that `p.grad` returned. It is returned again for as long as somebody holds it,
        # since there can be only one lease for writing.
        self._held: weakref.ref[torch.Tensor] | None = None
        # The storage of that tensor and its views. torch keeps its Python object while it lives.
        self._storage: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def present(self) -> bool:
        return self._present

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed, other threads neither add to it nor lease it."""
        held.enter_context(self._lock)

    @torch.no_grad()
    def accumulate(self, gradient: torch.Tensor, leases: Leases) -> None:
        """Adds `gradient` in its dtype, as torch adds to `p.grad`."""
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
        """For `p.grad = gradient`."""
        self._check(gradient)
        with self._lock:
            self.refuse_if_viewed("p.grad = ...")
            self._end_lease()
            self._overwrite(gradient, leases)

    def tensor(self, leases: Leases) -> torch.Tensor:
        """The gradient itself, to read or change in place. Only while `present`."""
        with self._lock:
            held = self._held() if self._held is not None else None
            if held is None:
                held = leases.gradient(self._shard, MODE_WRITE)
                self._held = weakref.ref(held)
                self._storage = weakref.ref(held.untyped_storage())
            return held

    def read(self, leases: Leases) -> torch.Tensor:
        """The gradient for reading, by many at a time. Only while `present`."""
        with self._lock:
            held = self._held() if self._held is not None else None
            return held if held is not None else leases.gradient(self._shard, MODE_READ)

    def refuse_if_viewed(self, what: str) -> None:
        """Before `what` ends the lease behind `p.grad`: a view of it would keep the lease, and the
        next backward would wait for it.

        Raises:
            MemdError: somebody holds a slice, `detach()` or `.data` of `p.grad`.
        """
        with self._lock:
            storage = self._storage() if self._storage is not None else None
            if storage is None:
                return
            is_held = self._held is not None and self._held() is not None
            # Its Python object counts, and the tensor that `p.grad` returned gets a copy.
            if torch._C._storage_Use_Count(storage._cdata) > 1 + is_held:
                raise MemdError(
                    f"a view of the gradient of {self._shard.name!r} is still held (a slice, "
                    f"detach() or .data of p.grad), and {what} ends the gradient; clone what you "
                    "keep, or drop it before"
                )

    def drop(self, what: str) -> bool:
        """The user drops it, by `what`. Returns whether there was one."""
        with self._lock:
            if self._present:
                self.refuse_if_viewed(what)
            was_present = self._present
            self.forget()
            return was_present

    def _end_lease(self) -> None:
        """Ends the lease behind `p.grad`. A tensor that the user still holds gets a copy."""
        with self._lock:
            held = self._held() if self._held is not None else None
            if held is not None:
                held.data = held.detach().clone()
            self._held = self._storage = None

    def forget(self) -> None:
        """A step consumed the gradient, or it was dropped."""
        with self._lock:
            self._end_lease()
            self._present = False

    def take_back(self) -> None:
        """The step that took it was not made: memd has it as before."""
        # Without the lock: a thread that holds it may wait, in a lease, for this step to settle.
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
