"""The parameters of an optimizer: offloaded ones, and those that stay in this process."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.base.identity import ByIdentity
from memd_client.base.overlaps import refuse_overlaps
from memd_client.connection.shard import MAXIMUM, MOMENTS, Shard, shard_spec
from memd_client.errors import InvalidArgument, MemdError, NotYet
from memd_client.parameters.gradients import GradientSlot
from memd_client.parameters.hidden import hide, show
from memd_client.parameters.parameter import StreamedParameter, streamed, take_gradient
from memd_client.parameters.tiles import entries_of, is_in_memd, tiling_of
from memd_client.parameters.unnamed import unnamed
from memd_client.parameters.views import is_same_bits
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from memd_client.core.job import Job
    from memd_client.parameters.early import EarlyUpdates
    from memd_client.parameters.tiles import Tiling
    from memd_client.transaction.moments import Moments
    from memd_client.transaction.transaction import Transaction

_DTYPES = (torch.float32, torch.bfloat16)


class StatefulTarget(ABC):
    """A parameter and what torch's optimizers have in `state` of it. Its first update decides
    whether there is a maximum, by the group's `amsgrad` of that moment; later ones leave it so.
    """

    @property
    @abstractmethod
    def shard(self) -> Shard: ...

    @property
    def parts(self) -> Sequence[Part]:
        """The targets that a step updates: itself, or its tiles."""
        return [self]  # type: ignore[list-item] # only the tiled one is none, and overrides this

    @property
    @abstractmethod
    def update_count(self) -> int:
        """Adam's t. The step in flight counts once it is settled."""

    @abstractmethod
    def replace_update_count(self, count: int) -> None: ...

    @property
    def is_stored(self) -> bool:
        """The daemon knows the parameter, and has its moments."""
        return True

    @property
    @abstractmethod
    def keeps_maximum(self) -> bool:
        """There is a maximum, or will be from the first update on, as far as memd was told."""

    @abstractmethod
    def note_maximum(self, *, keeps_maximum: bool) -> None:
        """Memd was told before the first update."""

    def state(self, moments: Moments, *, amsgrad: bool) -> dict[str, torch.Tensor]:
        """In torch's format, of a group with this setting. No bytes are read."""
        names = _moments(has_maximum=self.has_maximum(amsgrad=amsgrad))
        return moments.refer(self.shard, self.update_count, names)

    def note_state(self, update_count: int, *, keeps_maximum: bool) -> None:
        """A load has replaced its moments."""
        self.note_maximum(keeps_maximum=keeps_maximum)
        self.replace_update_count(update_count)

    def has_maximum(self, *, amsgrad: bool) -> bool:
        """Whether torch's state of it has a maximum, in a group with this setting."""
        return self.keeps_maximum if self.update_count else amsgrad


def _moments(*, has_maximum: bool) -> Sequence[str]:
    return MOMENTS if has_maximum else [name for name in MOMENTS if name != MAXIMUM]


class UpdatedTarget(StatefulTarget):
    """A target that a step updates: a parameter in one piece, or a tile."""

    def __init__(self, *, keeps_maximum: bool) -> None:
        self._keeps_maximum = keeps_maximum

    @property
    def keeps_maximum(self) -> bool:
        """See `StatefulTarget.keeps_maximum`."""
        return self._keeps_maximum

    def note_maximum(self, *, keeps_maximum: bool) -> None:
        """See `StatefulTarget.note_maximum`."""
        self._keeps_maximum = keeps_maximum

    def takes(self, *, amsgrad: bool) -> bool:
        """Whether an update with this setting finds the maximum that it needs, and no other."""
        if self._keeps_maximum == amsgrad:
            return True
        return self._keeps_maximum and self.update_count > 0


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

    def refuse_gradient_change(self) -> None:
        """See `GradientSlot.refuse_change`."""
        self._entry.gradient.refuse_change()

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        self._entry.gradient.multiply(factor, self._entry.job.gradient_leases_of(self.shard))

    def unscale(self, scale: torch.Tensor) -> None:
        """Divides the gradient by `scale`; once, if the step is not made and asked for again."""
        self._entry.gradient.unscale(scale, self._entry.job.gradient_leases_of(self.shard))

    def follow_assigned(self) -> None:
        """Before a step: see `GradientSlot.follow_assigned`."""
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


