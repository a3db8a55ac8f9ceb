"""Offloaded parameters: where the value is, the gradient, and the number of updates."""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._guards import TracingContext

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.core.leases import MODE_READ
from memd_client.errors import InvalidArgument, MemdError, NotResident
from memd_client.parameters.gradients import GradientSlot
from memd_client.parameters.lazy import NEW_PARAMETER
from memd_client.parameters.residency import Held, Residency, release_all, unseen
from memd_client.parameters.thread_uses import this_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import ExitStack
    from types import FrameType

    from memd_client.connection.shard import Shard
    from memd_client.core.comparisons import Comparison
    from memd_client.core.job import Job
    from memd_client.parameters.early import EarlyUpdates
    from memd_client.parameters.residency import Classes
    from memd_client.transaction.transaction import Transaction

_entries: ByIdentity[torch.Tensor, StreamedParameter] = ByIdentity()

# The entry of an offloaded parameter; None for every other tensor.
streamed = _entries.get
# Autograd accumulates here. A gradient stays only until memd has taken it.
_autograds: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad
_detach: Any = torch._C.TensorBase.detach
_ZERO_GRAD = nn.Module.zero_grad.__code__
_APPLY = vars(nn.Module)["_apply"].__code__


class StreamedParameter:
    """One offloaded parameter. It lives as long as the parameter does."""

    def __init__(
        self,
        parameter: nn.Parameter,
        *,
        shard: Shard,
        update_count: int,
        transaction: Transaction,
        classes: Classes,
    ) -> None:
        self._shard = shard
        self._transaction = transaction
        self._job = transaction.job
        self._gradient = GradientSlot(shard, transaction.job)
        self._update_count = update_count
        self._early: weakref.ref[EarlyUpdates] | None = None
        self._hooked = False
        self._residency = Residency(parameter, shard=shard, job=transaction.job, classes=classes)
        _entries[parameter] = self
        transaction.job.shards.add_parameter(self)
        self.hook_if_trainable(parameter)

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def transaction(self) -> Transaction:
        """The transaction of its session."""
        return self._transaction

    @property
    def job(self) -> Job:
        return self._job

    @property
    def residency(self) -> Residency:
        return self._residency

    def value_on_host(self) -> torch.Tensor:
        """A lease of the value in host memory, wherever it is used."""
        self._job.leases_of(self._shard)  # refuses what a use refuses
        return self._job.unordered_leases.value(self._shard)

    @property
    def gradient(self) -> GradientSlot:
        return self._gradient

    @property
    def parameter(self) -> nn.Parameter | None:
        """None if the module was dropped."""
        return self._residency.parameter

    @property
    def update_count(self) -> int:
        """Adam's t."""
        return self._update_count

    @property
    def early(self) -> EarlyUpdates | None:
        """Told of each gradient, if the optimizer updates parameters during backward."""
        return self._early() if self._early is not None else None

    def update_early(self, early: EarlyUpdates | None) -> None:
        self._early = weakref.ref(early) if early is not None else None

    def hook_if_trainable(self, parameter: torch.Tensor) -> None:
        """Gradients go to memd from now on. torch accepts hooks only for tensors that require a
        gradient.
        """
        if parameter.requires_grad and not self._hooked:
            parameter.register_post_accumulate_grad_hook(take_gradient)
            self._hooked = True

    def set_requires_grad(self, parameter: torch.Tensor, requires_grad: bool) -> None:
        """For `parameter.requires_grad = requires_grad`."""
        if requires_grad:
            self.refuse_if_bytes()
        with torch._C.DisableTorchFunctionSubclass():
            _requires_grad.__set__(parameter, requires_grad)
        self.hook_if_trainable(parameter)

    def refuse_if_bytes(self) -> None:
        """Before it is trained or gets a gradient: the daemon has no room for one of another
        dtype."""
        if self._shard.is_bytes:
            raise InvalidArgument(
                f"job {self._job.name!r}: parameter {self._shard.label!r} stays frozen, since memd "
                f"trains float32 and bfloat16; convert it before offload(): it is "
                f"{self._shard.dtype}"
            )

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed, no other thread fetches the value or touches the gradient."""
        self._residency.hold_still(held)
        self._gradient.hold_still(held)

    def begin_update(self) -> None:
        """A step takes the gradient and will change the value."""
        self._residency.begin_update()
        try:
            self._gradient.take()
        except BaseException:
            self._residency.undo_update()
            raise

    def undo_update(self) -> None:
        """That step was not made: value and gradient are as before."""
        self._gradient.take_back()
        self._residency.undo_update()

    def finish_update(self) -> None:
        """That step is committed."""
        self._residency.show_update()  # may raise, and then this is called again
        self._update_count += 1

    def drop_gradient(self, what: str) -> bool:
        """`what` drops the gradient, and what others have put in its place since it was taken, as
        DistributedDataParallel does. Returns whether memd had one."""
        parameter = self.parameter
        if parameter is not None:
            with torch._C.DisableTorchFunctionSubclass():
                _autograds.__set__(parameter, None)
        return self._gradient.drop(what)

    def forget_gradient(self) -> None:
        """All ranks drop it."""
        self.drop_gradient("zero_grad()")

    def note_sum(self) -> None:
        """Other ranks have made a gradient of it, and this one has not."""
        self._gradient.note_sum()

    def take_writes(self) -> None:
        """Takes what was written through views, or refuses it."""
        self._residency.take_writes()

    def compare_value(self) -> Sequence[Comparison]:
        """Nothing: the arena shows what was written."""
        return ()

    def refuse_writes(self) -> None:
        """Refuses what was written through views."""
        self._residency.take_writes(is_sealed=True)

    def replace_update_count(self, count: int) -> None:
        """The moments were replaced."""
        self._update_count = count


def entry_of(parameter: torch.Tensor) -> StreamedParameter:
    """The entry of a parameter that has one of memd's classes."""
    entry = streamed(parameter)
    if entry is None:
        raise MemdError(f"memd does not know this {type(parameter).__name__}; was it made by hand?")
    return entry


