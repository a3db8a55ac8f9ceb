"""Buffers of offloaded modules. They stay in the training process, and their values are part of
every commit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import Shard, shard_spec
from memd_client.transaction.module_names import plain_name
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Staging, Transaction

_STAGED = "@staged"


@dataclass(frozen=True, slots=True)
class _Owner:
    """The module that has a buffer, and its name there. The tensor itself is no handle: modules
    replace buffers by assignment.
    """

    module: weakref.ref[nn.Module]
    key: str

    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        return module._buffers.get(self.key) if module is not None else None


@dataclass(frozen=True, slots=True)
class _Buffer:
    owner: _Owner
    shard: Shard
    staged: Shard


class ModuleBuffers:
    """The persistent buffers of one module, those that `state_dict()` has too. A contributor of
    commits.
    """

    def __init__(self, module: nn.Module, job: Job) -> None:
        """Declares them.

        Raises:
            InvalidArgument: memd does not store a dtype, or the job has another shape or dtype.
        """
        found = list(_persistent_buffers(module))
        specs = [
            shard_spec(
                name + suffix,
                kind=types_pb2.SHARD_KIND_BUFFER,
                dtype=tensor.dtype,
                shape=tensor.shape,
            )
            for suffix in ("", _STAGED)
            for name, _, tensor in found
        ]
        declared = job.declare(specs) if specs else []
        shards, staged = declared[: len(found)], declared[len(found) :]
        self._written = [shard.written for shard in shards]
        self._first_values = job.held_names.first_values
        self._buffers = [
            _Buffer(owner, Shard.of(shard), Shard.of(stage))
            for (_, owner, _), shard, stage in zip(found, shards, staged, strict=True)
        ]

    @property
    def new_names(self) -> list[str]:
        """Those that the job has no values of."""
        return [buffer.shard.name for buffer, is_stored in self._each_stored() if not is_stored]

    def exchange(self, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Stores the values of new buffers; returns (buffer, stored value) of the others."""
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer, is_stored in self._each_stored():
            tensor = buffer.owner.tensor()
            if tensor is None:
                continue
            if is_stored:
                stored.append((tensor, job.leases.read(buffer.shard).clone()))
            else:
                job.leases.write(buffer.shard, tensor)
                job.mark_written()
        return stored

    def _each_stored(self) -> Iterator[tuple[_Buffer, bool]]:
        for buffer, written in zip(self._buffers, self._written, strict=True):
            is_unfinished = self._first_values.is_unfinished(buffer.shard.name)
            yield buffer, written and not is_unfinished

    def shard_of(self, tensor: torch.Tensor) -> Shard | None:
        """The shard of a buffer that is one of these at present."""
        for buffer in self._buffers:
            if buffer.owner.tensor() is tensor:
                return buffer.shard
        return None

    def capture(self, number: int, transaction: Transaction) -> Staging:
        del number
        # All ranks have the first one's, as DistributedDataParallel broadcasts them.
        return partial(self._stage, transaction.job) if transaction.job.ranks.is_first else list

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        del number
        return partial(self.restore, transaction.job)

    def holds(self, number: int, transaction: Transaction) -> bool:
        """`offload()` has put the stored values in place already."""
        del number, transaction
        return False

    def share(self, module: nn.Module, job: Job) -> None:
        """From now on each forward of `module` begins with the first rank's buffers, as in
        DistributedDataParallel. In a forward that is trained all ranks take part. In others each
        rank reads those of the last commit, since one may evaluate alone.
        """
        hook = _SharedBuffers(self, job)
        if next(module.buffers(), None) is not None:
            module.register_forward_pre_hook(hook)

    def _stage(self, job: Job) -> list[tuple[Shard, Shard]]:
        """Writes what changed since the last step."""
        changed = []
        for buffer in self._buffers:
            tensor = buffer.owner.tensor()
            if tensor is not None and not _is_stored(job, buffer.shard, tensor):
                job.leases.write(buffer.staged, tensor)
                changed.append((buffer.staged, buffer.shard))
        return changed

    def restore(self, job: Job) -> None:
        """Puts the stored values in place."""
        with torch.no_grad():
            for buffer in self._buffers:
                tensor = buffer.owner.tensor()
                if tensor is not None:
                    tensor.copy_(job.leases.read(buffer.shard))


class _SharedBuffers:
    """A forward pre-hook of several ranks: see `ModuleBuffers.share`."""

    def __init__(self, buffers: ModuleBuffers, job: Job) -> None:
        self._buffers = buffers
        self._job = job
        self._are_own = False  # a forward of this rank has changed them since

    def __call__(self, module: nn.Module, args: object) -> None:
        del args
        ranks = self._job.ranks
        if module.training and torch.is_grad_enabled():
            with torch.no_grad():
                # By name: the order of modules may be another on each rank.
                for _, buffer in sorted(module.named_buffers(), key=itemgetter(0)):
                    dense = buffer.detach().contiguous()
                    ranks.broadcast(dense, "share buffers")
                    if not ranks.is_first and dense.data_ptr() != buffer.data_ptr():
                        buffer.copy_(dense)
            self._are_own = True
        elif self._are_own and not ranks.is_first:
            self._buffers.restore(self._job)
            self._are_own = False


def _is_stored(job: Job, shard: Shard, tensor: torch.Tensor) -> bool:
    # By bytes: batch norm changes its statistics without counting up their version.
    return not shard.element_count or torch.equal(
        _bytes_of(job.leases.read(shard)), _bytes_of(tensor)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, _Owner, torch.Tensor]]:
    seen: set[int] = set()
    for path, child in module.named_modules():
        for key, tensor in child._buffers.items():
            if tensor is None or key in child._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = plain_name(module, f"{path}.{key}" if path else key)
            yield name, _Owner(weakref.ref(child), key), tensor
