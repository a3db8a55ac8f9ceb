"""The gradient of a parameter, kept in the arena once autograd has accumulated it."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.core.leases import MODE_READ, MODE_WRITE
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters import changes_of_ranks
from memd_client.parameters.assigned import AssignedGradient
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.shared_gradient import SharedGradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import GradientLeases

# gloo's thread lets go of the tensors of a collective after it has woken who waits for that: on two
# busy processors some milliseconds later.
_LET_GO_S = 0.5
_LOOK_S = 0.001


class GradientBytes:
    """The bytes that `p.grad` and its views show: the gradient in its slot, and a copy of its own
    once a step or `zero_grad()` has ended that. The slot's lock serialises.
    """

    def __init__(self, slot: GradientSlot, job: Job) -> None:
        self._shard = slot.shard
        # None once there is a copy: a gradient that is kept must not keep the session.
        self._slot: tuple[GradientSlot, Job] | None = slot, job
        self._copy: torch.Tensor | None = None
        self._is_lost = False  # it was void, or the ranks' differed, when it ended
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
        return self._copy is not None or self._is_lost

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    @property
    def slot(self) -> GradientSlot | None:
        """The gradient that they are; None once that has ended."""
        return self._slot[0] if self._slot is not None else None

    @property
    def job(self) -> Job | None:
        """The job that has it; None once that has ended."""
        return self._slot[1] if self._slot is not None else None

    @contextmanager
    def using(self, *, writes: bool) -> Iterator[torch.Tensor]:
        """See `lazy.Source`."""
        slot = self._slot
        if writes and slot is not None and slot[1].rank_gradients.shares(self._shard):
            with changes_of_ranks.changing(*slot) as value:
                yield value
            return
        yield self._bytes(writes=writes)
        slot = self._slot
        if writes and slot is not None:
            slot[0].show_in_assigned(slot[1].leases_of(self._shard))

    def memory(self) -> torch.Tensor:
        """See `lazy.Source`."""
        self._refuse_memory()
        return self._bytes(writes=True)

    def pin(self) -> None:
        """See `lazy.Source`."""
        self._refuse_memory()
        self._pinned = self._bytes(writes=True)

    def _refuse_memory(self) -> None:
        if self._slot is not None:
            self._slot[1].rank_gradients.refuse_alone(
                self._shard, "the memory of p.grad itself", "take that of p.grad.clone()"
            )

    def keep_copy(self) -> None:
        """The gradient in the slot ends."""
        self._is_lost = self._slot is not None and self._slot[1].rank_gradients.has_failed
        if not self._is_lost:
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
            with ExitStack() as held:
                slot[0].hold_still(held)
                if self._copy is None:
                    if self._shard.is_on_device:
                        # As in torch, the operation comes after all that is queued: a GradScaler
                        # copies its numbers to where gradients are, and waits for nothing.
                        torch.accelerator.current_stream(self._shard.device).synchronize()
                    leases = slot[1].leases_of(self._shard)
                    slot[0].follow_assigned(leases, changes=writes)
                    return slot[0].tensor(leases) if writes else slot[0].read(leases)
        if self._is_lost:
            raise InvalidArgument(
                f"{self.name} was no average of all ranks when it was dropped, so nothing is kept "
                "of it; take p.grad of the next backward"
            )
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
    def accumulate(self, gradient: torch.Tensor, leases: GradientLeases) -> None:
        """Adds `gradient` in its dtype, as torch adds to `p.grad`."""
        self.check(gradient)
        if gradient.requires_grad:
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} has a graph of its own, which memd does "
                "not keep in p.grad; instead of backward(create_graph=True), use "
                "torch.autograd.grad(..., create_graph=True)"
            )
        with self._lock:
            is_first = not self.has_come
            leases.gradient_order.comes(self)
            if self._job.ranks.are_several:
                if self._assigned is not None:
                    self._assigned.refuse_sum(self._shard.label)
                self._job.rank_gradients.add(self._shard, gradient, is_first=not self._present)
                if self._present:
                    self.prepare_change(leases)
                else:
                    self.note_sum()
            elif self._present and self._shard.is_on_device:
                self.prepare_change(leases)
                if _is_alive(self._storage):  # and its holder sees the sum there
                    self._leased(leases).add_(gradient.cpu())
                else:
                    leases.add_gradient(self._shard, gradient)
                self.show_in_assigned(leases)
            elif self._present:
                self.change(leases).add_(gradient)
                self.show_in_assigned(leases)
            else:
                # With zeros, so that -0.0 becomes 0.0 as in torch.
                self._overwrite(gradient + 0.0 if self._are_zeros_due else gradient, leases)
            leases.gradient_order.came(self, is_first=is_first)

    def note_sum(self) -> None:
        """There is a gradient of this rank, or of others."""
        self._present, self._is_unscaled = True, False

    @torch.no_grad()
    def replace(self, gradient: torch.Tensor, leases: GradientLeases) -> None:
        """For `p.grad = gradient`."""
        if self._job.ranks.are_several:
            changes_of_ranks.replace(self, self._job, gradient)
            is_plain = type(gradient) is torch.Tensor and not gradient.is_inference()
            self._assigned = AssignedGradient(gradient) if is_plain else None
            self._taken = False
            return
        self.check(gradient)
        source = _source_of(gradient)
        with self._lock:
            if source is self:
                _refuse_part_of_itself(gradient, self._shard)
                return
            self.refuse_if_in_use("p.grad = ...")
            shared = assigned = None
            if source is not None:
                assert isinstance(gradient, LazyTensor)
                shared = source.share()
                assigned = source.assigned_under(gradient)
            self.end_shown()
            self._assigned = None
            self._overwrite(_at_rest(gradient), leases)
            self._taken = False
            if shared is not None:
                shared.join(self)
                self._shared = shared
            if type(gradient) is torch.Tensor and not gradient.is_inference():
                assigned = AssignedGradient(gradient)
            self._assigned = assigned

    @torch.no_grad()
    def follow_assigned(self, leases: GradientLeases, *, changes: bool = False) -> None:
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
                if self._job.ranks.are_several:
                    raise InvalidArgument(
                        f"the tensor that was assigned to the gradient of {self._shard.label!r} "
                        "has changed since, on this rank at least; change p.grad, or assign the "
                        "tensor again, on all ranks"
                    )
                if found.is_left:
                    raise MemdError(
                        f"the gradient of {self._shard.label!r} and the tensor that was assigned "
                        "to it have both changed since, and are two in memd; change p.grad alone, "
                        "or assign the tensor again"
                    )
                self._begin_change()
                found.note_taken()
                leases.overwrite_gradient(self._shard, _at_rest(gradient))
            if changes:
                found.leave()

    def show_in_assigned(self, leases: GradientLeases) -> None:
        """The gradient has changed: the tensor that was assigned has the same value."""
        with self._lock:
            if self._assigned is None or not self._present:
                return
            # Other ranks may show it too.
            is_read = self._job.rank_gradients.shares(self._shard)
            self._assigned.show(self.read(leases) if is_read else self._leased(leases))

    @torch.no_grad()
    def set_to_zero(self) -> None:
        """As torch's `zero_grad(set_to_none=False)`: a gradient that was never computed stays
        away."""
        is_shared = self._job.rank_gradients.shares(self._shard)
        if is_shared and (self.present or self._taken):
            self._job.rank_gradients.refuse_alone(
                self._shard, "zero_grad(set_to_none=False)", "let zero_grad() set it to None"
            )
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

    def unscale(self, scale: torch.Tensor, leases: GradientLeases) -> None:
        """Divides it by `scale`, unless that was done since it came."""
        with self._lock:
            if self._is_unscaled:
                return
            if self.is_departed(leases):
                self.prepare_change(leases)
                departed = self._job.unordered_leases.devices.departed(self._shard)
                departed.divide(self._shard, scale)
            else:
                self.change(leases).div_(scale.cpu())
                self.show_in_assigned(leases)
            self._is_unscaled = True

    def is_departed(self, leases: GradientLeases) -> bool:
        """It has left a device, and nobody else sees its slot: changes of it may wait."""
        with self._lock:
            if not self._shard.is_on_device or _is_alive(self._storage) or self._shared is not None:
                return False
            self.put_zeros()
            self.follow_assigned(leases)
            return self._assigned is None

    def refuse_change(self) -> None:
        """Before gradients of several parameters change, all or none.

        Raises:
            MemdError: it is another parameter's too.
        """
        with self._lock:
            if self._shared is not None:
                self._shared.refuse_change(self)

    @torch.no_grad()
    def multiply(self, factor: torch.Tensor, leases: GradientLeases) -> None:
        """Multiplies it as torch does where the parameter is used."""
        with self._lock:
            if self.is_departed(leases):
                self.prepare_change(leases)
                self._job.unordered_leases.devices.departed(self._shard).multiply(
                    self._shard, factor
                )
            else:
                self.change(leases).mul_(factor.cpu())
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

    def change(self, leases: GradientLeases) -> torch.Tensor:
        """As `tensor`, to change in place what `p.grad` shows."""
        self.prepare_change(leases)
        return self.tensor(leases)

    def prepare_change(self, leases: GradientLeases) -> None:
        """Before what `p.grad` shows is changed in place."""
        self._begin_change()
        self.follow_assigned(leases, changes=True)
        shown = self._shown() if self._shown is not None else None
        if shown is not None:
            shown.note_change()

    def tensor(self, leases: GradientLeases) -> torch.Tensor:
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
            if _is_alive(self._storage):
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

    def _leased(self, leases: GradientLeases) -> torch.Tensor:
        """The gradient itself, under a lease for writing."""
        with self._lock:
            self.put_zeros()
            storage = self._storage() if self._storage is not None else None
            if storage is not None:
                flat = torch.empty(0, dtype=self._shard.dtype).set_(storage)
                # detach(): a view would keep the tensor that it is a view of.
                return flat[: self._shard.element_count].view(self._shard.shape).detach()
            if self._job.rank_gradients.has_own(self._shard):
                lease = self._job.rank_gradients.own_sum(self._shard, MODE_WRITE)
            else:
                lease = leases.gradient(self._shard, MODE_WRITE)
            self._storage = weakref.ref(lease.untyped_storage())
            return lease

    def read(self, leases: GradientLeases) -> torch.Tensor:
        """The gradient for reading, by many at a time. Only while `present`."""
        if self._job.rank_gradients.has_own(self._shard):
            self.follow_assigned(leases)
            return self._job.rank_gradients.own_sum(self._shard)
        self._job.rank_gradients.complete("p.grad is read", reads=True)
        with self._lock:
            self.put_zeros()
            self.follow_assigned(leases)
            if _is_alive(self._storage):
                return self._leased(leases)
            return leases.gradient(self._shard, MODE_READ)

    def refuse_if_in_use(self, what: str) -> None:
        """Before `what` ends the gradient: its memory would keep the lease, and the next backward
        would wait for it. Another thread has some time to let go of it.

        Raises:
            MemdError: somebody holds the memory of `p.grad` itself.
        """
        with self._lock:
            end = None
            while _is_held(self._storage, self._bytes_shown()):
                end = end or time.monotonic() + _LET_GO_S
                if time.monotonic() > end:
                    raise MemdError(
                        f"the memory of the gradient of {self._shard.label!r} is still held "
                        f"(numpy() or untyped_storage() of p.grad), and {what} ends the gradient; "
                        "clone what you keep, or drop it before"
                    )
                time.sleep(_LOOK_S)

    def drop(self, what: str) -> bool:
        """The user drops it, by `what`. Returns whether there was one."""
        if self._present and what == "p.grad = None" and self._job.ranks.are_several:
            changes_of_ranks.drop(self, self._job)
        with self._lock:
            if self._present:
                self.refuse_if_in_use(what)
            was_present = self._present
            self.forget()
            if was_present and self._shard.is_on_device:
                self._job.unordered_leases.devices.departed(self._shard).forget(self._shard)
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

    def end_shown(self) -> None:
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
            self.end_shown()
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
        self._job.rank_gradients.note_return()

    def _overwrite(self, gradient: torch.Tensor, leases: GradientLeases) -> None:
        self._leave_shared()
        leases.overwrite_gradient(self._shard, gradient)
        self._present, self._are_zeros_due = True, False
        self._is_unscaled = self._is_zero = False

    def check(self, gradient: torch.Tensor, device: torch.device | None = None) -> None:
        """
        Args:
            device: where the parameter stays, if it stays on one.

        Raises:
            InvalidArgument: it cannot be this parameter's.
        """
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
        device = device or self._shard.device
        if gradient.device.type != "cpu" and gradient.device != device:
            raise InvalidArgument(
                f"the gradient of {self._shard.label!r} is neither on the parameter's device nor "
                f"in host memory: {gradient.device}, {device}"
            )


def whole_gradient(gradient: torch.Tensor) -> GradientBytes | None:
    """None if `gradient` is not `p.grad` of a parameter."""
    source = gradient.source if isinstance(gradient, LazyTensor) else None
    if not isinstance(source, GradientBytes) or source.slot is None:
        return None
    return source if source.slot.is_shown_by(gradient) else None


def _refuse_part_of_itself(view: torch.Tensor, shard: Shard) -> None:
    """`p.grad = view`, a view of it. All of it is what is there already."""
    if not view.is_contiguous() or view.storage_offset():
        raise InvalidArgument(
            f"the gradient of {shard.label!r} cannot become a view of itself with another order of "
            "elements, whose changes memd would not see; assign a clone()"
        )


def _is_alive(storage: weakref.ref[torch.UntypedStorage] | None) -> bool:
    """Somebody who asked for the memory itself may see it and change it."""
    return storage is not None and storage() is not None


def _is_held(memory: weakref.ref[torch.UntypedStorage] | None, shown: GradientBytes | None) -> bool:
    """Somebody holds the memory of `p.grad`, which `shown` shows, itself."""
    storage = memory() if memory is not None else None
    if storage is None:
        return False
    # Its Python object counts, and the tensor that keeps an address valid.
    is_pinned = shown is not None and shown.is_pinned
    return not is_pinned or torch._C._storage_Use_Count(storage._cdata) > 2


def _at_rest(gradient: torch.Tensor) -> torch.Tensor:
    """The program may change an assigned tensor while its bytes are on their way from a device."""
    return gradient.clone() if gradient.device.type != "cpu" else gradient


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