class ResidentTarget(UpdatedTarget):
    """A parameter that stays in this process. memd holds its value and state too, so that a commit
    is complete. Its gradient is `p.grad`, as with torch's optimizers.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        *,
        shard: Shard,
        written: bool,
        update_count: int,
        keeps_maximum: bool,
        job: Job,
    ) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._shard = shard
        self._update_count = update_count
        self._parameter = weakref.ref(parameter)
        self._gradient = GradientSlot(shard, job)
        self._sealed: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        # The gradient that the step in flight has divided, and its version.
        self._unscaled: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._job = job
        if written:
            self._take_value(parameter)
        else:
            job.leases.write(shard, parameter.detach())
            job.mark_written()

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def parameter(self) -> torch.Tensor | None:
        """None if it does not exist any more."""
        return self._parameter()

    @property
    def stays(self) -> bool:
        return self._parameter() is not None

    @property
    def is_viewed(self) -> bool:
        return True

    @property
    def has_sealed_gradient(self) -> bool:
        """The last step took this `p.grad`, and nobody has changed it since."""
        parameter = self._parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None or self._sealed is None:
            return False
        sealed, version = self._sealed
        return sealed() is gradient and gradient._version == version

    @property
    def update_count(self) -> int:
        return self._update_count

    def replace_update_count(self, count: int) -> None:
        self._update_count = count

    def take_pending(self) -> None:
        """Its gradient is where autograd puts it."""

    @property
    def has_gradient(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None

    def refuse_gradient_change(self) -> None:
        """torch changes it in all parameters that have it."""

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        self.gradient_for_reading().mul_(factor)

    def gradient_for_reading(self) -> torch.Tensor:
        gradient = self._alive().grad
        if gradient is None:
            raise InvalidArgument(f"parameter {self._shard.name!r} has no gradient")
        return gradient

    def unscale(self, scale: torch.Tensor) -> None:
        """Divides the gradient by `scale`; once, if the step is not made and asked for again."""
        gradient = self.gradient_for_reading()
        if self._unscaled is not None:
            unscaled, version = self._unscaled
            if unscaled() is gradient and version == gradient._version:
                return
        gradient.div_(scale)
        self._unscaled = weakref.ref(gradient), gradient._version

    def drop_gradient(self) -> bool:
        return False  # torch's `zero_grad` drops it, and the step has consumed memd's copy

    def take_writes(self) -> None:
        """Nothing to take: `seal` compares all bytes."""

    def refuse_writes(self) -> None:
        """The step has the gradient, and its new value would come over what was written since."""
        parameter = self._parameter()
        if parameter is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            is_written = _restore(parameter, self._job.leases.value(self._shard))
        if is_written:
            raise MemdError(
                f"job {self._job.name!r}: parameter {self._shard.name!r} was written through a "
                "tensor that shares its memory (.data, detach() or a view) after step() and before "
                "its update was made, and the change is lost; write when backward has ended, or "
                "after commit() where that closes the step"
            )

    def hold_still(self, held: ExitStack) -> None:
        """Nothing to hold: the parameter is the user's own."""

    def refuse_if_in_use(self) -> None:
        """Never: its users hold the tensor that gets the new value."""

    def seal(self) -> None:
        """Copies the value, if it changed, and `p.grad` to memd."""
        parameter = self._alive()
        leases = self._job.leases
        # The loop may have changed the value by any means. `param.data` leaves no trace but the
        # bytes. Equal bytes are not written: memd knows more bits of a bf16 parameter than the
        # parameter has.
        if not is_same_bits(leases.value(self._shard), parameter):
            leases.write(self._shard, parameter.detach())
            self._job.mark_written()
        gradient = self.gradient_for_reading()
        self._gradient.replace(gradient.detach(), leases)
        self._sealed = weakref.ref(gradient), gradient._version

    def hide(self) -> None:
        """The loop has the tensor itself, which memd does not see being used: it refuses that."""
        hide(self._alive(), partial(self._job.steps.open.refuse_if_sealed, self._shard, "its use"))

    def show(self) -> None:
        """It is an ordinary tensor again."""
        parameter = self._parameter()
        if parameter is not None:
            show(parameter)

    def undo(self) -> None:
        """`p.grad` is where it was."""
        self.show()
        self._gradient.forget()

    def finish(self) -> None:
        """Puts the new value in place, if the parameter still exists."""
        self.show()
        parameter = self._parameter()
        if parameter is not None:
            self._take_value(parameter)
        self._gradient.forget()
        self._unscaled = None
        self._update_count += 1

    def _take_value(self, parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(self._job.leases.value(self._shard))

    def _alive(self) -> torch.Tensor:
        parameter = self._parameter()
        if parameter is None:
            raise InvalidArgument(f"parameter {self._shard.name!r} does not exist any more")
        return parameter


class EmptyTarget(UpdatedTarget):
    """A parameter without elements. It stays in this process, offloaded or not, and the daemon does
    not know it: there is nothing to store. Steps count its updates, as torch's optimizers do.
    """

    # The daemon's numbers are positive.
    _numbers = itertools.count(-1, -1)

    def __init__(self, parameter: torch.Tensor, *, name: str, keeps_maximum: bool) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._parameter = weakref.ref(parameter)
        self._update_count = 0
        self._shard = Shard(
            shard_id=next(self._numbers),
            name=name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=parameter.dtype,
            shape=parameter.shape,
        )

    @property
    def shard(self) -> Shard:
        """This process alone knows it."""
        return self._shard

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def stays(self) -> bool:
        return False  # no step changes it

    @property
    def is_viewed(self) -> bool:
        return False

    @property
    def has_sealed_gradient(self) -> bool:
        return True  # no gradient makes a difference

    @property
    def update_count(self) -> int:
        return self._update_count

    def replace_update_count(self, count: int) -> None:
        self._update_count = count

    def take_pending(self) -> None:
        """Its gradient is where autograd puts it."""

    @property
    def has_gradient(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None

    def gradient_for_reading(self) -> torch.Tensor:
        return torch.zeros(self._shard.shape)

    def refuse_gradient_change(self) -> None:
        """There is nothing to change."""

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        """There is nothing to multiply."""

    def unscale(self, scale: torch.Tensor) -> None:
        """There is nothing to divide."""

    def drop_gradient(self) -> bool:
        return False  # torch's `zero_grad` drops it

    def take_writes(self) -> None:
        """Nothing to take."""

    def hold_still(self, held: ExitStack) -> None:
        """Nothing to hold."""

    def refuse_if_in_use(self) -> None:
        """Never: nobody sees a difference."""

    def seal(self) -> None:
        """There is nothing to take."""

    def hide(self) -> None:
        """No step changes it."""

    def show(self) -> None:
        """It was not hidden."""

    def undo(self) -> None:
        """There is nothing to give back."""

    def finish(self) -> None:
        self._update_count += 1

    def state(self, moments: Moments, *, amsgrad: bool) -> dict[str, torch.Tensor]:
        del moments
        names = _moments(has_maximum=self.has_maximum(amsgrad=amsgrad))
        zeros = dict.fromkeys(names, torch.zeros(self._shard.shape))
        return {"step": torch.tensor(float(self._update_count)), **zeros}

    def go_on_with(self, others: Sequence[Target]) -> None:
        """After a restart its state is as that of the parameters that the daemon knows."""
        oldest = max(others, key=lambda other: other.update_count)
        if oldest.update_count:
            self._update_count = oldest.update_count
            self._keeps_maximum = oldest.keeps_maximum


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

    def refuse_gradient_change(self) -> None:
        self._tiling.refuse_changed_assigned()
        for tile in self._tiles:
            tile.refuse_gradient_change()

    def multiply_gradient(self, factor: torch.Tensor) -> None:
        for tile in self._tiles:
            tile.multiply_gradient(factor)
        self._tiling.change_assigned(lambda assigned: assigned.mul_(factor))

    def refuse_changed_assigned(self) -> None:
        """See `Tiling.refuse_changed_assigned`."""
        self._tiling.refuse_changed_assigned()

    def forget_assigned(self) -> None:
        """See `Tiling.forget_assigned`."""
        self._tiling.forget_assigned()


# A step updates these.
Part = StreamedTarget | ResidentTarget | EmptyTarget
# A parameter of an optimizer has one of these.
Target = Part | TiledTarget
# As DTensor is. torch's type for it would make mypy take the rest for unreachable.
_is_made_of_others: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
# parameter → weak reference to the optimizer that updates it
_owners: ByIdentity[torch.Tensor, weakref.ref[object]] = ByIdentity()


def owner_of(parameter: torch.Tensor | None) -> object | None:
    """The optimizer that updates this parameter, if there is one and it still exists."""
    owner = _owners.get(parameter)
    return owner() if owner is not None else None


def needs_name(parameter: torch.Tensor) -> bool:
    """Whether the daemon will know it by the name that the optimizer gives it."""
    return not is_in_memd(parameter) and not _is_empty(parameter)


def own(
    parameters: list[torch.Tensor],
    names: list[str],
    *,
    optimizer: object,
    transaction: Transaction,
    tier: types_pb2.Tier,
    amsgrad: bool,
) -> list[Target]:
    """The targets of `parameters`, which belong to `optimizer` from now on, in a group with this
    setting. Those that are not offloaded get the given names.

    Raises:
        InvalidArgument, NotYet: one of them can't be updated; nothing has changed.
    """
    job = transaction.job
    _refuse_twice(parameters, names)
    made: dict[int, ResidentTarget | EmptyTarget] = {}
    empties: list[EmptyTarget] = []
    resident: list[tuple[torch.Tensor, types_pb2.ShardSpec]] = []
    taken = job.shards.parameter_names
    for parameter, name in zip(parameters, names, strict=True):
        _refuse_owned(parameter, name, optimizer)
        _refuse_unnamed(parameter, name, job)
        entries = entries_of(parameter)
        if _is_empty(parameter):
            empties.append(EmptyTarget(parameter, name=name, keeps_maximum=amsgrad))
            made[id(parameter)] = empties[-1]
        elif not entries:
            spec = _resident_spec(parameter, name, tier, taken, job)
            spec.keeps_maximum = amsgrad
            resident.append((parameter, spec))
        elif entries[0].transaction is not transaction:
            raise InvalidArgument(
                f"parameter {entries[0].shard.label!r} belongs to job {entries[0].job.name!r}; an "
                f"optimizer updates parameters of one job, here {job.name!r}"
            )
    refuse_overlaps((spec.name, parameter) for parameter, spec in resident)
    job.held_names.refuse_unknown([spec.name for _, spec in resident])
    moved = [
        entry.shard
        for parameter in parameters
        for entry in entries_of(parameter)
        if not entry.shard.is_bytes
    ]
    # From here on the job's quota has to hold the optimizer's state as well.
    updated = job.declare(_updated_specs(moved, tier, keeps_maximum=amsgrad)) if moved else []
    keeps_maximum = {shard.shard_id: shard.spec.keeps_maximum for shard in updated}
    first = job.held_names.first_values
    declared = job.declare([spec for _, spec in resident]) if resident else []
    if declared:
        _ = job.leases  # needs shared memory
        first.learn_again()
    new_names = {
        shard.spec.name
        for shard in declared
        if not shard.written or first.is_unfinished(shard.spec.name)
    }
    with first.storing(new_names):
        for (parameter, _), shard in zip(resident, declared, strict=True):
            made[id(parameter)] = ResidentTarget(
                parameter,
                shard=Shard.of(shard),
                written=shard.spec.name not in new_names,
                update_count=shard.generation,
                keeps_maximum=shard.spec.keeps_maximum,
                job=job,
            )
        job.sync_if_needed()
    job.held_names.claim([spec.name for _, spec in resident])
    targets: list[Target] = []
    for parameter in parameters:
        tiling = tiling_of(parameter)
        streams = [
            StreamedTarget(entry, keeps_maximum=keeps_maximum.get(entry.shard.shard_id, False))
            for entry in entries_of(parameter)
        ]
        target: Target
        if tiling is not None:
            target = TiledTarget(tiling, streams)
            for tile in tiling.tiles:
                _owners[tile] = weakref.ref(optimizer)
        else:
            target = streams[0] if streams else made[id(parameter)]
        _owners[parameter] = weakref.ref(optimizer)
        if isinstance(target, ResidentTarget):
            job.shards.add_parameter(target)
        targets.append(target)
    for empty in empties:
        empty.go_on_with(targets)
    return targets


def decide_maximum(
    targets: Sequence[Part], *, amsgrad: bool, tier: types_pb2.Tier, job: Job
) -> None:
    """Before a step over `targets` with this setting. No step is in flight. Where it is the first
    update of a parameter, it decides whether there is a maximum.

    Raises:
        InvalidArgument: a parameter was updated without a maximum, or its gradient is sealed.
        CapacityError: the job's quota does not hold it.
    """
    others = [target for target in targets if not target.takes(amsgrad=amsgrad)]
    for target in others:
        job.steps.open.refuse_if_sealed(target.shard, "a second step()")
        if target.update_count:
            raise InvalidArgument(
                f"job {job.name!r}: parameter {target.shard.label!r} was updated without amsgrad, "
                f"so it has no {MAXIMUM}; set amsgrad to False again, or call reset_state() to "
                "begin anew with amsgrad"
            )
    shards = [target.shard for target in others if target.is_stored]
    if shards:
        job.declare(_updated_specs(shards, tier, keeps_maximum=amsgrad))
    for target in others:
        target.note_maximum(keeps_maximum=amsgrad)


def _restore(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the parameter had another value than this one, which it has now."""
    if is_same_bits(value, parameter):
        return False
    parameter.copy_(value)
    return True


def _is_empty(parameter: torch.Tensor) -> bool:
    return not is_lazy(parameter) and not parameter.numel()


def _refuse_owned(parameter: torch.Tensor, name: str, optimizer: object) -> None:
    if owner_of(parameter) not in (None, optimizer):
        entry = streamed(parameter)
        raise InvalidArgument(
            f"parameter {entry.shard.name if entry else name!r} belongs to another optimizer "
            "already; give each parameter to one, or delete the other optimizer first"
        )


def _refuse_unnamed(parameter: torch.Tensor, name: str, job: Job) -> None:
    if unnamed(parameter) is not None:
        raise InvalidArgument(
            f"job {job.name!r}: init() has built parameter {name!r}, and it has no name in memd "
            "yet; call offload(model, session) before you make the optimizer"
        )


def _refuse_twice(parameters: list[torch.Tensor], names: list[str]) -> None:
    seen: set[int] = set()
    for parameter, name in zip(parameters, names, strict=True):
        if id(parameter) in seen:
            entry = streamed(parameter)
            raise InvalidArgument(
                f"parameter {entry.shard.name if entry else name!r} is in a group twice, and torch "
                "would update it twice a step; pass model.parameters(), which has each once"
            )
        seen.add(id(parameter))


def _resident_spec(
    parameter: torch.Tensor, name: str, tier: types_pb2.Tier, taken: set[str], job: Job
) -> types_pb2.ShardSpec:
    if _is_made_of_others(parameter):
        raise NotYet(
            f"memd updates plain tensors in this version: parameter {name!r} is a "
            f"{type(parameter.data).__name__}, which is made of others; give it to an optimizer of "
            "torch"
        )
    if parameter.device.type != "cpu":
        raise NotYet(
            f"devices other than the CPU come in a later version: parameter {name!r} is on "
            f"{parameter.device}"
        )
    if parameter.dtype == torch.float16:
        raise NotYet(f"float16 comes in a later version; use bfloat16: parameter {name!r}")
    if parameter.dtype not in _DTYPES or parameter.layout is not torch.strided:
        raise InvalidArgument(
            "memd updates dense parameters of float32 and bfloat16; leave frozen ones of others "
            f"out of the optimizer, or offload them: parameter {name!r} is "
            f"{parameter.dtype} {list(parameter.shape)} {parameter.layout}"
        )
    if name in taken:
        raise InvalidArgument(
            f"job {job.name!r}: another parameter of this session is named {name!r}; pass "
            "model.named_parameters() to the optimizer, so that each has a name of its own"
        )
    taken.add(name)
    return shard_spec(
        name,
        kind=types_pb2.SHARD_KIND_PARAMETER,
        dtype=parameter.dtype,
        shape=parameter.shape,
        tier=tier,
    )


def _updated_specs(
    shards: Sequence[Shard], tier: types_pb2.Tier, *, keeps_maximum: bool
) -> list[types_pb2.ShardSpec]:
    return [
        shard_spec(
            shard.name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=shard.dtype,
            shape=shard.shape,
            tier=tier,
            keeps_maximum=keeps_maximum,
        )
        for shard in shards
    ]
