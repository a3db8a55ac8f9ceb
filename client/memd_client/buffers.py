"""Buffers of offloaded modules: they stay in the training process, and their values are part of
every step.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.dtypes import dtype_number
from memd_client.shard import Shard
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from memd_client.session import Session

_STAGED = "@staged"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module keeps a buffer. Modules replace buffers by assignment, so the tensor itself is
    no handle.
    """

    module: weakref.ref[nn.Module]
    key: str

    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        return module._buffers.get(self.key) if module is not None else None


@dataclass(frozen=True, slots=True)
class _Buffer:
    place: _Place
    shard: Shard
    staged: Shard


class ModuleBuffers:
    """The persistent buffers of one module: those that `state_dict()` has too."""

    def __init__(
        self, module: nn.Module, session: Session, *, prefix: str, tier: types_pb2.Tier
    ) -> None:
        """Declares them; raises InvalidArgument where a dtype can't be stored, or the job has
        another shape or dtype.
        """
        self._session = session
        found = list(_persistent_buffers(module, prefix))
        specs = [
            _spec(name + suffix, tensor, tier)
            for suffix in ("", _STAGED)
            for name, _, tensor in found
        ]
        declared = session.declare(specs) if specs else []
        shards, staged = declared[: len(found)], declared[len(found) :]
        self._stored = [shard.written for shard in shards]
        self._buffers = [
            _Buffer(place, Shard.of(shard), Shard.of(stage))
            for (_, place, _), shard, stage in zip(found, shards, staged, strict=True)
        ]

    def exchange(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Stores the values of buffers that are new; returns (buffer, stored value) of the
        others.
        """
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer, was_stored in zip(self._buffers, self._stored, strict=True):
            tensor = buffer.place.tensor()
            if tensor is None:
                continue
            if was_stored:
                stored.append((tensor, self._session.leases.read(buffer.shard).clone()))
            else:
                self._session.leases.write(buffer.shard, tensor)
                self._session.mark_written()
        return stored

    def restore(self) -> None:
        """Puts the stored values into the buffers."""
        with torch.no_grad():
            for buffer in self._buffers:
                tensor = buffer.place.tensor()
                if tensor is not None:
                    tensor.copy_(self._session.leases.read(buffer.shard))

    def capture(self) -> list[tuple[Shard, Shard]]:
        """Puts the values that changed since the last step under their staging names; returns
        (staged, buffer) pairs.
        """
        changed = []
        for buffer in self._buffers:
            tensor = buffer.place.tensor()
            if tensor is not None and not self._is_stored(buffer.shard, tensor):
                self._session.leases.write(buffer.staged, tensor)
                changed.append((buffer.staged, buffer.shard))
        return changed

    def _is_stored(self, shard: Shard, tensor: torch.Tensor) -> bool:
        # Bytes are compared, because batch norm changes its statistics without counting up their
        # version.
        return not shard.element_count or torch.equal(
            _bytes_of(self._session.leases.read(shard)), _bytes_of(tensor)
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _persistent_buffers(
    module: nn.Module, prefix: str
) -> Iterator[tuple[str, _Place, torch.Tensor]]:
    seen: set[int] = set()
    for path, child in module.named_modules(prefix=prefix):
        for key, tensor in child._buffers.items():
            if tensor is None or key in child._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{path}.{key}" if path else key, _Place(weakref.ref(child), key), tensor


def _spec(name: str, tensor: torch.Tensor, tier: types_pb2.Tier) -> types_pb2.ShardSpec:
    return types_pb2.ShardSpec(
        name=name,
        kind=types_pb2.SHARD_KIND_BUFFER,
        dtype=dtype_number(tensor.dtype, name=name),
        shape=tensor.shape,
        tier=tier,
    )
