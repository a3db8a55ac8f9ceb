"""Tensors under a name: put, get, prefetch and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memd_client.base.kept_memory import keep_in_place
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.first_values import OFFLOAD_PREFIX
from memd_client.core.held_names import UNNAMED_PREFIX
from memd_client.core.moving_moments import STAGED_PREFIX
from memd_client.core.name_uses import NameUses
from memd_client.core.tied_names import TIED_PREFIX
from memd_client.errors import InvalidArgument, UnknownName
from memd_native import SCRATCH_PREFIX
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memd_client.core.job import Job

_OWN_PREFIXES = (STAGED_PREFIX, UNNAMED_PREFIX, TIED_PREFIX, OFFLOAD_PREFIX, SCRATCH_PREFIX)


class Blobs:
    """The named tensors of one job. Its methods are those of `Session`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._uses = NameUses()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        job = self._job
        job.refuse_if_unusable()
        _refuse_blob(name, tensor)
        self._uses.begin_use([name])
        try:
            self._put(name, tensor.detach())
        finally:
            self._uses.end_use([name])

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        job = self._job
        spec = shard_spec(
            name, kind=types_pb2.SHARD_KIND_BLOB, dtype=tensor.dtype, shape=tensor.shape
        )
        if not job.has_shared_memory:
            job.shards.remember(job.streams.put(spec, tensor))
            return
        (declared,) = job.declare([spec])
        shard = Shard.of(declared)
        if shard.kind != types_pb2.SHARD_KIND_BLOB:
            raise InvalidArgument(
                f"job {job.name!r}: {name!r} is a parameter or buffer of a module; put under "
                "another name"
            )
        job.unordered_leases.write(shard, tensor)
        job.mark_written()

    def get(self, name: str) -> torch.Tensor:
        job = self._job
        job.refuse_if_unusable()
        self._uses.begin_use([name])
        try:
            tensor = self._get(name)
        finally:
            self._uses.end_use([name])
        if job.store.scratch_uses.is_expected:
            keep_in_place(tensor)  # memd has its bytes
        return tensor

    def _get(self, name: str) -> torch.Tensor:
        job = self._job
        if not job.has_shared_memory:
            job.shards.find(name)  # its error names similar ones
            return job.streams.get(name)
        try:
            return self._read(job.shards.find(name))
        except UnknownName:
            # Another process may have deleted it and put another tensor under its name.
            job.shards.forget(name)
            return self._read(job.shards.find(name))

    def prefetch(self, names: Iterable[str]) -> None:
        job = self._job
        job.refuse_if_unusable()
        if isinstance(names, str):
            raise InvalidArgument(
                f"prefetch takes several names; put this one in a list: {names!r}"
            )
        wanted = list(names)
        self._uses.begin_use(wanted)
        try:
            shards = [job.shards.find(name) for name in wanted]
            if job.has_shared_memory:
                for shard in shards:
                    job.unordered_leases.prefetch(shard)
        finally:
            self._uses.end_use(wanted)

    def delete(self, name: str) -> None:
        job = self._job
        job.refuse_if_unusable()
        self._uses.begin_deletion(name)
        try:
            self._delete(name)
        finally:
            self._uses.end_deletion(name)

    def _delete(self, name: str) -> None:
        job = self._job
        if name.startswith(TIED_PREFIX):
            raise InvalidArgument(
                f"job {job.name!r}: {name!r} says which names a tensor of a module has; offload() "
                "replaces it"
            )
        # The name must exist now: if the daemon goes away during the call, the repeated call takes
        # a missing name for one that it has deleted itself.
        if job.shards.find(name).kind != types_pb2.SHARD_KIND_BLOB:
            raise InvalidArgument(
                f"job {job.name!r}: {name!r} is a parameter or buffer of a module; it goes with "
                "the job"
            )
        request = session_pb2.DeleteRequest(session_id=job.session_id, names=[name])
        unknown = job.control.delete(request).names_unknown
        job.shards.forget(name)
        if unknown:
            raise job.shards.unknown(name)

    def _read(self, shard: Shard) -> torch.Tensor:
        if shard.kind == types_pb2.SHARD_KIND_BLOB:
            return self._job.unordered_leases.read(shard)
        self._job.held_names.settle()  # a load may have broken off: some are old, some new
        if shard.kind == types_pb2.SHARD_KIND_PARAMETER:
            self._job.leases_of(shard)  # refuses what a use refuses
            return self._job.unordered_leases.read(shard)
        return self._job.leases.read(shard)


def _refuse_blob(name: str, tensor: torch.Tensor) -> None:
    if not name:
        raise InvalidArgument("a tensor is put under a name that is not empty")
    if name.startswith(_OWN_PREFIXES):
        raise InvalidArgument(
            f"names that begin with {' or '.join(_OWN_PREFIXES)} are memd's own, which removes "
            f"them; put under another: {name!r}"
        )
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"put stores tensors, not {type(tensor).__name__}: {name!r}")
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"put stores dense tensors; call to_dense() first: {name!r} is {tensor.layout}"
        )
