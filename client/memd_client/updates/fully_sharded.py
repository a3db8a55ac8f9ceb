"""Parameters that `fully_shard` has cut over the ranks of a job.

It is imported where there are some, since it imports much of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard

from memd_client.errors import InvalidArgument, NotYet
from memd_client.updates.sharded_target import Range

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    from memd_client.core.job import Job

_VECTOR = 8  # elements; see docs/decisions/adam-bits.md


def range_of(parameter: torch.Tensor, name: str, job: Job) -> Range:
    """The part of the whole parameter that this rank has.

    Raises:
        NotYet: `fully_shard` has not cut it, or in a way that memd does not take.
        InvalidArgument: memd's update would have other bits than torch's.
    """
    if not isinstance(parameter, DTensor):
        _refuse(
            name,
            f"a {type(parameter.data).__name__}, which is made of others; give it to an optimizer "
            "of torch",
        )
    found = _find(parameter)
    if found is None:
        _refuse(
            name,
            "a DTensor that fully_shard() has not made, as parts of tensor-parallel layers are; "
            "give it to an optimizer of torch",
        )
    modules, sharded = found
    if sharded.offload_to_cpu:
        _refuse(
            name,
            "sharded with CPUOffloadPolicy, and memd has the optimizer's state outside of the "
            "process already; call fully_shard() without offload_policy",
        )
    ranks = job.ranks
    over = parameter.device_mesh.mesh.tolist()
    if over != ranks.members:
        _refuse(
            name,
            f"sharded over a mesh of ranks {over}; memd takes one dimension of all ranks of the "
            f"job, {ranks.members}: call fully_shard() without mesh, or give fully_shard(mesh=...) "
            "and connect(process_group=...) the same one-dimensional mesh",
        )
    if parameter.placements != (Shard(0),):
        _refuse(
            name,
            f"placed as {parameter.placements}, and its shards are no ranges of it; call "
            "fully_shard() without shard_placement_fn",
        )
    return _cut(parameter, name, modules, rank=ranks.rank, world_size=ranks.world_size)


def _refuse(name: str, reason: str) -> NoReturn:
    raise NotYet(
        "memd updates plain tensors and the shards of fully_shard() in this version: parameter "
        f"{name!r} is {reason}"
    )


def _cut(
    parameter: DTensor, name: str, modules: list[nn.Module], *, rank: int, world_size: int
) -> Range:
    """As torch cuts the first dimension: parts of equal size but for the last ones."""
    rows = parameter.shape[0]
    row_elements = parameter.numel() // rows
    part_rows = -(-rows // world_size)
    for cut_rows in range(part_rows, rows, part_rows):
        _refuse_uneven(cut_rows * row_elements, parameter, name)
    first, end = min(rank * part_rows, rows), min((rank + 1) * part_rows, rows)
    return Range(first=first, end=end, modules=modules)


def _refuse_uneven(cut: int, parameter: DTensor, name: str) -> None:
    """torch's fused kernel rounds the last `numel % 8` elements of each shard in another way than
    others, and memd those of the whole."""
    if cut % _VECTOR and parameter.numel() >= _VECTOR:
        raise InvalidArgument(
            f"fully_shard() cuts parameter {name!r} of shape {list(parameter.shape)} after {cut} "
            f"elements, which {_VECTOR} does not divide: torch's fused kernel rounds the last "
            f"{cut % _VECTOR} of a shard in another way, and memd updates the whole; leave it out "
            "with fully_shard(ignored_params=...), or pad it"
        )


def _find(parameter: DTensor) -> tuple[list[nn.Module], FSDPParam] | None:
    """The modules before whose forward `parameter` is gathered."""
    for state, sharded in _sharded_parameters():
        held: object = sharded.sharded_param
        if held is parameter:
            return list(state._modules), sharded
    return None


def _sharded_parameters() -> Iterator[tuple[FSDPState, FSDPParam]]:
    for weak in list(_module_state_mapping.values()):
        state = weak()
        if isinstance(state, FSDPState):
            for group in state._fsdp_param_groups:
                for sharded in group.fsdp_params:
                    yield state, sharded
