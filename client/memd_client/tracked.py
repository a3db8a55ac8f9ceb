"""Tracked objects, random number generators and the settings of optimizers, which a commit stores
beside parameters and buffers.

They are stored as plain data (`plain.py`) in a buffer of the job, `memd.tracked.<bytes>`, which the
commit replaces together with all others. A shard keeps its shape, so there is one buffer for each
size class that was ever needed. The bytes begin with the commit's number, which shows the newest.
"""

from __future__ import annotations

import hashlib
import re
import struct
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler

from memd_client.base import plain
from memd_client.base.plain import decode
from memd_client.connection.shard import Shard, shard_spec
from memd_client.errors import IntegrityError, InvalidArgument
from memd_client.parameters.tiles import is_in_memd
from memd_client.random_states import (
    is_random_state,
    random_state,
    refuse_other_generators,
    set_random_state,
)
from memd_client.transaction.transaction import StagedBuffer
from memd_native import RANKS_MAX
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from memd_client.core.job import Job
    from memd_client.transaction.transaction import Staging, Transaction, UpdatedOptimizer

_PREFIX = "memd.tracked."
_STAGED = "@staged"
# Magic, number of the commit, bytes of the data that follows; the rest is padding.
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"memdtrk1"
_SIZE_MIN = 4096
# Keys of an optimizer's group that are not settings.
_NOT_SETTINGS = frozenset(("params", "param_names"))
_RNG = "rng"
_RANK_COUNT = "ranks"  # absent from what one rank has stored
_OF_A_RANK = re.compile(re.escape(_PREFIX) + r"rank([0-9]{1,9})\.[0-9]+(@staged)?$")
# Ranks that were there at a commit have the same state of these, and another rank takes it.
_OF_ALL_RANKS = (LRScheduler, torch.amp.GradScaler, torch.optim.Optimizer, nn.Module)
# The number of parameters, and a digest of their names.
_PARAMETERS = re.compile(r"[0-9]{1,18} [0-9a-f]{32}")


