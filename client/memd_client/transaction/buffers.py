"""Buffers of offloaded modules. They stay in the training process, and their values are part of
every commit.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.backward import is_in_backward
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.transaction.module_names import plain_name
from memd_client.transaction.transaction import StagedBuffer
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


class _SentBytes:
    """Digests of what commits have stored of buffers on a device, and of what the last one brings
    along. The trainer's thread calls `settle`, when no commit is under way; the others are called
    where the bytes arrive."""

    def __init__(self) -> None:
        self._stored: dict[str, bytes] = {}  # by the buffer's name
        self._number = 0  # of the last commit
        self._arrived: dict[str, bytes] = {}

    def settle(self, committed_step: int) -> None:
        """The last commit was made if it is not behind this step."""
        if self._arrived and self._number <= committed_step:
            self._stored.update(self._arrived)
        self._arrived = {}

    def note(self, number: int, name: str, value: torch.Tensor) -> None:
        """`value` goes into commit `number`, unless it `is_new` not."""
        data: Any = _bytes_of(value).numpy()
        self._number = number
        self._arrived[name] = hashlib.blake2b(data, digest_size=16).digest()

    def forget(self, name: str) -> None:
        """The stored value is not known any more."""
        self._stored.pop(name, None)
        self._arrived.pop(name, None)

    def is_new(self, name: str) -> bool:
        """Whether no commit has stored what has arrived."""
        return self._stored.get(name) != self._arrived[name]


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
        self._sent = _SentBytes()
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

    def forget(self, shard: Shard) -> None:
        """Its stored value was replaced, by no commit."""
        self._sent.forget(shard.name)

    def capture(self, number: int, transaction: Transaction) -> Staging:
        # All ranks have the first one's, as DistributedDataParallel broadcasts them.
        if not transaction.job.ranks.is_first:
            return list
        self._sent.settle(transaction.job.steps.committed_step)
        return partial(self._stage, number, transaction.job)

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        del number
        return partial(self.restore, transaction.job)

    def holds(self, number: int, transaction: Transaction) -> bool:
        """`offload()` has put the stored values in place already."""
        del number, transaction
        return False

    def share(self, module: nn.Module, job: Job) -> None:
        """From now on each forward of `module` begins with the first rank's buffers, as in
        DistributedDataParallel, where one that follows a forward in `no_sync()` does not. In a
        forward that is trained all ranks take part. In others each rank reads those of the last
        commit, since one may evaluate alone.
        """
        hook = _SharedBuffers(self, job)
        if next(module.buffers(), None) is not None:
            module.register_forward_pre_hook(hook)

    def _stage(self, number: int, job: Job) -> list[StagedBuffer]:
        """Writes what changed since the last step."""
        changed = []
        for buffer in self._buffers:
            tensor = buffer.owner.tensor()
            if tensor is None:
                continue
            if tensor.device.type != "cpu":
                if tensor.numel():
                    changed.append(self._stage_from_device(number, job, buffer, tensor))
            elif not _is_stored(job, buffer.shard, tensor):
                job.leases.write(buffer.staged, tensor)
                changed.append(StagedBuffer(buffer.staged, buffer.shard))
        return changed

    def _stage_from_device(
        self, number: int, job: Job, buffer: _Buffer, tensor: torch.Tensor
    ) -> StagedBuffer:
        """Its bytes arrive behind the kernels that change it, and tell then whether they are
        new."""
        leases, name = job.leases, buffer.shard.name
        box = [leases.value(buffer.staged, MODE_OVERWRITE)]
        leases.devices.traffic_with(tensor.device).copy_out(
            tensor, box, partial(self._sent.note, number, name)
        )
        return StagedBuffer(buffer.staged, buffer.shard, partial(self._sent.is_new, name))

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
        if is_in_backward():
            return  # a checkpoint computes it again, with the buffers of its forward
        if module.training and torch.is_grad_enabled():
            if self._job.rank_gradients.shares_buffers(self):
                self._share(module)
            self._are_own = True
        elif self._are_own and not ranks.is_first:
            self._buffers.restore(self._job)
            self._are_own = False

    @torch.no_grad()
    def _share(self, module: nn.Module) -> None:
        ranks = self._job.ranks
        # By name: the order of modules may be another on each rank.
        buffers = [buffer for _, buffer in sorted(module.named_buffers(), key=itemgetter(0))]
        if not buffers:
            return
        # In one piece, and as bytes: gloo does not know all dtypes.
        shared = torch.cat([_bytes_of(buffer) for buffer in buffers])
        ranks.broadcast(shared, "share buffers")
        if ranks.is_first:
            return
        parts = shared.split([buffer.nbytes for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # A copy: a view of another dtype begins where its elements may.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _is_stored(job: Job, shard: Shard, tensor: torch.Tensor) -> bool:
    # By bytes: batch norm changes its statistics without counting up their version.
    return not shard.element_count or torch.equal(
        _bytes_of(job.leases.read(shard)), _bytes_of(tensor)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name that `state_dict()` has for a parameter or persistent buffer, the first one of
    that tensor; both without wrappers."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        plain = plain_name(module, name)
        names[plain] = first.setdefault(id(parameter), plain)
    for plain, _, tensor in _persistent_buffers(module, with_further=True):
        names[plain] = first.setdefault(id(tensor), plain)
    return names


def _persistent_buffers(
    module: nn.Module, *, with_further: bool = False
) -> Iterator[tuple[str, _Owner, torch.Tensor]]:
    """Each once, under its first name, or under all."""
    seen: set[int] = set()
    for path, child in module.named_modules(remove_duplicate=not with_further):
        for key, tensor in child._buffers.items():
            if tensor is None or key in child._non_persistent_buffers_set:
                continue
            if id(tensor) in seen and not with_further:
                continue
            seen.add(id(tensor))
            name = plain_name(module, f"{path}.{key}" if path else key)
            yield name, _Owner(weakref.ref(child), key), tensor
