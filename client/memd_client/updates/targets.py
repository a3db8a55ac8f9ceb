"""The parameters of an optimizer: offloaded ones, and those that stay in this process."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.base.identity import ByIdentity
from memd_client.base.overlaps import refuse_overlaps
from memd_client.connection.shard import MAXIMUM, Shard, shard_spec
from memd_client.device.model_on_device import usable_device
from memd_client.errors import InvalidArgument, NotYet
from memd_client.parameters.parameter import StreamedParameter, streamed
from memd_client.parameters.tiles import entries_of, is_in_memd, tiling_of
from memd_client.parameters.unnamed import unnamed
from memd_client.updates.device_target import DeviceTarget
from memd_client.updates.empty_target import EmptyTarget
from memd_client.updates.resident_target import ResidentTarget, refuse_uneven_strides
from memd_client.updates.sharded_target import Range, ShardedTarget, local_of, write_whole
from memd_client.updates.streamed_target import StreamedTarget, TiledTarget
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Transaction

_DTYPES = (torch.float32, torch.bfloat16)
# A step updates these.
Part = StreamedTarget | ResidentTarget | EmptyTarget
# A parameter of an optimizer has one of these.
Target = Part | TiledTarget
# As DTensor is. torch's type for it would make mypy take the rest for unreachable.
_is_made_of_others: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
_MAKING = "make an optimizer"  # as in "all ranks make an optimizer alike"
# parameter → weak reference to the optimizer that updates it
_owners: ByIdentity[torch.Tensor, weakref.ref[object]] = ByIdentity()


def owner_of(parameter: torch.Tensor | None) -> object | None:
    """The optimizer that updates this parameter, if there is one and it still exists."""
    owner = _owners.get(parameter)
    return owner() if owner is not None else None


def needs_name(parameter: torch.Tensor) -> bool:
    """Whether the daemon will know it by the name that the optimizer gives it."""
    return not is_in_memd(parameter) and not _is_empty(parameter)


def is_offloaded_to_device(parameter: torch.Tensor) -> bool:
    return any(entry.shard.is_on_device for entry in entries_of(parameter))


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
    parts: dict[int, Range] = {}  # of those that `fully_shard` has cut
    taken = job.shards.parameter_names
    for parameter, name in zip(parameters, names, strict=True):
        _refuse_owned(parameter, name, optimizer)
        _refuse_unnamed(parameter, name, job)
        entries = entries_of(parameter)
        if _is_empty(parameter):
            empties.append(EmptyTarget(parameter, name=name, keeps_maximum=amsgrad))
            made[id(parameter)] = empties[-1]
        elif not entries:
            if _is_made_of_others(parameter):
                parts[id(parameter)] = _range_of(parameter, name, job)
            spec = _resident_spec(parameter, name, tier, taken, job)
            spec.keeps_maximum = amsgrad
            resident.append((parameter, spec))
        elif entries[0].transaction is not transaction:
            raise InvalidArgument(
                f"parameter {entries[0].shard.label!r} belongs to job {entries[0].job.name!r}; an "
                f"optimizer updates parameters of one job, here {job.name!r}"
            )
    if parts:
        transaction.refuse_replaced()  # fully_shard() may have cut what is offloaded
    # Another session may have ended before it knew their values, which their class refuses since.
    with torch._C.DisableTorchFunctionSubclass():
        refuse_overlaps(
            (spec.name, local_of(parameter) if id(parameter) in parts else parameter)
            for parameter, spec in resident
        )
    job.held_names.refuse_unknown([spec.name for _, spec in resident])
    moved = [
        entry.shard
        for parameter in parameters
        for entry in entries_of(parameter)
        if not entry.shard.is_bytes
    ]
    # From here on the job's quota has to hold the optimizer's state as well.
    updated = job.declare(_updated_specs(moved, keeps_maximum=amsgrad)) if moved else []
    keeps_maximum = {shard.shard_id: shard.spec.keeps_maximum for shard in updated}
    if resident:
        job.ranks.refuse_different(
            {
                spec.name: f"{list(spec.shape)} {parameter.dtype}"
                + (" in shards" if id(parameter) in parts else "")
                for parameter, spec in resident
            },
            _MAKING,
        )
        plain = [each for each in resident if id(each[0]) not in parts]
        if plain:
            made.update(job.ranks.in_order(lambda: _resident(plain, job), _MAKING))
        if parts:
            sharded = [each for each in resident if id(each[0]) in parts]
            made.update(_sharded(sharded, parts, job))
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


def _resident(
    parameters: Sequence[tuple[torch.Tensor, types_pb2.ShardSpec]], job: Job
) -> dict[int, ResidentTarget]:
    """The targets of parameters that are not offloaded, by id, with the values that the job has or
    gets."""
    first = job.held_names.first_values
    declared = job.declare([spec for _, spec in parameters])
    _ = job.leases  # needs shared memory
    if job.ranks.is_first:
        first.learn_again()
    else:
        first.leave_to_first_rank()
    new_names = {
        shard.spec.name
        for shard in declared
        if not shard.written or first.is_unfinished(shard.spec.name)
    }
    made = {}
    with first.storing(new_names):
        for (parameter, _), shard in zip(parameters, declared, strict=True):
            kind = DeviceTarget if not parameter.is_cpu else ResidentTarget
            made[id(parameter)] = kind(
                parameter,
                shard=Shard.of(shard),
                written=shard.spec.name not in new_names,
                update_count=shard.generation,
                keeps_maximum=shard.spec.keeps_maximum,
                job=job,
            )
        job.sync_if_needed()
    return made


def _range_of(parameter: torch.Tensor, name: str, job: Job) -> Range:
    from memd_client.updates.fully_sharded import range_of  # which imports much of torch

    return range_of(parameter, name, job)


def _sharded(
    parameters: Sequence[tuple[torch.Tensor, types_pb2.ShardSpec]],
    parts: Mapping[int, Range],
    job: Job,
) -> dict[int, ResidentTarget]:
    """As `_resident`, of parameters of which each rank has a part. All ranks call it."""
    first, ranks = job.held_names.first_values, job.ranks

    def declare() -> list[types_pb2.Shard]:
        declared = job.declare([spec for _, spec in parameters])
        _ = job.leases  # needs shared memory
        if ranks.is_first:
            first.learn_again()
        else:
            first.leave_to_first_rank()
        return declared

    declared = ranks.in_order(declare, _MAKING)
    new_names: set[str] = ranks.exchange(
        {
            shard.spec.name
            for shard in declared
            if not shard.written or first.is_unfinished(shard.spec.name)
        },
        _MAKING,
    )[0]
    shards = [
        (parameter, Shard.of(each))
        for (parameter, _), each in zip(parameters, declared, strict=True)
    ]
    with ExitStack() as stored:

        def finish() -> None:
            job.sync_if_needed()
            stored.close()

        ranks.by_one(0, lambda: stored.enter_context(first.storing(new_names)), _MAKING)
        for parameter, shard in shards:
            if shard.name in new_names:
                write_whole(parameter, shard, job)
        ranks.by_one(0, finish, _MAKING)
    return {
        id(parameter): ShardedTarget(
            parameter,
            part=parts[id(parameter)],
            shard=shard,
            update_count=each.generation,
            keeps_maximum=each.spec.keeps_maximum,
            job=job,
        )
        for (parameter, shard), each in zip(shards, declared, strict=True)
    }


def decide_maximum(targets: Sequence[Part], *, amsgrad: bool, job: Job) -> None:
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
        job.declare(_updated_specs(shards, keeps_maximum=amsgrad))
    for target in others:
        target.note_maximum(keeps_maximum=amsgrad)


def refuse_orphans(job: Job) -> None:
    """
    Raises:
        InvalidArgument: there is a gradient that no optimizer takes.
    """
    for entry in job.shards.parameters:
        if (
            isinstance(entry, StreamedParameter)
            and entry.gradient.present
            and owner_of(entry.parameter) is None
        ):
            raise InvalidArgument(
                f"job {job.name!r}: parameter {entry.shard.label!r} has a gradient, but belongs "
                "to no memd optimizer; give it to one, or freeze it with requires_grad_(False)"
            )


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
    if usable_device(parameter.device) is not None:
        _refuse_on_device(parameter, name, job)
    if parameter.dtype == torch.float16:
        raise NotYet(f"float16 comes in a later version; use bfloat16: parameter {name!r}")
    if parameter.dtype not in _DTYPES or parameter.layout is not torch.strided:
        raise InvalidArgument(
            "memd updates dense parameters of float32 and bfloat16; leave frozen ones of others "
            f"out of the optimizer, or offload them: parameter {name!r} is "
            f"{parameter.dtype} {list(parameter.shape)} {parameter.layout}"
        )
    refuse_uneven_strides(parameter, name)
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


def _refuse_on_device(parameter: torch.Tensor, name: str, job: Job) -> None:
    for what, is_there in (
        ("with several ranks", job.ranks.are_several),
        ("as shards of fully_shard()", _is_made_of_others(parameter)),
    ):
        if is_there:
            raise NotYet(
                f"parameters that stay on a device come {what} in a later version: parameter "
                f"{name!r} is on {parameter.device}"
            )


def _updated_specs(shards: Sequence[Shard], *, keeps_maximum: bool) -> list[types_pb2.ShardSpec]:
    return [
        shard_spec(
            shard.name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=shard.dtype,
            shape=shard.shape,
            tier=shard.tier,
            keeps_maximum=keeps_maximum,
        )
        for shard in shards
    ]
