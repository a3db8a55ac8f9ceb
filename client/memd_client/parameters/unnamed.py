"""Parameters that `init` has built and that have no name in memd yet.

An unnamed parameter is at home, an ordinary `nn.Parameter` in this process, or away, with its bytes
in a blob of the daemon. Each use brings it home; those that were not used lately leave. Away it has
a hole, as an offloaded one has: see `hole.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memd_client.base.freed_memory import return_freed_memory
from memd_client.base.identity import ByIdentity
from memd_client.base.storage_uses import USES_OF_ONE, storage_uses
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.held_names import UNNAMED_PREFIX
from memd_client.errors import CapacityError
from memd_client.parameters.given_memory import is_row_major
from memd_client.parameters.hole import make_hole, name_in_messages
from memd_proto.v1 import job_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memd_client.core.job import Job

# Bytes of parameters at home beside those in use. More would save few copies: a constructor and
# what initialises its parameters come close together.
_HOME_BYTES_MAX = 16 << 20
# Smaller ones leave last: a blob costs the daemon as much as they need.
_SMALL_BYTES = 64 << 10
# Names in one call.
_NAMES_IN_CALL = 2048
# No shard has this id, so the answer has none.
_PAGE_LAST = 2**32 - 1

_data: Any = torch._C.TensorBase.data


@dataclass(slots=True, eq=False)
class Unnamed:
    """One unnamed parameter. `UnnamedParameters` alone changes it."""

    store: UnnamedParameters
    number: int
    parameter: weakref.ref[torch.Tensor] | None = None
    is_away: bool = False
    home_bytes: int = 0  # 0 while it is away
    # The blob that has its bytes, or had them when it was away last.
    shard: Shard | None = None


_unnamed: ByIdentity[torch.Tensor, Unnamed] = ByIdentity()

# The record of an unnamed parameter; None for every other tensor.
unnamed = _unnamed.get


class UnnamedParameters:
    """The unnamed parameters of one session. Any thread may call, and waits for the daemon. But
    building is for one thread: another may not compute with a parameter that this one lets leave.
    """

    def __init__(self, job: Job, *, away: type[nn.Parameter]) -> None:
        self._job = job
        self._away = away
        self._lock = RLock()
        self._numbers = itertools.count()
        self._living: dict[int, Unnamed] = {}
        self._home_bytes = 0
        # The part that could not leave when it was last tried.
        self._kept_bytes = 0
        # Parameters that are gone. A finalizer may run in any thread, within any call.
        self._gone: deque[Unnamed] = deque()
        self._blob_names: set[str] = set()
        self._unused_names: list[str] = []  # of these, those that nobody needs any more
        self._named_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, parameter: nn.Parameter) -> None:
        """From now on it may leave. It is at home."""
        with self._lock:
            record = Unnamed(self, next(self._numbers))
            gone = self._gone
            record.parameter = weakref.ref(parameter, lambda _: gone.append(record))
            self._living[record.number] = record
            self._count_home(record, parameter.nbytes)
            _unnamed[parameter] = record

    def living(self) -> list[torch.Tensor]:
        """In the order in which they came."""
        with self._lock:
            found = [_alive(record) for record in self._living.values()]
            return [parameter for parameter in found if parameter is not None]

    def bring(self, parameters: Iterable[object]) -> None:
        """Those of them that are away come home.

        Raises:
            MemdError: the session is closed, or the daemon can't provide the bytes.
        """
        with self._lock:
            mine = self._mine(parameters)
            away = [(record, parameter) for record, parameter in mine if record.is_away]
            if not away:
                return
            self._job.refuse_if_unusable()
            self._make_room(mine)
            with _plainly():
                for record, parameter in away:
                    value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    value.copy_(self._lease(record, parameter))
                    parameter.__class__ = nn.Parameter
                    _data.__set__(parameter, value)
                    record.is_away = False
                    self._count_home(record, value.nbytes)

    def make_room(self, using: Iterable[object] = ()) -> None:
        """If there is too much at home, others than those in use leave.

        Raises:
            CapacityError: the job can't hold them.
        """
        with self._lock:
            self._make_room(self._mine(using))

    def convert(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        """As `module.to(dtype)` converts it, named or not."""
        if parameter.dtype != dtype:
            self.bring([parameter])
            parameter.data = parameter.data.to(dtype)
            self.make_room([parameter])

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Its bytes for reading, wherever they are. Keep the result no longer than you use it."""
        with self._lock, _plainly():
            record = _unnamed.get(parameter)
            if record is None or not record.is_away:
                return parameter.detach()
            return self._lease(record, parameter)

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """They have names now, or nobody may use them."""
        with self._lock:
            for record, parameter in self._mine(parameters):
                _unnamed.discard(parameter)
                self._remove(record)

    def note_named(self, module: nn.Module) -> None:
        """The end of `init` has given the parameters of `module` their names."""
        self._named_modules.add(module)

    def has_named(self, module: nn.Module) -> bool:
        return module in self._named_modules

    def delete_unused(self) -> None:
        """Deletes the blobs of parameters that are gone, or have names."""
        with self._lock:
            self._sweep()
            names, self._unused_names = self._unused_names, []
            self._delete(names)

    def close(self) -> None:
        """Before the session ends: what has no name goes with it."""
        with self._lock:
            self._unused_names = []
            self._delete(list(self._blob_names))

    def drop_left(self) -> None:
        """Deletes what trainers that were killed inside `init` have left, if no other session of
        the job is there than its ranks', which may be inside its own."""
        job = self._job
        if not job.ranks.is_first or not (names := job.held_names.left_unnamed()):
            return
        request = job_pb2.GetJobRequest(name=job.name, page_first=_PAGE_LAST)
        if job.control.get_job(request).job.session_count == job.ranks.world_size:
            self._delete(names)
            job.held_names.forget_left()

    def _delete(self, names: list[str]) -> None:
        job = self._job
        for first in range(0, len(names), _NAMES_IN_CALL):
            some = names[first : first + _NAMES_IN_CALL]
            job.control.delete(session_pb2.DeleteRequest(session_id=job.session_id, names=some))
            self._blob_names.difference_update(some)
            for name in some:
                job.shards.forget(name)

    def _mine(self, parameters: Iterable[object]) -> list[tuple[Unnamed, torch.Tensor]]:
        """Each once."""
        found: dict[int, tuple[Unnamed, torch.Tensor]] = {}
        for parameter in parameters:
            record = _unnamed.get(parameter)
            if record is not None and record.store is self and isinstance(parameter, torch.Tensor):
                found[record.number] = record, parameter
        return list(found.values())

    def _count_home(self, record: Unnamed, size_bytes: int) -> None:
        self._home_bytes += size_bytes - record.home_bytes
        record.home_bytes = size_bytes

    def _remove(self, record: Unnamed) -> None:
        self._living.pop(record.number, None)
        record.parameter = None
        self._count_home(record, 0)
        if record.shard is not None:
            self._unused_names.append(record.shard.name)

    def _sweep(self) -> None:
        while self._gone:
            self._remove(self._gone.popleft())

    def _make_room(self, using: list[tuple[Unnamed, torch.Tensor]]) -> None:
        self._sweep()
        coming_bytes = sum(parameter.nbytes for record, parameter in using if record.is_away)
        if self._home_bytes + coming_bytes - self._kept_bytes <= _HOME_BYTES_MAX:
            return
        used = {record.number for record, _ in using}
        movable = [
            (record, parameter)
            for record in self._living.values()
            if not record.is_away and record.number not in used
            if (parameter := _alive(record)) is not None and self._may_leave(record, parameter)
        ]
        used_bytes = coming_bytes + sum(record.home_bytes for record, _ in using)
        movable_bytes = sum(record.home_bytes for record, _ in movable)
        if movable_bytes + used_bytes > _HOME_BYTES_MAX:
            movable.sort(key=lambda each: each[0].home_bytes < _SMALL_BYTES)  # keeps their order
            leaving = []
            for record, parameter in movable:
                is_small = record.home_bytes < _SMALL_BYTES
                if movable_bytes + (0 if is_small else used_bytes) <= _HOME_BYTES_MAX // 2:
                    break
                leaving.append((record, parameter))
                movable_bytes -= record.home_bytes
            self._put_away(leaving)
        self._kept_bytes = self._home_bytes - movable_bytes

    def _may_leave(self, record: Unnamed, parameter: torch.Tensor) -> bool:
        """Whether nobody else has its memory, and a blob can have all that it is."""
        with torch._C.DisableTorchFunctionSubclass():
            if (
                type(parameter) is not nn.Parameter
                or parameter.device.type != "cpu"
                or parameter.layout is not torch.strided
                or parameter.grad is not None
                or parameter.is_quantized
                or parameter.is_inference()
                or parameter.is_neg()
                or parameter.is_conj()
            ):
                return False
            # It may have been converted.
            self._count_home(record, parameter.nbytes)
            return (
                parameter.numel() > 0
                and is_row_major(parameter)
                and parameter.untyped_storage().resizable()  # of torch, not of numpy or a file
                and storage_uses(parameter) == USES_OF_ONE
            )

    def _put_away(self, leaving: list[tuple[Unnamed, torch.Tensor]]) -> None:
        if not leaving:
            return
        job = self._job
        job.refuse_if_unusable()
        names, self._unused_names = self._unused_names, []
        self._delete(names)
        self._declare([each for each in leaving if not _fits(*each)])
        leases = job.unordered_leases
        with _plainly():
            for record, parameter in leaving:
                assert record.shard is not None
                leases.write(record.shard, _bytes_of(parameter))
                name_in_messages(
                    parameter, f"job {job.name!r}: the bytes of a parameter that init() has built"
                )
                parameter.__class__ = self._away
                _data.__set__(parameter, make_hole(parameter.shape, parameter.dtype))
                record.is_away = True
                self._count_home(record, 0)
        return_freed_memory()

    def _declare(self, wanted: list[tuple[Unnamed, torch.Tensor]]) -> None:
        if not wanted:
            return
        job = self._job
        specs = [
            shard_spec(
                f"{UNNAMED_PREFIX}{job.session_id}/{next(self._numbers)}",
                kind=types_pb2.SHARD_KIND_BLOB,
                dtype=torch.uint8,
                shape=[parameter.nbytes],
            )
            for _, parameter in wanted
        ]
        try:
            declared = job.declare(specs)
        except CapacityError as error:
            raise CapacityError(
                f"{error}; until a model that init() builds has its names, the job holds its "
                "parameters once more"
            ) from error
        self._blob_names.update(spec.name for spec in specs)
        for (record, _), shard in zip(wanted, declared, strict=True):
            if record.shard is not None:
                self._unused_names.append(record.shard.name)
            record.shard = Shard.of(shard)

    def _lease(self, record: Unnamed, parameter: torch.Tensor) -> torch.Tensor:
        assert record.shard is not None
        lease = self._job.unordered_leases.value(record.shard)
        return lease.view(parameter.dtype).view(parameter.shape)


def _alive(record: Unnamed) -> torch.Tensor | None:
    return record.parameter() if record.parameter is not None else None


def _fits(record: Unnamed, parameter: torch.Tensor) -> bool:
    return record.shard is not None and record.shard.size_bytes == parameter.nbytes


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(-1).view(torch.uint8)


@contextmanager
def _plainly() -> Iterator[None]:
    """Without the modes of torch that the caller is in, such as `torch.device("meta")`."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(torch._C.DisableTorchFunction())
        yield
