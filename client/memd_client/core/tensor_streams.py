"""Tensors as streams of messages: for sessions without shared memory, and for Adam's moments, which
only the daemon has in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import MASTER, MOMENTS, Shard
from memd_client.errors import MemdError
from memd_proto.v1 import tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memd_client.connection.calls import PutMomentsCall, TensorCalls
    from memd_client.connection.retry import Retrying
    from memd_proto.v1 import types_pb2

_CHUNK_BYTES = 1 << 20  # TensorService's largest message
# Half a tile. Three fp32 moments and masters take 2 MiB, and a gRPC message at most 4.
_MOMENT_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class MomentPart:
    """Moments of a run of elements of one parameter, after `generation` updates, and `MASTER`
    beside them where a bfloat16 parameter gets other fp32 values."""

    shard_id: int
    generation: int
    element_first: int  # a multiple of a tile's elements
    moments: Mapping[str, torch.Tensor]  # by their names, one-dimensional
    staged: StagedBlob | None = None  # instead of `moments`


@dataclass(frozen=True, slots=True)
class StagedBlob:
    """A blob of the job, which the daemon reads: moments in the order of `MOMENTS`, of elements of
    one tile, and `MASTER` behind them."""

    shard_id: int
    has_maximum: bool
    has_master: bool = False


class TensorStreams:
    """The streams of one session. If the daemon restarts, a stream starts again from its
    beginning."""

    def __init__(
        self, calls: TensorCalls, *, job: str, session_id: int, retrying: Retrying
    ) -> None:
        self._calls = calls
        self._job = job
        self._session_id = session_id
        self._retrying = retrying

    def put(self, spec: types_pb2.ShardSpec, tensor: torch.Tensor) -> Shard:
        """Stores a copy of `tensor` as the shard of `spec`."""
        response = self._retrying.calling(lambda: self._calls.put(self._put_requests(spec, tensor)))
        return Shard.of(response.shard)

    def get(self, name: str) -> torch.Tensor:
        """A copy of the tensor stored under `name`."""
        return self._retrying.calling(lambda: self._get(name))

    def moments(
        self, shard: Shard, *, with_master: bool = False
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """The number of updates, and the moments that the daemon has: fp32, in the shard's
        shape. `with_master`: and `MASTER`, if it is bfloat16.

        Raises:
            MemdError: the parts of the shard have had different numbers of updates.
        """
        if shard.parts == (shard,):
            return self._retrying.calling(lambda: self._moments(shard, with_master=with_master))
        return self._moments_of_parts(shard, with_master=with_master)

    def put_moments(self, parts: Callable[[], Iterable[MomentPart]]) -> None:
        """Replaces moments and numbers of updates. They are durable when it returns, or with the
        next sync if all are in blobs, and not whole or nothing: if it raises, those of some parts
        may be there. `parts` is called again if the stream begins again, and what it raises is
        raised here.
        """
        self._retrying.calling(lambda: self._put_moments(parts))

    def begin_put_moments(self, parts: Sequence[MomentPart]) -> PutMomentsCall:
        """The same of parts in blobs, and returns at once. The daemon works on several parts at a
        time, of this call and of others. The blobs are its own until `result()` of the call has
        returned, which sends them again if the daemon restarted.
        """
        return self._calls.begin_put_moments(
            [request for part in parts for request in self._moment_requests(part)]
        )

    def _put_moments(self, parts: Callable[[], Iterable[MomentPart]]) -> None:
        failures: list[BaseException] = []

        def requests() -> Iterator[tensor_pb2.PutMomentsRequest]:
            try:
                for part in parts():
                    yield from self._moment_requests(part)
            except Exception as error:
                failures.append(error)  # gRPC only says that there was one
                raise

        try:
            self._calls.put_moments(requests())
        except Exception:
            if failures:
                raise failures[0] from None
            raise

    def _moments_of_parts(
        self, shard: Shard, *, with_master: bool
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """One below the other."""
        whole: dict[str, torch.Tensor] = {}
        generations: set[int] = set()
        for part, (first, end) in zip(shard.parts, shard.part_rows(), strict=True):
            generation, found = self.moments(part, with_master=with_master)
            generations.add(generation)
            for name, moment in found.items():
                if name not in whole:
                    whole[name] = torch.zeros(shard.shape)
                whole[name][first:end] = moment
        if len(generations) > 1:
            raise MemdError(
                f"job {self._job!r}: the tiles of parameter {shard.name!r} have had "
                f"{sorted(generations)} updates, and their moments are of no one state; load the "
                "optimizer's state again"
            )
        return generations.pop(), whole

    def _moments(self, shard: Shard, *, with_master: bool) -> tuple[int, dict[str, torch.Tensor]]:
        found: dict[str, bytearray] = {}
        request = tensor_pb2.GetMomentsRequest(
            session_id=self._session_id, shard_id=shard.shard_id, with_master=with_master
        )
        generation = 0
        for part in self._calls.get_moments(request):
            generation = part.generation
            first = 4 * part.element_first
            for name in (*MOMENTS, MASTER):
                data: bytes = getattr(part, name)
                if not data:
                    continue
                if name not in found:
                    found[name] = bytearray(4 * shard.element_count)
                found[name][first : first + len(data)] = data
        return generation, {
            name: torch.frombuffer(data, dtype=torch.float32).view(shard.shape)
            for name, data in found.items()
        }

    def _put_requests(
        self, spec: types_pb2.ShardSpec, tensor: torch.Tensor
    ) -> Iterator[tensor_pb2.PutRequest]:
        yield tensor_pb2.PutRequest(session_id=self._session_id, spec=spec)
        for chunk in _chunks(tensor, _CHUNK_BYTES):
            yield tensor_pb2.PutRequest(data=chunk)

    def _get(self, name: str) -> torch.Tensor:
        shard: Shard | None = None
        data = bytearray()
        for part in self._calls.get(tensor_pb2.GetRequest(session_id=self._session_id, name=name)):
            if shard is None:
                shard = Shard.of(part.shard)
            data += part.data
        if shard is None or len(data) != shard.size_bytes:
            raise MemdError(
                f"job {self._job!r}: the daemon sent only {len(data)} bytes of {name!r}"
            )
        if not data:
            return torch.empty(shard.shape, dtype=shard.dtype)
        return torch.frombuffer(data, dtype=shard.dtype).view(shard.shape)

    def _moment_requests(self, part: MomentPart) -> Iterator[tensor_pb2.PutMomentsRequest]:
        if part.staged is not None:
            yield tensor_pb2.PutMomentsRequest(
                session_id=self._session_id,
                shard_id=part.shard_id,
                generation=part.generation,
                element_first=part.element_first,
                staged_shard_id=part.staged.shard_id,
                staged_has_maximum=part.staged.has_maximum,
                staged_has_master=part.staged.has_master,
            )
            return
        chunk_bytes = 4 * _MOMENT_CHUNK_ELEMENTS
        streams = (_chunks(moment.float(), chunk_bytes) for moment in part.moments.values())
        for index, chunks in enumerate(zip(*streams, strict=True)):
            yield tensor_pb2.PutMomentsRequest(
                session_id=self._session_id,
                shard_id=part.shard_id,
                generation=part.generation,
                element_first=part.element_first + index * _MOMENT_CHUNK_ELEMENTS,
                **dict(zip(part.moments, chunks, strict=True)),
            )


def _chunks(tensor: torch.Tensor, chunk_bytes: int) -> Iterator[bytes]:
    """The tensor's bytes in row-major order. If it is contiguous, one chunk is copied at a time."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    for first in range(0, flat.numel(), chunk_bytes):
        yield flat[first : first + chunk_bytes].numpy().tobytes()