class Tracked:
    """The tracked objects of one session, by name. A contributor of commits, and the one that
    stores the settings of optimizers. It stores nothing while nothing is tracked.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._rng = False
        self._shards: dict[str, Shard] = {}
        # The first commit of this session; None once what ranks have left is dropped.
        self._first_number: int | None = 0

    def __bool__(self) -> bool:
        return bool(self._objects) or self._rng

    def add(self, objects: dict[str, Any], *, rng: bool) -> None:
        """Adds all of them, or none if one is refused."""
        if not objects and not rng:
            raise InvalidArgument("track() takes objects by name, or rng=True")
        for name, value in objects.items():
            _refuse_object(name, value)
            if name in self._objects:
                raise InvalidArgument(f"track() has an object named {name!r} already")
        self._objects.update(objects)
        self._rng = self._rng or rng

    def capture(self, number: int, transaction: Transaction) -> Staging:
        """Raises InvalidArgument if something in it is not plain data."""
        self._drop_left(number, transaction.job)
        if not self:
            return list
        if not transaction.has_after_commit:
            self._refuse_averages()
        data = self.encode(
            number, transaction.optimizers, rank_count=transaction.job.ranks.world_size
        )
        return lambda: [self._stage(data, transaction.job)]

    def _drop_left(self, number: int, job: Job) -> None:
        """Before commit `number`: drops what ranks have stored that are gone, once the job stands
        at a commit that was made without them. Until then, all of them may start again."""
        if self._first_number is None or not job.ranks.is_first or not job.has_shared_memory:
            return
        self._first_number = self._first_number or number
        if number == self._first_number:
            return
        names = [
            shard.spec.name
            for shard in job.shards.list_all()
            if _rank_of(shard.spec) >= job.ranks.world_size
        ]
        if names:
            request = session_pb2.DeleteRequest(session_id=job.session_id, names=names)
            job.control.delete(request)
            for name in names:
                job.shards.forget(name)
        self._first_number = None

    def _refuse_averages(self) -> None:
        for name, value in self._objects.items():
            if isinstance(value, AveragedModel):
                raise InvalidArgument(
                    f"{name!r} is an AveragedModel: its update follows the commit, which stores it "
                    "without that update, and resume() has to repeat it; instead of calling "
                    "update_parameters() in the loop, call session.after_commit(lambda step: "
                    "averaged.update_parameters(model)) before resume()"
                )

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        """Raises InvalidArgument if other objects, optimizers or generators are tracked now than
        when commit `number` was made."""
        job, optimizers = transaction.job, transaction.optimizers
        newest, data = _last_stored(job)
        if newest == number:
            stored = checked(decode(data))
            self._refuse_others(stored, optimizers, number=number, job=job.name)
            self._warn_of_other_count(stored, number=number, job=job)
            return lambda: self._restore(stored, optimizers)
        if self and job.ranks.are_several and (of_ranks := _stored_by_ranks(job, number)):
            like = self._most_like_this(of_ranks.values())
            self._refuse_new(like, optimizers, number=number, job=job.name)
            shared = self._shared_by(of_ranks.values(), like)
            self._warn_of_own(shared, number=number, job=job)
            return lambda: self._restore(shared, optimizers)
        if self:
            raise InvalidArgument(
                f"job {transaction.job.name!r}: commit {number} stored no tracked objects"
                + (f" (commit {newest} was the last that did)" if newest else "")
                + "; start at session.committed_step instead, with these objects as they are, or "
                "connect with fresh=True"
            )
        return lambda: None

    def _most_like_this(self, of_ranks: Collection[Any]) -> Any:
        """The data of the rank that has stored most of what this one tracks."""
        return max(of_ranks, key=lambda each: len(each["objects"].keys() & self._objects.keys()))

    def _shared_by(self, of_ranks: Collection[Any], like: Any) -> Any:
        """`like`, the data of one of these ranks, without what is not all ranks'. If that one was
        alone, only the kind of an object says whether it is."""
        others = [each for each in of_ranks if each is not like]
        objects = {
            name: value
            for name, value in like["objects"].items()
            if name in self._objects
            and all(_is_same(value, other["objects"].get(name)) for other in others)
            and (others or isinstance(self._objects[name], _OF_ALL_RANKS))
        }
        return {**like, "objects": objects, "rng": None}

    def _warn_of_other_count(self, stored: Any, *, number: int, job: Job) -> None:
        """For a rank that was there at a commit, which other numbers of ranks may go on from."""
        ranks, count = job.ranks, _rank_count(stored)
        if count == ranks.world_size:
            return
        of_ranks = {**_stored_by_ranks(job, number), ranks.rank: stored}
        own = self._objects.keys() - self._shared_by(of_ranks.values(), stored)["objects"].keys()
        del of_ranks[ranks.rank]
        of_others = {name for other in of_ranks.values() for name in other["objects"]}
        if count > 1 and of_others <= self._objects.keys():
            own &= of_others  # no other rank had any part in the rest
        if own:
            warnings.warn(
                f"job {job.name!r}: {_made_by(count)} made commit {number}, and {ranks.world_size} "
                f"go on: rank {ranks.rank} restores {', '.join(sorted(map(repr, own)))} as one of "
                f"{count}; set samplers to where the job is, since each rank has another part of "
                "the data now",
                stacklevel=2,
            )

    def _warn_of_own(self, shared: Any, *, number: int, job: Job) -> None:
        own = sorted(map(repr, self._objects.keys() - shared["objects"].keys()))
        if self._rng:
            own.append("random number generators")
        if own:
            ranks = job.ranks
            warnings.warn(
                f"job {job.name!r}: {_made_by(_rank_count(shared))} made commit {number}, and rank "
                f"{ranks.rank} of {ranks.world_size} has no state there of {', '.join(own)}, and "
                "goes on with what this process has: before resume(), seed generators by rank, and "
                "set samplers to where the job is",
                stacklevel=2,
            )

    def holds(self, number: int, transaction: Transaction) -> bool:
        return _last_stored(transaction.job)[0] == number

    def encode(
        self, number: int, optimizers: Sequence[UpdatedOptimizer], *, rank_count: int = 1
    ) -> bytes:
        """The bytes that commit `number` of so many ranks stores.

        Raises:
            InvalidArgument: something in it is not plain data.
        """
        data = bytearray(_HEADER.size)
        tree: dict[str, Any] = {
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
            "optimizers": [_settings_of(optimizer) for optimizer in optimizers],
            "rng": random_state() if self._rng else None,
        }
        if rank_count > 1:
            tree[_RANK_COUNT] = rank_count
        data += plain.encode(tree, what="what commit() stores")
        _HEADER.pack_into(data, 0, _MAGIC, number, len(data) - _HEADER.size)
        return bytes(data)

    def _stage(self, data: bytes, job: Job) -> StagedBuffer:
        """Writes it under a staging name."""
        size = size_class(len(data))
        name = f"{_prefix_of(job.ranks.rank)}{size}"
        if name not in self._shards:
            declared = job.declare([_spec(name, size), _spec(name + _STAGED, size)])
            self._shards.update((shard.spec.name, Shard.of(shard)) for shard in declared)
        staged = self._shards[name + _STAGED]
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        job.leases.write(staged, padded)
        return StagedBuffer(staged, self._shards[name])

    def _restore(self, data: Any, optimizers: Sequence[UpdatedOptimizer]) -> None:
        """Objects first, then the groups of optimizers, whose settings a scheduler may change when
        it loads, and random number generators last.
        """
        stored = data["objects"].keys()
        loaded = {name: value for name, value in self._objects.items() if name in stored}
        for name, value in loaded.items():
            try:
                value.load_state_dict(data["objects"][name])
            except Exception as error:
                error.add_note(f"while resume() restored the tracked object {name!r}")
                raise
        for value in loaded.values():
            # Some restore themselves only when they are next used, and draw random numbers then: a
            # StatefulDataLoader makes its iterator. Asking for its state makes it do so now.
            value.state_dict()
        for optimizer, groups in zip(optimizers, data["optimizers"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                _apply(group, settings["settings"])
        if data["rng"] is not None:
            set_random_state(data["rng"])

    def _refuse_others(
        self, data: Any, optimizers: Sequence[UpdatedOptimizer], *, number: int, job: str
    ) -> None:
        self._refuse_other_names(
            set(data["objects"]), rng=data["rng"] is not None, number=number, job=job
        )
        _refuse_other_optimizers(data["optimizers"], optimizers, number=number)
        if data["rng"] is not None:
            refuse_other_generators(data["rng"])

    def _refuse_new(
        self, like: Any, optimizers: Sequence[UpdatedOptimizer], *, number: int, job: str
    ) -> None:
        """For a rank that was not there: it may track less than one that was, as where the first
        rank alone counts what all have seen."""
        stored = like["objects"].keys() & self._objects.keys()
        has_rng = self._rng and like["rng"] is not None
        self._refuse_other_names(set(stored), rng=has_rng, number=number, job=job)
        _refuse_other_optimizers(like["optimizers"], optimizers, number=number)

    def _refuse_other_names(self, stored: set[str], *, rng: bool, number: int, job: str) -> None:
        now, then = set(self._objects), set(stored)
        if self._rng:
            now.add(_RNG)
        if rng:
            then.add(_RNG)
        if now != then:
            parts = [
                f"{what} {', '.join(map(repr, sorted(names)))}"
                for what, names in (
                    ("tracked then and not now:", then - now),
                    ("tracked now and not then:", now - then),
                )
                if names
            ]
            raise InvalidArgument(
                f"job {job!r}: commit {number} stored other objects than track() has now; track "
                f"the same under the same names, or connect with fresh=True: {'; '.join(parts)}"
            )


def size_class(size: int) -> int:
    """The size of the buffer for `size` bytes of data. There are eight sizes between powers of two,
    so that state that grows a little keeps its buffer.
    """
    if size <= _SIZE_MIN:
        return _SIZE_MIN
    step = max(_SIZE_MIN, (1 << (size - 1).bit_length()) >> 4)
    return -(-size // step) * step


def _last_stored(job: Job) -> tuple[int, memoryview]:
    """Number and data of the last commit that stored tracked objects of this rank; 0 if there is
    none."""
    if not job.has_shared_memory:
        return 0, memoryview(b"")
    return _last_of_rank(job, job.shards.list_all(), job.ranks.rank)


def _stored_by_ranks(job: Job, number: int) -> dict[int, Any]:
    """The data of each rank that has stored some with commit `number`."""
    shards = list(job.shards.list_all())
    found = {}
    for rank in range(RANKS_MAX):
        last, data = _last_of_rank(job, shards, rank)
        if last == number:
            found[rank] = checked(decode(data))
    return found


def _rank_count(stored: Any) -> int:
    """How many ranks have made the commit, whether they track anything or not."""
    count: int = stored.get(_RANK_COUNT, 1)
    return count


def _made_by(rank_count: int) -> str:
    return "1 rank has" if rank_count == 1 else f"{rank_count} ranks have"


def _last_of_rank(job: Job, shards: Iterable[types_pb2.Shard], rank: int) -> tuple[int, memoryview]:
    found = (0, memoryview(b""))
    for shard in stored_shards(shards, rank):
        number, data = read_stored(job.leases.read(shard))
        if number > found[0]:
            found = number, data
    return found


def _is_same(one: Any, other: Any) -> bool:
    return plain.encode(one, what="") == plain.encode(other, what="")


def _prefix_of(rank: int) -> str:
    """Each rank has tracked objects of its own: its sampler and generators are not another's."""
    return _PREFIX if not rank else f"{_PREFIX}rank{rank}."