def detached(parameter: torch.Tensor, caller: FrameType) -> torch.Tensor:
    """`parameter.detach()`. `nn.Parameter(parameter)` calls it too, for a parameter over the same
    bytes.

    Raises:
        NotResident: that is the caller. A second parameter would keep bytes that come and go.
    """
    if caller.f_code is NEW_PARAMETER:
        entry = entry_of(parameter)
        raise NotResident(
            f"job {entry.job.name!r}: nn.Parameter(...) of parameter {entry.shard.label!r} would "
            "share its bytes, which are in memd; use nn.Parameter(p.detach().clone()), assign the "
            "parameter itself to tie it, and register parametrizations such as weight_norm before "
            "offload()"
        )
    tensor: torch.Tensor = _detach(parameter)
    return tensor


def refused_swap(parameter: torch.Tensor) -> InvalidArgument:
    """torch would refuse it too, since memd refers to the parameter, and not say why."""
    entry = entry_of(parameter)
    return InvalidArgument(
        f"job {entry.job.name!r}: parameter {entry.shard.label!r} can't be swapped with another, "
        "as torch.__future__.set_swap_module_params_on_conversion(True) asks for; set it to False "
        "after offload(), or convert and load the module before"
    )


@untraced
def take_gradient(parameter: torch.Tensor) -> None:
    """Post-accumulate hook: autograd has just set `grad` or added to it. It holds only what came
    since the last call.
    """
    entry = streamed(parameter)
    if entry is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _autograds.__get__(parameter)
        if gradient is None:
            return
        _autograds.__set__(parameter, None)
    accumulate(entry, gradient)


def accumulate(entry: StreamedParameter, gradient: torch.Tensor) -> None:
    """Autograd has computed `gradient`."""
    job, shard, slot, early = entry.job, entry.shard, entry.gradient, entry.early
    if early is not None and slot.has_come:
        early.refuse_second(job, shard)
    job.rank_gradients.expect(shard, has_gradient=slot.present)
    leases = job.gradient_leases_of(shard)
    slot.accumulate(gradient, leases)
    if early is not None:
        early.gradient_is_final(job, shard, leases)


@untraced
def get_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """`parameter.grad`. A hook that was registered before `take_gradient` calls this first."""
    take_gradient(parameter)
    entry = streamed(parameter)
    if entry is None:
        return None
    if torch.__future__.get_swap_module_params_on_conversion() and (
        sys._getframe(2).f_code is _APPLY  # it reads the gradient before it swaps the parameter
    ):
        raise refused_swap(parameter)
    slot = entry.gradient
    # Plain PyTorch would find the gradient that a step took, and zero it.
    if (slot.would_repeat or slot.are_zeros_due) and is_zeroing(sys._getframe(2)):
        slot.set_to_zero()
        return None
    if not slot.present:
        slot.note_absence()
        return None
    # While torch.compile describes the parameter, it would make a part of the graph of it.
    if TracingContext.try_get() is not None:
        return None
    return slot.show()


def is_zeroing(caller: FrameType) -> bool:
    """Whether a module zeroes its gradients, and keeps them."""
    return caller.f_code is _ZERO_GRAD and not caller.f_locals["set_to_none"]


@untraced
def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """`parameter.grad = value`."""
    if value is parameter:
        raise RuntimeError("can't assign Variable as its own grad")  # torch's words
    with torch._C.DisableTorchFunctionSubclass():
        _autograds.__set__(parameter, None)
    entry = streamed(parameter)
    if entry is None:
        return
    if value is None:
        entry.gradient.drop("p.grad = None")
    elif not entry.gradient.is_shown_by(value):  # as `p.grad += x` assigns it
        entry.refuse_if_bytes()
        entry.gradient.replace(value, entry.job.leases_of(entry.shard))


def bring(parameters: Iterable[torch.Tensor], *, mode: int = MODE_READ) -> Held:
    """Puts the bytes of the offloaded ones in place for this thread, all or none, until
    `release_all` of the result. Those that are not in memory are requested together."""
    with unseen():
        return _bring(parameters, mode)


def _bring(parameters: Iterable[torch.Tensor], mode: int) -> Held:
    held: Held = []
    missing: Held = []
    uses = this_thread.uses
    try:
        for parameter in parameters:
            entry = streamed(parameter)
            if entry is None:
                continue
            residency = entry.residency
            is_there = mode == MODE_READ and residency.fetch_resident(parameter, uses)
            (held if is_there else missing).append((residency, parameter, uses))
        if missing:
            Residency.fetch_together(missing, mode=mode)
            held += missing
    except BaseException:
        release_all(held)
        raise
    return held


@contextmanager
def fetched(parameters: Iterable[torch.Tensor], *, mode: int = MODE_READ) -> Iterator[None]:
    """Inside, the bytes of the offloaded ones are in place for this thread: see `bring`."""
    held = bring(parameters, mode=mode)
    try:
        yield
    finally:
        release_all(held)
