"""Memory that the program gives a parameter, as by `parameter.data = value`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memd_client.errors import MemdError, NotResident
from memd_client.parameters.lazy import LazyTensor

if TYPE_CHECKING:
    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_row_major(value: torch.Tensor) -> bool:
    """Whether memd keeps its strides. If a dimension has one element, a tensor can be contiguous
    and channels_last at once, and convolutions compute by its strides.
    """
    if not value.is_contiguous():
        return False
    channels_last = _CHANNELS_LAST.get(value.ndim)
    if channels_last is None or not value.is_contiguous(memory_format=channels_last):
        return True
    return value.stride() == torch.empty(value.shape, device="meta").stride()


def own_memory(value: torch.Tensor, shown: weakref.ref[LazyTensor] | None) -> torch.Tensor:
    """`value` for `parameter.data = value`, which share memory in torch afterwards. `shown` shows
    the parameter's own bytes."""
    if not isinstance(value, LazyTensor):
        return value
    if value.has_ended:
        return value.in_memory()
    own = shown() if shown is not None else None
    if own is None or not value.is_view_of(own):
        value.refuse_sharing()
    return value.clone()


def shows_all(value: torch.Tensor, shown: weakref.ref[LazyTensor] | None) -> bool:
    """Whether `parameter.data = value` changes nothing: see `own_memory`."""
    own = shown() if shown is not None else None
    return (
        own is not None
        and isinstance(value, LazyTensor)
        and value.is_view_of(own)
        and value.dtype == own.dtype
        and (value.shape, value.stride()) == (own.shape, own.stride())
    )


def is_left(lease: weakref.ref[torch.UntypedStorage] | None, parameter: torch.Tensor) -> bool:
    """The parameter has other memory than its lease, which somebody holds."""
    held = lease() if lease is not None else None
    return held is not None and held is not parameter.untyped_storage()


def memory_of_program(
    parameter: torch.Tensor,
    written_lease: torch.Tensor | None,
    lease: weakref.ref[torch.UntypedStorage] | None,
) -> tuple[weakref.ref[torch.UntypedStorage], int] | None:
    """The memory that the user has given a parameter in place, and where its value begins there.
    None if it has that of its lease."""
    memory = parameter.untyped_storage()
    if written_lease is not None:
        is_leased = memory is written_lease.untyped_storage()
    else:
        is_leased = lease is not None and lease() is memory
    return None if is_leased else (weakref.ref(memory), int(parameter.storage_offset()))


def refuse_other_form(job: Job, shard: Shard, value: torch.Tensor) -> None:
    if (
        value.shape != shard.shape
        or value.dtype != shard.dtype
        or value.layout is not torch.strided
        or value.device != shard.device
    ):
        raise NotResident(
            f"job {job.name!r}: parameter {shard.label!r} is in memd as {shard.dtype} "
            f"{list(shard.shape)} and cannot become {value.dtype} {list(value.shape)} on "
            f"{value.device} there; convert before offload(), or copy.deepcopy the module and "
            "convert the copy"
        )
    if not is_row_major(value):
        raise NotResident(
            f"job {job.name!r}: parameter {shard.label!r} is contiguous in memd, and "
            f"cannot get the strides {list(value.stride())} there, as of channels_last; assign "
            "value.clone(memory_format=torch.contiguous_format), or copy.deepcopy the module "
            "and convert the copy"
        )


def refused_assignment(job: Job, shard: Shard) -> MemdError:
    return MemdError(
        f"job {job.name!r}: a view of parameter {shard.label!r}, or its memory, is still held, and "
        "would not keep the present value if .data is assigned; clone what you keep, or change "
        "the parameter with copy_()"
    )


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