def _rank_of(spec: types_pb2.ShardSpec) -> int:
    """The rank whose tracked objects it has, staged or not; 0: the first, or nobody."""
    found = _OF_A_RANK.match(spec.name)
    return int(found[1]) if found and spec.kind == types_pb2.SHARD_KIND_BUFFER else 0


def stored_shards(shards: Iterable[types_pb2.Shard], rank: int = 0) -> list[Shard]:
    """The shards among `shards` that may contain tracked objects of this rank."""
    prefix = _prefix_of(rank)
    return [
        Shard.of(shard)
        for shard in shards
        if shard.spec.name.startswith(prefix)
        and shard.spec.name.removeprefix(prefix).isdecimal()
        and not shard.spec.name.endswith(_STAGED)
        and shard.spec.kind == types_pb2.SHARD_KIND_BUFFER
        and shard.written
    ]


def read_stored(stored: torch.Tensor) -> tuple[int, memoryview]:
    """The commit's number, and its data.

    Raises:
        IntegrityError: `Tracked.encode` did not make it.
    """
    data: memoryview = stored.numpy().data.cast("B")
    if len(data) < _HEADER.size:
        raise IntegrityError(f"the data of tracked objects is too short: {len(data)} bytes")
    magic, number, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or size > len(data) - _HEADER.size:
        raise IntegrityError("the data of tracked objects has a wrong header")
    return number, data[_HEADER.size : _HEADER.size + size]


