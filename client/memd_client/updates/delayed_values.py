"""Values from before the last update, which a commit stores if that update is delayed.

The next forward uses them, and a trainer that is killed before goes on with them. memd itself has
the updated ones. They lie in buffers of the job, one a parameter, and a further buffer says of
which commit they are, and of which parameters.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from memd_client.base import plain
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.transaction.transaction import StagedBuffer
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Staging, Transaction
    from memd_client.updates.resident_target import ResidentTarget

_VALUE_PREFIX = "memd.delayed.value."
_NAMES_PREFIX = "memd.delayed.names."
_STAGED = "@staged"
# The number of the commit, and the bytes of the names that follow; the rest is padding.
_HEADER = struct.Struct("<QQ")
_SIZE_MIN = 4096


@dataclass(frozen=True, slots=True)
class _Stored:
    """The buffer of one parameter, and the one that the next commit moves there."""

    buffer: Shard
    staged: Shard


class DelayedValues:
    """Those of one session. A contributor of commits. It keeps no target: an optimizer that nobody
    refers to ends."""

    def __init__(self) -> None:
        self._targets: WeakValueDictionary[str, ResidentTarget] = WeakValueDictionary()
        self._stored: dict[str, _Stored] = {}  # by the parameter's name
        self._names: dict[int, _Stored] = {}  # by their size

    def declare(self, parameters: Sequence[tuple[str, torch.Tensor]], job: Job) -> None:
        """Before updates of these, by their names in memd, may be delayed.

        Raises:
            CapacityError: the job's quota does not hold their values twice more.
        """
        specs = [
            shard_spec(
                f"{_VALUE_PREFIX}{name}{suffix}",
                kind=types_pb2.SHARD_KIND_BUFFER,
                dtype=parameter.dtype,
                shape=parameter.shape,
            )
            for name, parameter in parameters
            for suffix in ("", _STAGED)
        ]
        shards = [Shard.of(shard) for shard in job.declare(specs)] if specs else []
        for (name, _), buffer, staged in zip(parameters, shards[::2], shards[1::2], strict=True):
            self._stored[name] = _Stored(buffer, staged)

    def add(self, targets: Sequence[ResidentTarget]) -> None:
        """From now on updates of these may be delayed. Their values were declared."""
        self._targets.update((target.shard.name, target) for target in targets)

    def capture(self, number: int, transaction: Transaction) -> Staging:
        """See `Contributor`."""
        late = [target for target in self._targets.values() if target.delay.is_late]
        return partial(self._stage, number, late, transaction.job) if late else list

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        """See `Contributor`."""
        names = self._names_of(number, transaction.job)
        return partial(self._restore, [name for name in names if name in self._targets])

    def holds(self, number: int, transaction: Transaction) -> bool:
        """Never: a loop that starts without them goes on with values that have every update."""
        del number, transaction
        return False

    def forget(self, job: Job) -> None:
        """The last commit's are not to be restored: states were loaded since."""
        for shard in _stored_names(job):
            job.leases.write(shard, torch.zeros(shard.shape, dtype=torch.uint8))
            job.mark_written()

    def from_before(self, target: ResidentTarget, job: Job) -> torch.Tensor:
        """The value of a parameter without its pending update, as the last commit has it or, where
        a load came since, as it is here."""
        if target.delay.is_stored:
            return job.leases.value(self._stored[target.shard.name].buffer)
        parameter = target.parameter
        assert parameter is not None
        return parameter.detach().cpu()

    def _stage(self, number: int, late: Sequence[ResidentTarget], job: Job) -> list[StagedBuffer]:
        """Values go from memd's memory to memd's memory: a step that is not sent yet has changed
        none of them there."""
        staged = []
        for target in late:
            stored = self._stored[target.shard.name]
            if target.delay.is_taken:
                job.leases.write(stored.staged, job.leases.value(target.shard))
            elif not target.delay.is_stored:
                job.leases.write(stored.staged, self.from_before(target, job))
            else:
                continue  # an earlier commit has stored it
            staged.append(StagedBuffer(stored.staged, stored.buffer))
        names = plain.encode([target.shard.name for target in late], what="names of parameters")
        return [*staged, self._stage_names(number, names, job)]

    def _stage_names(self, number: int, names: bytearray, job: Job) -> StagedBuffer:
        size = max(_SIZE_MIN, 1 << (_HEADER.size + len(names) - 1).bit_length())
        if size not in self._names:
            specs = [_names_spec(f"{size}{suffix}", size) for suffix in ("", _STAGED)]
            self._names[size] = _Stored(*map(Shard.of, job.declare(specs)))
        stored = self._names[size]
        lease = job.leases.value(stored.staged, MODE_OVERWRITE)
        data = _HEADER.pack(number, len(names)) + names
        lease.zero_()
        lease[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return StagedBuffer(stored.staged, stored.buffer)

    def _names_of(self, number: int, job: Job) -> list[str]:
        """The parameters of which commit `number` has stored the values."""
        for shard in _stored_names(job):
            data = bytes(job.leases.value(shard).numpy().data)
            found, length = _HEADER.unpack_from(data)
            if found == number:
                names: list[str] = plain.decode(data[_HEADER.size : _HEADER.size + length])
                return names
        return []

    def _restore(self, names: Sequence[str]) -> None:
        for name in names:
            target = self._targets.get(name)
            if target is not None:
                target.show_from_before(self._stored[name].buffer)


def _stored_names(job: Job) -> list[Shard]:
    return [
        Shard.of(shard)
        for shard in job.shards.list_all()
        if shard.spec.name.startswith(_NAMES_PREFIX)
        and not shard.spec.name.endswith(_STAGED)
        and shard.written
    ]


def _names_spec(name: str, size: int) -> types_pb2.ShardSpec:
    return shard_spec(
        f"{_NAMES_PREFIX}{name}",
        kind=types_pb2.SHARD_KIND_BUFFER,
        dtype=torch.uint8,
        shape=[size],
    )


def delayed_values(transaction: Transaction) -> DelayedValues:
    """Those of this session, which are made if there are none."""
    for contributor in transaction.contributors:
        if isinstance(contributor, DelayedValues):
            return contributor
    made = DelayedValues()
    transaction.add(made)
    return made
