"""A shard: a named tensor of a job, as this process knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from memd_client.base.dtypes import DTYPE_NUMBERS, dtype_number, torch_dtype
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The names of the tiers in the public API.
TIERS: dict[str, types_pb2.Tier] = {"host": types_pb2.TIER_HOST, "nvme": types_pb2.TIER_NVME}
_CPU = torch.device("cpu")
# Adam's moments, as torch and the messages name them. The maximum is amsgrad's.
MAXIMUM = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq", MAXIMUM)
# The fp32 numbers of which a bfloat16 parameter's values are published, as messages name them.
MASTER = "master"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A named tensor of the job, as the daemon declared it."""

    shard_id: int
    name: str
    kind: int
    dtype: torch.dtype
    shape: torch.Size
    # A frozen parameter of a dtype that is never updated. The daemon has its bytes, as bfloat16.
    is_bytes: bool = False
    # That of the parameter of which it is a tile.
    whole_name: str = ""
    tier: types_pb2.Tier = types_pb2.TIER_NVME
    device: torch.device = _CPU  # where a parameter is used

    @classmethod
    def of(cls, shard: types_pb2.Shard, *, whole_name: str = "") -> Shard:
        spec = shard.spec
        return cls(
            shard_id=shard.shard_id,
            name=spec.name,
            kind=spec.kind,
            dtype=torch_dtype(spec.dtype),
            shape=torch.Size(spec.shape),
            whole_name=whole_name,
            tier=spec.tier,
        )

    @classmethod
    def of_bytes(cls, shard: types_pb2.Shard, value: torch.Tensor, *, name: str) -> Shard:
        """The shard that `bytes_spec(name, value)` declares."""
        return cls(
            shard_id=shard.shard_id,
            name=name,
            kind=shard.spec.kind,
            dtype=value.dtype,
            shape=value.shape,
            is_bytes=True,
            tier=shard.spec.tier,
        )

    @property
    def is_on_device(self) -> bool:
        return self.device.type != "cpu"

    @property
    def label(self) -> str:
        """For messages: the name that the user knows."""
        return self.whole_name or self.name

    @property
    def lease_form(self) -> tuple[int, tuple[int, ...]]:
        """The dtype's number and the shape of a lease: its own, or else bytes, for `over`."""
        number = DTYPE_NUMBERS.get(self.dtype)
        if self.is_bytes and (number is None or self.size_bytes % 2):
            return types_pb2.D_TYPE_UINT8, (2 * _half_count(self.size_bytes),)
        return dtype_number(self.dtype, name=self.name), tuple(self.shape)

    def over(self, lease: torch.Tensor) -> torch.Tensor:
        """A lease of `lease_form`, in the shard's own dtype and shape."""
        if lease.dtype == self.dtype and lease.shape == self.shape:
            return lease
        # As the lease itself, it is none of a transform of torch.func.
        with temporarily_clear_interpreter_stack():
            return lease[: self.size_bytes].view(self.dtype).view(self.shape)

    @property
    def parts(self) -> tuple[Shard, ...]:
        """The shards that the daemon has of it, one below the other."""
        return (self,)

    def part_rows(self) -> Iterator[tuple[int, int]]:
        """The first row of each part, and the row behind its last."""
        first = 0
        for part in self.parts:
            yield first, first + part.shape[0]
            first += part.shape[0]

    @property
    def element_count(self) -> int:
        return self.shape.numel()

    @property
    def size_bytes(self) -> int:
        return self.element_count * self.dtype.itemsize


def bytes_name(name: str, value: torch.Tensor) -> str:
    """The daemon's name of a parameter that it has as bytes: with another dtype or shape it is
    another parameter."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{name}:{dtype}[{','.join(map(str, value.shape))}]"


def bytes_spec(name: str, value: torch.Tensor, *, tier: types_pb2.Tier) -> types_pb2.ShardSpec:
    """The declaration of a parameter that nobody updates, by its bytes."""
    return shard_spec(
        bytes_name(name, value),
        kind=types_pb2.SHARD_KIND_PARAMETER,
        dtype=torch.bfloat16,
        shape=[_half_count(value.nbytes)],
        tier=tier,
        value_only=True,
    )


def _half_count(size_bytes: int) -> int:
    """How many elements of two bytes hold them."""
    return (size_bytes + 1) // 2


def shard_spec(
    name: str,
    *,
    kind: types_pb2.ShardKind,
    dtype: torch.dtype,
    shape: Sequence[int],
    tier: types_pb2.Tier = types_pb2.TIER_NVME,
    value_only: bool = False,
    keeps_maximum: bool = False,
) -> types_pb2.ShardSpec:
    """The declaration of one shard.

    Args:
        value_only: no optimizer updates the parameter yet, so the disk quota need not hold
            optimizer state for it.
        keeps_maximum: Adam's state of the parameter has amsgrad's maximum.

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
        keeps_maximum=keeps_maximum,
    )