def checked(data: Any) -> Any:
    """Returns `data`, which was decoded, if it has the structure that `encode` gives it."""
    fits = (
        type(data) is dict
        and data.keys() - {_RANK_COUNT} == {"objects", "optimizers", "rng"}
        and type(data.get(_RANK_COUNT, 1)) is int
        and type(data["objects"]) is dict
        and all(type(name) is str for name in data["objects"])
        and (data["rng"] is None or is_random_state(data["rng"]))
        and type(data["optimizers"]) is list
        and all(
            type(groups) is list
            and all(
                type(group) is dict
                and group.keys() == {"parameters", "settings"}
                and type(group["parameters"]) is str
                and _PARAMETERS.fullmatch(group["parameters"])
                and type(group["settings"]) is dict
                and not _NOT_SETTINGS & group["settings"].keys()
                for group in groups
            )
            for groups in data["optimizers"]
        )
    )
    if not fits:
        raise IntegrityError("the data of tracked objects is not what track() stores")
    return data


def _spec(name: str, size: int) -> types_pb2.ShardSpec:
    return shard_spec(name, kind=types_pb2.SHARD_KIND_BUFFER, dtype=torch.uint8, shape=[size])


def _refuse_object(name: str, value: Any) -> None:
    if isinstance(value, (Sampler, DataLoader)) and not hasattr(value, "state_dict"):
        raise InvalidArgument(
            f"torch's {type(value).__name__} has no state that could be saved: {name!r}; track "
            "torchdata's StatefulDataLoader instead, or a sampler of your own with state_dict() "
            "and load_state_dict()"
        )
    if isinstance(value, torch.Generator):
        raise InvalidArgument(
            f"a torch.Generator has no state_dict(): {name!r}; rng=True tracks torch's own, and "
            "for this one track an object whose state_dict() returns its get_state()"
        )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            raise InvalidArgument(
                f"track() takes objects with state_dict() and load_state_dict(): {name!r} is a "
                f"{type(value).__name__} without {method}()"
            )
    if isinstance(value, nn.Module) and any(
        is_in_memd(parameter) for parameter in value.parameters()
    ):
        raise InvalidArgument(
            f"the parameters and buffers of offloaded modules are part of every commit: {name!r}"
        )
    if getattr(value, "is_part_of_commits", False):
        raise InvalidArgument(f"memd's optimizers are part of every commit: {name!r}")


def _settings_of(optimizer: UpdatedOptimizer) -> list[dict[str, Any]]:
    return [
        {
            "parameters": _parameters_of(optimizer, group),
            "settings": {key: group[key] for key in group if key not in _NOT_SETTINGS},
        }
        for group in optimizer.param_groups
    ]


def _parameters_of(optimizer: Any, group: dict[str, Any]) -> str:
    """Identifies a group, in as many bytes for a large model as for a small one."""
    names = [optimizer.shard_name(parameter) for parameter in group["params"]]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()
    return f"{len(names)} {digest}"


def _refuse_other_optimizers(
    stored: list[Any], optimizers: Sequence[UpdatedOptimizer], *, number: int
) -> None:
    then = [[group["parameters"] for group in groups] for groups in stored]
    now = [
        [_parameters_of(optimizer, group) for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    if then != now:

        def counts(groups: list[list[str]]) -> list[list[int]]:
            return [[int(group.partition(" ")[0]) for group in each] for each in groups]

        raise InvalidArgument(
            f"commit {number} was made with other optimizers or groups of parameters; make the "
            "same, in the same order, before resume(): numbers of parameters then "
            f"{counts(then)}, now {counts(now)}; equal numbers mean that the names differ"
        )


def _apply(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        present = group.get(key)
        # Other code may hold a learning rate that is a tensor: it is changed in place.
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            present.copy_(value)
        else:
            group[key] = value
