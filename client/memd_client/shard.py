"""A shard: a named tensor of a job, as this process knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.dtypes import dtype_number, torch_dtype
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

# The names of the tiers in the public API.
TIERS: dict[str, types_pb2.Tier] = {"host": types_pb2.TIER_HOST, "nvme": types_pb2.TIER_NVME}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A named tensor of the job, as the daemon declared it."""

    shard_id: int
    name: str
    kind: int
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, shard: types_pb2.Shard) -> Shard:
        spec = shard.spec
        return cls(
            shard_id=shard.shard_id,
            name=spec.name,
            kind=spec.kind,
            dtype=torch_dtype(spec.dtype),
            shape=torch.Size(spec.shape),
        )

    @property
    def element_count(self) -> int:
        return self.shape.numel()

    @property
    def size_bytes(self) -> int:
        return self.element_count * self.dtype.itemsize


def shard_spec(
    name: str,
    *,
    kind: types_pb2.ShardKind,
    dtype: torch.dtype,
    shape: Sequence[int],
    tier: types_pb2.Tier = types_pb2.TIER_NVME,
    value_only: bool = False,
) -> types_pb2.ShardSpec:
    """The declaration of one shard.

    Args:
        value_only: no optimizer updates the parameter yet, so the disk quota need not hold
            optimizer state for it.

    Raises:
        InvalidArgument: memd does not store this dtype.
    """
    return types_pb2.ShardSpec(
        name=name,
        kind=kind,
        dtype=dtype_number(dtype, name=name),
        shape=shape,
        tier=tier,
        value_only=value_only,
    )
