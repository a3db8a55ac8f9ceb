"""What an optimizer updates: parameters that are offloaded, and parameters that stay where they
are.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memd_client.away import StreamedParameter, streamed
from memd_client.dtypes import dtype_number
from memd_client.errors import InvalidArgument, NotYet
from memd_client.gradients import GradientSlot
from memd_client.identity import ByIdentity
from memd_client.shard import Shard
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from contextlib import ExitStack

    from memd_client.early import EarlyUpdates
    from memd_client.session import Session

_DTYPES = (torch.float32, torch.bfloat16)


class StreamedTarget:
    """An offloaded parameter. Its gradient is in memd already."""

    stays = False  # its value comes with its next lease
    has_sealed_gradient = False  # `seal` lets go of it

    def __init__(self, entry: StreamedParameter) -> None:
        self._entry = entry

    @property
    def shard(self) -> Shard:
        return self._entry.shard

    def update_early(self, early: EarlyUpdates | None) -> None:
        """From now on `early` is told of its gradients, for as long as it lives."""
        self._entry.early = weakref.ref(early) if early is not None else None

    @property
    def update_count(self) -> int:
        return self._entry.update_count

    @update_count.setter
    def update_count(self, count: int) -> None:
        self._entry.update_count = count

    @property
    def has_gradient(self) -> bool:
        return self._entry.gradient.present

    def gradient_for_reading(self) -> torch.Tensor:
        return self._entry.gradient.read(self._entry.session.gradient_leases_of(self.shard))

    def gradient_for_writing(self) -> torch.Tensor:
        return self._entry.gradient.tensor(self._entry.session.gradient_leases_of(self.shard))

    def drop_gradient(self) -> bool:
        """Whether memd has to be told."""
        present = self._entry.gradient.present
        self._entry.gradient.forget()
        return present

    def hold_still(self, held: ExitStack) -> None:
        self._entry.hold_still(held)

    def refuse_if_in_use(self) -> None:
        """Raises where somebody has the value in place, who would not see the update."""
        self._entry.refuse_if_resident("step()")

    def seal(self) -> None:
        """The gradient belongs to a step: here it is gone, and what was computed with the value so
        far is of the past.
        """
        self._entry.begin_update()

    def undo(self) -> None:
        """The step came to nothing: value and gradient are as before."""
        self._entry.undo_update()

    def finish(self) -> None:
        """The step is committed."""
        self._entry.update_count += 1


class ResidentTarget:
    """A parameter that stays in this process. memd holds its value and state too, so that a commit
    is complete; its gradient is `p.grad`, as with torch's optimizers.
    """

    stays = True

    def __init__(
        self,
        parameter: torch.Tensor,
        *,
        shard: Shard,
        written: bool,
        update_count: int,
        session: Session,
    ) -> None:
        self.shard = shard
        self.update_count = update_count
        self._parameter = weakref.ref(parameter)
        self._gradient = GradientSlot(shard)
        self._sealed: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        self._session = session
        if written:
            self._take_value(parameter)
        else:
            session.leases.write(shard, parameter.detach())
            session.mark_written()

    @property
    def has_gradient(self) -> bool:
        return self._alive().grad is not None

    @property
    def has_sealed_gradient(self) -> bool:
        """`p.grad` is what the last step took, and nobody has changed it since."""
        gradient = self._alive().grad
        if gradient is None or self._sealed is None:
            return False
        sealed, version = self._sealed
        return sealed() is gradient and gradient._version == version

    def gradient_for_reading(self) -> torch.Tensor:
        return self.gradient_for_writing()

    def gradient_for_writing(self) -> torch.Tensor:
        gradient = self._alive().grad
        if gradient is None:
            raise InvalidArgument(f"parameter {self.shard.name!r} has no gradient")
        return gradient

    def drop_gradient(self) -> bool:
        return False  # `zero_grad` of torch does it; what memd was given, the step has consumed

    def hold_still(self, held: ExitStack) -> None:
        """It is the user's own."""

    def refuse_if_in_use(self) -> None:
        """Whoever uses it keeps the tensor, which gets the new value."""

    def seal(self) -> None:
        """The value and `p.grad` are in memd, as the step will use them."""
        parameter = self._alive()
        leases = self._session.leases
        # The loop may have changed it by any means, `param.data` included, which leaves no trace
        # but the bytes. Equal bytes are not written: of a bf16 parameter memd knows more bits than
        # the parameter has.
        if not torch.equal(_bits(leases.value(self.shard)), _bits(parameter)):
            leases.write(self.shard, parameter.detach())
            self._session.mark_written()
        gradient = self.gradient_for_writing()
        self._gradient.replace(gradient.detach(), leases)
        self._sealed = weakref.ref(gradient), gradient._version

    def undo(self) -> None:
        """The step came to nothing: `p.grad` is where it was."""
        self._gradient.forget()

    def finish(self) -> None:
        """The step is committed: the new value is put in place, of a parameter that still exists.
        Where it raises it is called again.
        """
        parameter = self._parameter()
        if parameter is not None:
            self._take_value(parameter)
        self._gradient.forget()
        self.update_count += 1

    def _take_value(self, parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(self._session.leases.value(self.shard))

    def _alive(self) -> torch.Tensor:
        parameter = self._parameter()
        if parameter is None:
            raise InvalidArgument(f"parameter {self.shard.name!r} does not exist any more")
        return parameter


Target = StreamedTarget | ResidentTarget
# parameter → weak reference to the optimizer that updates it
_owners: ByIdentity[torch.Tensor, weakref.ref[object]] = ByIdentity()


def owner_of(parameter: torch.Tensor | None) -> object | None:
    """The living optimizer that updates this parameter."""
    owner = _owners.get(parameter)
    return owner() if owner is not None else None


def own(
    parameters: list[torch.Tensor],
    names: list[str],
    *,
    optimizer: object,
    session: Session,
    tier: types_pb2.Tier,
) -> list[Target]:
    """The targets of `parameters`, which from now on belong to `optimizer`. `names` are for those
    that are not offloaded.

    Raises:
        InvalidArgument, NotYet: one of them can't be updated; nothing has changed.
    """
    resident: list[tuple[torch.Tensor, types_pb2.ShardSpec]] = []
    taken = {entry.shard.name for entry in session.entries}
    for parameter, name in zip(parameters, names, strict=True):
        _refuse_owned(parameter, name, optimizer)
        entry = streamed(parameter)
        if entry is None:
            resident.append((parameter, _resident_spec(parameter, name, tier, taken, session)))
        elif entry.session is not session:
            raise InvalidArgument(
                f"parameter {entry.shard.name!r} belongs to job {entry.session.job!r}; an "
                f"optimizer updates parameters of one job, here {session.job!r}"
            )
    declared = session.declare([spec for _, spec in resident]) if resident else []
    made: dict[int, Target] = {
        id(parameter): ResidentTarget(
            parameter,
            shard=Shard.of(shard),
            written=shard.written,
            update_count=shard.generation,
            session=session,
        )
        for (parameter, _), shard in zip(resident, declared, strict=True)
    }
    session.sync_if_needed()
    targets: list[Target] = []
    for parameter in parameters:
        entry = streamed(parameter)
        target = StreamedTarget(entry) if entry is not None else made[id(parameter)]
        _owners[parameter] = weakref.ref(optimizer)
        if isinstance(target, ResidentTarget):
            session.entries.add(target)
        targets.append(target)
    return targets


def _refuse_owned(parameter: torch.Tensor, name: str, optimizer: object) -> None:
    if owner_of(parameter) not in (None, optimizer):
        entry = streamed(parameter)
        raise InvalidArgument(
            f"parameter {entry.shard.name if entry else name!r} belongs to another optimizer "
            "already; give each parameter to one, or delete the other optimizer first"
        )


def _resident_spec(
    parameter: torch.Tensor, name: str, tier: types_pb2.Tier, taken: set[str], session: Session
) -> types_pb2.ShardSpec:
    if parameter.device.type != "cpu":
        raise NotYet(
            f"devices other than the CPU come in a later version: parameter {name!r} is on "
            f"{parameter.device}"
        )
    if parameter.dtype == torch.float16:
        raise NotYet(f"float16 comes in a later version; use bfloat16: parameter {name!r}")
    if (
        parameter.dtype not in _DTYPES
        or parameter.layout is not torch.strided
        or not parameter.numel()
    ):
        raise InvalidArgument(
            "memd updates dense parameters of float32 and bfloat16 that have elements: parameter "
            f"{name!r} is {parameter.dtype} {list(parameter.shape)} {parameter.layout}"
        )
    if name in taken:
        raise InvalidArgument(
            f"job {session.job!r}: another parameter of this session is named {name!r}; pass "
            "model.named_parameters() to the optimizer, so that each has a name of its own"
        )
    taken.add(name)
    return types_pb2.ShardSpec(
        name=name,
        kind=types_pb2.SHARD_KIND_PARAMETER,
        dtype=dtype_number(parameter.dtype, name=name),
        shape=parameter.shape,
        tier=tier,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals itself, and 0 is not -0."""
    return (
        tensor.detach()
        .contiguous()
        .view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    )
