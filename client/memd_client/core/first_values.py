"""Values that `offload` stores for the first time: all of them count, or none.

The daemon keeps a value when its lease ends, also if the trainer is killed then. So a *list*, a
blob, names them until all are durable. A session that finds the list of one that is gone takes what
it names for unwritten: half a model would be refused as another one, and values of two trainers
would be mixed.

While others are attached, nobody can know whether the session of a list is gone: offload() then
stores nothing and reads nothing. A list is declared before anything else is looked at and written
after that, so of two sessions that begin at the same moment one sees the other. Hence no session
stores its values while the list of another one stands, and no list names what another session has
stored.
"""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.errors import InvalidArgument, MemdError, UnknownName
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memd_client.core.job_store import JobStore

OFFLOAD_PREFIX = "@offload/"


class FirstValues:
    """The values of one session's job that are stored for the first time. One thread at a time."""

    def __init__(self, store: JobStore) -> None:
        self._job = store.job
        self._store = store
        self._numbers = itertools.count()
        self._unfinished: set[str] = set()
        self._list_names: list[str] = []  # blobs that name them
        self._is_stale = False  # the lists name more, or are more than one

    def learn(self, listed: Iterable[types_pb2.Shard]) -> None:
        """Finds what sessions that are gone have left among all shards of the job.

        Raises:
            InvalidArgument: they may not be gone. Nothing has changed.
        """
        shards = list(listed)
        lists = self._lists_of_others(shards)
        if not lists or self._store.leases is None:
            return
        others = self._store.other_session_count()
        if others > 0:
            raise InvalidArgument(
                f"job {self._job!r} has values that were not stored completely, and {others} other "
                "sessions, of which one may be storing them: call again when it has; if its "
                "trainer was killed, close the job's other sessions first"
            )
        names: set[str] = set()
        for each in lists:
            names.update(self._names_in(each))
        # A step has counted the others.
        self._unfinished |= {each.spec.name for each in shards if not each.generation} & names
        self._list_names += [each.spec.name for each in lists]
        self._is_stale = True

    def learn_again(self) -> None:
        """As `learn`. After values were declared: those that were written by then are complete, or
        some list has their names."""
        self.learn(self._store.shards.list_all())

    def leave_to_first_rank(self) -> None:
        """The first rank has stored all values, also those that others had left."""
        self._unfinished, self._list_names, self._is_stale = set(), [], False

    def is_unfinished(self, name: str) -> bool:
        """Whether the value that the job has of it does not count."""
        return name in self._unfinished

    @contextmanager
    def storing(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these are written for the first time, and made durable.

        Raises:
            InvalidArgument: another session stores values at this moment. Nothing has changed.
        """
        new = set(names)
        if new:
            self._begin(new)
        yield
        self._unfinished -= new
        self._is_stale |= bool(new)
        if self._is_stale:
            self._replace_lists()

    def _begin(self, new: set[str]) -> None:
        old, names = list(self._list_names), self._unfinished | new
        data = _encoded(names)
        shard = self._declare_list(data)
        listed = list(self._store.shards.list_all())
        stored = {each.spec.name for each in listed if each.written} & new - self._unfinished
        if stored or self._lists_of_others(listed):
            self._delete([shard.name])
            raise InvalidArgument(
                f"job {self._job!r}: another session stores its values at this moment; call again "
                "when it has"
            )
        self._write_list(shard, data)
        self._unfinished = names
        self._delete(old)

    def _replace_lists(self) -> None:
        old = list(self._list_names)
        if self._unfinished:
            data = _encoded(self._unfinished)
            self._write_list(self._declare_list(data), data)
        self._delete(old)
        self._is_stale = False

    def _lists_of_others(self, listed: Iterable[types_pb2.Shard]) -> list[types_pb2.Shard]:
        lists = [
            each
            for each in listed
            if each.spec.kind == types_pb2.SHARD_KIND_BLOB
            and each.spec.name.startswith(OFFLOAD_PREFIX)
        ]
        return [each for each in lists if each.spec.name not in self._list_names]

    def _names_in(self, listed: types_pb2.Shard) -> list[str]:
        if not listed.written:
            return []  # nor was any value
        assert self._store.leases is not None
        try:
            data = self._store.leases.read(Shard.of(listed))
        except UnknownName:
            return []  # its session has finished, and gone, since it was listed
        names = _decoded(data)
        if names is None:
            name = listed.spec.name
            raise MemdError(
                f"job {self._job!r}: {name!r} should list values that were not stored completely, "
                "and cannot be read; connect with fresh=True, or, if you know that the job's "
                f"values are whole, call session.delete({name!r})"
            )
        return names

    def _declare_list(self, data: torch.Tensor) -> Shard:
        # A daemon that was restarted counts its sessions anew.
        names = (f"{OFFLOAD_PREFIX}{self._store.session_id}.{number}" for number in self._numbers)
        spec = shard_spec(
            next(name for name in names if name not in self._list_names),
            kind=types_pb2.SHARD_KIND_BLOB,
            dtype=torch.uint8,
            shape=data.shape,
        )
        (declared,) = self._store.shards.declare([spec])
        self._list_names.append(spec.name)
        return Shard.of(declared)

    def _write_list(self, shard: Shard, data: torch.Tensor) -> None:
        assert self._store.leases is not None  # of a session that stores values
        self._store.leases.value(shard, MODE_OVERWRITE).copy_(data)

    def _delete(self, names: list[str]) -> None:
        if names:
            self._store.delete(names)
            # Not before: if it fails, whoever calls again deletes them.
            self._list_names = [name for name in self._list_names if name not in names]


def _encoded(names: Iterable[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(sorted(names)).encode()), dtype=torch.uint8)


def _decoded(data: torch.Tensor) -> list[str] | None:
    """None: no list was encoded so."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        return None
    try:
        names = json.loads(data.numpy().tobytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return names
