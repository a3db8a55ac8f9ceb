"""Values that `offload` stores for the first time: all of them count, or none.

The daemon keeps a value when its lease ends, also if the trainer is killed then. So a *list*, a
blob, names them until all are durable. Who finds the list of a session that is gone takes what it
names for unwritten: half a model would be refused as another one, and values of two trainers would
be mixed.
"""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from memd_client.leases import MODE_OVERWRITE
from memd_client.shard import Shard, shard_spec
from memd_proto.v1 import job_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memd_client.calls import ControlPlane
    from memd_client.leases import Leases
    from memd_client.registry import ShardRegistry

_PREFIX = "memd.offload."


class FirstValues:
    """The values of one session's job that are stored for the first time. One thread at a time."""

    def __init__(
        self,
        *,
        job: str,
        session_id: int,
        control: ControlPlane,
        shards: ShardRegistry,
        leases: Leases | None,
    ) -> None:
        self._job = job
        self._session_id = session_id
        self._control = control
        self._shards = shards
        self._leases = leases
        self._numbers = itertools.count()
        self._unfinished: set[str] = set()
        self._list_names: list[str] = []  # blobs that name them

    def learn(self, listed: Iterable[types_pb2.Shard]) -> None:
        """Finds what sessions before this one have left among all shards of the job."""
        lists = [each for each in listed if each.spec.name.startswith(_PREFIX)]
        if not lists or self._leases is None:
            return
        answer = self._control.get_job(job_pb2.GetJobRequest(name=self._job))
        if answer.job.session_count > 1:
            return  # it may be storing them
        names: set[str] = set()
        for each in lists:
            self._list_names.append(each.spec.name)
            if each.written:
                names.update(json.loads(self._leases.value(Shard.of(each)).numpy().tobytes()))
        # A step has counted the others.
        self._unfinished = {each.spec.name for each in listed if not each.generation} & names

    def is_unfinished(self, name: str) -> bool:
        """Whether the value that the job has of it does not count."""
        return name in self._unfinished

    @contextmanager
    def storing(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these are written for the first time, and made durable."""
        new = set(names)
        if not new:
            yield
            return
        self._unfinished |= new
        self._replace_lists()
        yield
        self._unfinished -= new
        self._replace_lists()

    def _replace_lists(self) -> None:
        old, self._list_names = self._list_names, []
        if self._unfinished:
            assert self._leases is not None  # offload needs shared memory
            data = torch.frombuffer(
                bytearray(json.dumps(sorted(self._unfinished)).encode()), dtype=torch.uint8
            )
            spec = shard_spec(
                f"{_PREFIX}{self._session_id}.{next(self._numbers)}",
                kind=types_pb2.SHARD_KIND_BLOB,
                dtype=torch.uint8,
                shape=data.shape,
            )
            (declared,) = self._shards.declare([spec])
            self._list_names = [spec.name]
            self._leases.value(Shard.of(declared), MODE_OVERWRITE).copy_(data)
        if old:
            request = session_pb2.DeleteRequest(session_id=self._session_id, names=old)
            self._control.delete(request)
            for name in old:
                self._shards.forget(name)
