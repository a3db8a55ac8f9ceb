"""The gradient of a parameter, kept in the arena once autograd has accumulated it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.core.leases import MODE_READ, MODE_WRITE
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters.assigned import AssignedGradient
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.shared_gradient import SharedGradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import ParameterLeases
    from memd_client.core.ranks import Ranks


class GradientBytes:
    """The bytes that `p.grad` and its views show: the gradient in its slot, and a copy of its own
    once a step or `zero_grad()` has ended that. The slot's lock serialises.
    """

    def __init__(self, slot: GradientSlot, job: Job) -> None:
        self._shard = slot.shard
        # None once there is a copy: a gradient that is kept must not keep the session.
        self._slot: tuple[GradientSlot, Job] | None = slot, job
        self._copy: torch.Tensor | None = None
        self._is_copy_changed = False  # torch counts no change that is made below autograd
        self._pinned: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return f"the gradient of {self._shard.label!r}"

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        """Host memory, wherever the parameter is used."""
        return torch.device("cpu")

    @property
    def is_gradient(self) -> bool:
        """See `lazy.Source`."""
        return True

    @property
    def is_read_only(self) -> bool:
        return False

    @property
    def takes_memory_writes(self) -> bool:
        return True

    @property
    def has_ended(self) -> bool:
        """See `lazy.Source`."""
        return self._copy is not None

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    @property
    def slot(self) -> GradientSlot | None:
        """The gradient that they are; None once that has ended."""
        return self._slot[0] if self._slot is not None else None

    @contextmanager
    def using(self, *, writes: bool) -> Iterator[torch.Tensor]:
        """See `lazy.Source`."""
        yield self._bytes(writes=writes)
        slot = self._slot
        if writes and slot is not None:
            slot[0].show_in_assigned(slot[1].leases_of(self._shard))

    def memory(self) -> torch.Tensor:
        """See `lazy.Source`."""
        return self._bytes(writes=True)

    def pin(self) -> None:
        """See `lazy.Source`."""
        self._pinned = self._bytes(writes=True)

    def keep_copy(self) -> None:
        """The gradient in the slot ends."""
        self._copy = self._bytes(writes=False).clone()
        self._is_copy_changed = False
        self._slot = self._pinned = None

    def return_to(self, slot: GradientSlot, job: Job) -> None:
        """The gradient in the slot has not ended after all. A copy that was changed since stays."""
        if self._copy is not None and not self._is_copy_changed:
            self._slot, self._copy = (slot, job), None

    def _bytes(self, *, writes: bool) -> torch.Tensor:
        slot = self._slot
        if slot is not None:
            if writes:
                slot[1].rank_gradients.refuse_change(self._shard, "an operation on p.grad")
            with ExitStack() as held:
                slot[0].hold_still(held)
                if self._copy is None:
                    leases = slot[1].leases_of(self._shard)
                    slot[0].follow_assigned(leases, changes=writes)
                    return slot[0].tensor(leases) if writes else slot[0].read(leases)
        assert self._copy is not None
        self._is_copy_changed |= writes
        return self._copy


class GradientSlot:
    """The gradient of one parameter, in the parameter's dtype and shape. `present` from the first
    accumulation until a step consumes it or it is dropped. Any thread may call.

    `zero_grad(set_to_none=False)` leaves zeros where a step has taken a gradient. Its slot may be
    the step's still, so they are due, and come into the slot when somebody needs them there.
    """

    def __init__(self, shard: Shard, job: Job) -> None:
        self._shard = shard
        self._job = job
        self._lock = RLock()
        self._present = False
        # A step took the gradient, and nobody has dropped it since: plain PyTorch would have it.
        self._taken = False
        self._are_zeros_due = False  # the gradient is zero, and not in the slot yet
        self._is_zero = False  # it is in the slot, and nobody has changed it since zero_grad()
        self._is_unscaled = False
        # The tensor that `p.grad` returned, which is returned again for as long as somebody holds
        # it or a view of it, and the bytes that they show.
        self._shown: weakref.ref[LazyTensor] | None = None
        self._bytes: weakref.ref[GradientBytes] | None = None
        # Both, as they were before the last step.
        self._ended: tuple[weakref.ref[LazyTensor] | None, weakref.ref[GradientBytes] | None]
        self._ended = None, None
        # The storage of a lease for writing that an operation, or somebody who asked for the memory
        # itself, uses. There can be only one. torch keeps its Python object while it lives.
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self._assigned: AssignedGradient | None = None
        self._shared: SharedGradient | None = None  # with those of other parameters

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def present(self) -> bool:
        return self._present or self._are_zeros_due

    @property
    def are_zeros_due(self) -> bool:
        """It is zero, and not in the slot yet."""
        return self._are_zeros_due

    @property
    def has_come(self) -> bool:
        """There is one, and it is not only the zeros of `zero_grad(set_to_none=False)`."""
        return self._present and not self._is_zero

    @property
    def is_sealed(self) -> bool:
        """An open step has it."""
        return self._job.steps.open.is_sealed(self._shard)

    @property
    def would_repeat(self) -> bool:
        """In plain PyTorch a step would find the gradient that the last step took."""
        return self._taken

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed, other threads neither add to it nor lease it."""
        held.enter_context(self._lock)

    @torch.no_grad()
    def accumulate(self, gradient: torch.Tensor, leases: ParameterLeases) -> None:
        """Adds `gradient` in its dtype, as torch adds to `p.grad`."""
        self._check(gradient)
        if gradient.requires_grad:
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} has a graph of its own, which memd does "
                "not keep in p.grad; instead of backward(create_graph=True), use "
                "torch.autograd.grad(..., create_graph=True)"
            )
        with self._lock:
            is_first = not self.has_come
            if self._job.ranks.are_several:
                if self._present:
                    self._job.rank_gradients.refuse_second(self._shard)
                _add_part(self._shard, gradient, leases, self._job.ranks)
                self._present = True
            elif self._present and self._shard.is_on_device:
                self._prepare_change(leases)
                if self._storage is not None and self._storage() is not None:
                    # Somebody holds the memory, and sees the sum there.
                    self._leased(leases).add_(gradient.cpu())
                else:
                    leases.add_gradient(self._shard, gradient)
            elif self._present:
                self.change(leases).add_(gradient)
                self.show_in_assigned(leases)
            else:
                # With zeros, so that -0.0 becomes 0.0 as in torch.
                self._overwrite(gradient + 0.0 if self._are_zeros_due else gradient, leases)
            leases.gradient_order.came(self, is_first=is_first)

    def note_sum(self) -> None:
        """Other ranks have made the gradient, and this one has not."""
        self._present = True

    @torch.no_grad()
    def replace(self, gradient: torch.Tensor, leases: ParameterLeases) -> None:
        """For `p.grad = gradient`."""
        self._check(gradient)
        self._job.rank_gradients.refuse_change(self._shard, "p.grad = ...")
        source = _source_of(gradient)
        with self._lock:
            if source is self:
                self._refuse_part_of_itself(gradient)
                return
            self.refuse_if_in_use("p.grad = ...")
            shared = assigned = None
            if source is not None:
                assert isinstance(gradient, LazyTensor)
                shared = source.share()
                assigned = source.assigned_under(gradient)
            self._end_shown()
            self._assigned = None
            self._overwrite(gradient, leases)
            self._taken = False
            if shared is not None:
                shared.join(self)
                self._shared = shared
            if type(gradient) is torch.Tensor and not gradient.is_inference():
                assigned = AssignedGradient(gradient)
            self._assigned = assigned

    def _refuse_part_of_itself(self, view: torch.Tensor) -> None:
        """`p.grad = view`, a view of it. All of it is what is there already."""
        if not view.is_contiguous() or view.storage_offset():
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} cannot become a view of itself with "
                "another order of elements, whose changes memd would not see; assign a clone()"
            )

    @torch.no_grad()
    def follow_assigned(self, leases: ParameterLeases, *, changes: bool = False) -> None:
        """Before the gradient is used: takes what was changed in the tensor that was assigned.

        Raises:
            MemdError: `p.grad` has changed too.
        """
        with self._lock:
            found = self._assigned
            if found is None:
                return
            gradient = found.living
            if gradient is None:
                self._assigned = None
                return
            if found.is_changed:
                if found.is_left:
                    raise MemdError(
                        f"the gradient of {self._shard.label!r} and the tensor that was assigned "
                        "to it have both changed since, and are two in memd; change p.grad alone, "
                        "or assign the tensor again"
                    )
                self._begin_change()
                found.note_taken()
                leases.overwrite_gradient(self._shard, gradient)
            if changes:
                found.leave()

    def show_in_assigned(self, leases: ParameterLeases) -> None:
        """The gradient has changed: the tensor that was assigned has the same value."""
        with self._lock:
            if self._assigned is not None and self._present:
                self._assigned.show(self._leased(leases))

    @torch.no_grad()
    def set_to_zero(self) -> None:
        """As torch's `zero_grad(set_to_none=False)`: a gradient that was never computed stays
        away."""
        if self.present or self._taken:
            self._job.rank_gradients.refuse_change(self._shard, "zero_grad(set_to_none=False)")
        with self._lock:
            if self._present:
                leases = self._job.gradient_leases_of(self._shard)
                self.change(leases).zero_()
                self.show_in_assigned(leases)
                self._is_unscaled, self._is_zero = False, True
            elif self._taken:
                self._begin_change()
                self._are_zeros_due = True
            self._taken = False

    @torch.no_grad()
    def put_zeros(self) -> None:
        """Puts zeros that are due into the slot."""
        with self._lock:
            if self._are_zeros_due:
                leases = self._job.gradient_leases_of(self._shard)
                self._overwrite(torch.zeros(self._shard.shape, dtype=self._shard.dtype), leases)
                self._is_zero = True

    def unscale(self, scale: torch.Tensor, leases: ParameterLeases) -> None:
        """Divides it by `scale`, unless that was done since it came."""
        with self._lock:
            if not self._is_unscaled:
                self.change(leases).div_(scale)
                self.show_in_assigned(leases)
                self._is_unscaled = True

    def refuse_change(self) -> None:
        """Before gradients of several parameters change, all or none.

        Raises:
            MemdError: it is another parameter's too.
        """
        with self._lock:
            if self._shared is not None:
                self._shared.refuse_change(self)

    @torch.no_grad()
    def multiply(self, factor: torch.Tensor, leases: ParameterLeases) -> None:
        with self._lock:
            self.change(leases).mul_(factor)
            self.show_in_assigned(leases)

    def show(self) -> LazyTensor:
        """Returns `p.grad`. Only while `present`."""
        with self._lock:
            shown = self._shown() if self._shown is not None else None
            if shown is None:
                found = GradientBytes(self, self._job)
                shown = LazyTensor.over(found)
                self._shown, self._bytes = weakref.ref(shown), weakref.ref(found)
            return shown

    def _bytes_shown(self) -> GradientBytes | None:
        return self._bytes() if self._bytes is not None else None

    def is_shown_by(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is what `p.grad` returns."""
        return self.present and self._shown is not None and self._shown() is tensor

    def change(self, leases: ParameterLeases) -> torch.Tensor:
        """As `tensor`, to change in place what `p.grad` shows."""
        self._prepare_change(leases)
        return self.tensor(leases)

    def _prepare_change(self, leases: ParameterLeases) -> None:
        """Before what `p.grad` shows is changed in place."""
        self._begin_change()
        self.follow_assigned(leases, changes=True)
        shown = self._shown() if self._shown is not None else None
        if shown is not None:
            shown.note_change()

    def tensor(self, leases: ParameterLeases) -> torch.Tensor:
        """The gradient itself, to be changed. Only while `present`."""
        with self._lock:
            # First: a caller that keeps the error must not keep a lease with it.
            self.put_zeros()
            self._begin_change()
            return self._leased(leases)

    def _begin_change(self) -> None:
        """Before the gradient is changed in place."""
        self.refuse_change()
        self._is_zero = False

    def share(self) -> SharedGradient:
        """Those that have its gradient, or will: it is in the slot, as `p.grad` shows it.

        Raises:
            MemdError: somebody holds the memory of `p.grad` itself, and changes of that would not
                show in another parameter's.
        """
        with self._lock:
            if self._storage is not None and self._storage() is not None:
                raise MemdError(
                    f"the memory of the gradient of {self._shard.label!r} is still held (numpy(), "
                    "untyped_storage() or data_ptr() of p.grad), and the gradient cannot become "
                    "another parameter's too; drop it before, or assign p.grad.clone()"
                )
            # Before it joins: a gradient that is put into the slot leaves those it was shared with.
            self.put_zeros()
            self.follow_assigned(self._job.leases_of(self._shard))
            if self._shared is None:
                self._shared = SharedGradient()
                self._shared.join(self)
            return self._shared

    def assigned_under(self, view: LazyTensor) -> AssignedGradient | None:
        """For `q.grad = view`, a view of this gradient: in torch that shows the tensor that was
        assigned to this one, too. None if there is none."""
        with self._lock:
            return self._assigned.under(view, self._shard.name) if self._assigned else None

    def _leave_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave(self)

    def _leased(self, leases: ParameterLeases) -> torch.Tensor:
        """The gradient itself, under a lease for writing."""
        with self._lock:
            self.put_zeros()
            storage = self._storage() if self._storage is not None else None
            if storage is not None:
                flat = torch.empty(0, dtype=self._shard.dtype).set_(storage)
                # detach(): a view would keep the tensor that it is a view of.
                return flat[: self._shard.element_count].view(self._shard.shape).detach()
            lease = leases.gradient(self._shard, MODE_WRITE)
            self._storage = weakref.ref(lease.untyped_storage())
            return lease

    def read(self, leases: ParameterLeases) -> torch.Tensor:
        """The gradient for reading, by many at a time. Only while `present`."""
        self._job.rank_gradients.complete("p.grad is read")
        with self._lock:
            self.put_zeros()
            self.follow_assigned(leases)
            if self._storage is not None and self._storage() is not None:
                return self._leased(leases)
            return leases.gradient(self._shard, MODE_READ)

    def refuse_if_in_use(self, what: str) -> None:
        """Before `what` ends the gradient: its memory would keep the lease, and the next backward
        would wait for it.

        Raises:
            MemdError: somebody holds the memory of `p.grad` itself.
        """
        with self._lock:
            storage = self._storage() if self._storage is not None else None
            if storage is None:
                return
            found = self._bytes_shown()
            # Its Python object counts, and the tensor that keeps an address valid.
            is_pinned = found is not None and found.is_pinned
            if not is_pinned or torch._C._storage_Use_Count(storage._cdata) > 2:
                raise MemdError(
                    f"the memory of the gradient of {self._shard.label!r} is still held (numpy() "
                    f"or untyped_storage() of p.grad), and {what} ends the gradient; clone what "
                    "you keep, or drop it before"
                )

    def drop(self, what: str) -> bool:
        """The user drops it, by `what`. Returns whether there was one."""
        if self._present and what == "p.grad = None":
            self._job.rank_gradients.refuse_change(self._shard, what)
        with self._lock:
            if self._present:
                self.refuse_if_in_use(what)
            was_present = self._present
            self.forget()
            self._leave_shared()
            self._taken = False
            return was_present

    def note_absence(self) -> None:
        """The user was told that there is none."""
        self._taken = False

    def take(self) -> None:
        """A step consumed the gradient."""
        with self._lock:
            self._ended = None, None  # if this one was not shown, what ended before is not of it
            self.forget()
            self._taken = True

    def _end_shown(self) -> None:
        """Somebody may hold what `p.grad` returned, or a view of it: that keeps the value."""
        if self._bytes is not None:
            with self._lock:
                found = self._bytes_shown()
                if found is not None:
                    found.keep_copy()
                self._ended = self._shown, self._bytes
                self._shown = self._bytes = self._storage = None

    def forget(self) -> None:
        """There is none any more."""
        with self._lock:
            self._end_shown()
            self._present = self._are_zeros_due = self._is_zero = False
            self._assigned = None

    def take_back(self) -> None:
        """The step that took it was not made: memd has it as before."""
        # Without the lock: a thread that holds it may wait, in a lease, for this step to settle.
        self._shown, self._bytes = self._ended
        found = self._bytes_shown()
        if found is not None:
            found.return_to(self, self._job)
        self._present = True
        self._taken = self._are_zeros_due = False

    def _overwrite(self, gradient: torch.Tensor, leases: ParameterLeases) -> None:
        self._leave_shared()
        leases.overwrite_gradient(self._shard, gradient)
        self._present, self._are_zeros_due = True, False
        self._is_unscaled = self._is_zero = False

    def _check(self, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} is sparse; memd takes dense gradients: "
                "build its nn.Embedding with sparse=False"
            )
        if gradient.dtype != self._shard.dtype or gradient.shape != self._shard.shape:
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} has another shape or dtype than the "
                f"parameter: {list(gradient.shape)} {gradient.dtype}, {list(self._shard.shape)} "
                f"{self._shard.dtype}"
            )


def _add_part(shard: Shard, gradient: torch.Tensor, leases: ParameterLeases, ranks: Ranks) -> None:
    """This rank's part in the average. The daemon lets ranks add in their order."""
    part = gradient * (1.0 / ranks.world_size)  # in its dtype, as DistributedDataParallel does
    if ranks.is_first:
        leases.overwrite_gradient(shard, part)
    else:
        leases.add_gradient(shard, part)


def _source_of(gradient: torch.Tensor) -> GradientSlot | None:
    """For `p.grad = gradient`: the slot whose gradient this is, or a view of it.

    Raises:
        InvalidArgument: that gradient has ended. In torch both would be one tensor, still.
    """
    source = gradient.source if isinstance(gradient, LazyTensor) else None
    if not isinstance(source, GradientBytes):
        if source is not None and source.is_gradient:
            raise InvalidArgument(
                f"{source.name} is in memd in tiles, and another parameter's grad cannot share "
                "them; assign its clone()"
            )
        return None
    slot = source.slot
    if slot is None:
        raise InvalidArgument(
            f"{source.name} has ended, by a step, zero_grad() or an assignment, and what was kept "
            "of it cannot become p.grad, since changes of one would not show in the other; assign "
            "its clone()"
        )
    return slot
