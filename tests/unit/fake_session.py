"""A daemon in this process, for tests of the client: control plane, data plane and state of one
job.

Leases are real torch tensors at new addresses, as from a pool; one for reading has the address of
an equal one that lives. A lease that ended is filled with NaN, so that a pointer kept beyond it
shows. The rules of leases are checked: a write lease is alone, and an update meets nobody who
writes.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

import memd_native
from memd_client.base.dtypes import torch_dtype
from memd_client.base.dynamo import untraced
from memd_client.connection.shard import MAXIMUM, MOMENTS
from memd_client.core.job import Job
from memd_client.core.leases import Leases
from memd_client.errors import from_code
from memd_client.session import Session
from memd_native import MODE_OVERWRITE, MODE_READ, PART_GRADIENT, PART_VALUE
from memd_proto.v1 import job_pb2, session_pb2, tensor_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memd_client.connection.calls import SnapshotReading

AnswerT = TypeVar("AnswerT")

_INVALID_ARGUMENT, _NOT_FOUND, _ALREADY_EXISTS, _CAPACITY, _FENCED, _DEADLINE = 1, 2, 3, 5, 8, 9


def status_error(code: int, message: str) -> memd_native.StatusError:
    error = memd_native.StatusError(message)
    error.code = code
    error.error_number = 0
    error.quota_name, error.quota_bytes = "", 0
    return error


@dataclass(kw_only=True)
class FakeLease:
    shard: str
    part: int
    mode: int
    size_bytes: int
    memory: torch.Tensor
    granted: torch.Tensor  # what the memory was
    shown: torch.Tensor | None = None  # what memd has put there since


@dataclass(kw_only=True)
class FakeAsked:
    """Leases that were asked for together."""

    names: list[str]
    groups: list[str]
    part: int
    phase: int


@dataclass(kw_only=True)
class FakeShard:
    shard_id: int
    spec: types_pb2.ShardSpec
    value: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    master: torch.nn.Parameter | None = None  # fp32
    optimizer: torch.optim.Optimizer | None = None
    generation: int = 0
    keeps_maximum: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.spec.dtype)

    @property
    def bytes_held(self) -> torch.Tensor:
        assert self.value is not None, f"{self.spec.name!r} was never written"
        return self.value

    def message(self) -> types_pb2.Shard:
        spec = types_pb2.ShardSpec()
        spec.CopyFrom(self.spec)
        spec.keeps_maximum = self.keeps_maximum
        return types_pb2.Shard(
            shard_id=self.shard_id,
            spec=spec,
            generation=self.generation,
            written=self.value is not None,
            bytes=torch.Size(self.spec.shape).numel() * self.dtype.itemsize,
        )


class FakeSentCall(Generic[AnswerT]):
    """A call that comes to the daemon when its answer is waited for."""

    def __init__(self, make: Callable[[], AnswerT]) -> None:
        self._make = make

    def result(self) -> AnswerT:
        return self._make()


class FakeCall:
    """A step that comes to the daemon only when its answer is waited for, or a lease that follows
    it: whoever says nothing of it sees the state before it. Where that fails the next wait asks
    again.
    """

    def __init__(self, make: Callable[[], session_pb2.StepResponse | BaseException]) -> None:
        self._make: Callable[[], session_pb2.StepResponse | BaseException] | None = make
        self._response = session_pb2.StepResponse()
        self._failure: BaseException | None = None
        self._was_asked = False
        self.is_refused = False

    def arrive(self) -> None:
        if self._make is None or self._failure is not None:
            return
        self._was_asked = True
        made = self._make()
        if isinstance(made, BaseException):
            self._failure = made
        else:
            self._response, self._make = made, None

    def wait_until_sent(self) -> None:
        pass

    def done(self) -> bool:
        return self._was_asked

    def result(self) -> session_pb2.StepResponse:
        self.arrive()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._response

    def seconds(self) -> float:
        assert self.done()
        return 0.5


@dataclass
class FakeStatistics:
    lease_count: int = 0
    hits: int = 0
    resident_count: int = 0
    lease_wait_seconds: float = 0.0
    step_wall_seconds: float = 0.0
    stall_phase_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    stall_group_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    leases_held: int = 0


@dataclass
class FakeDaemon:
    """One job. `leases` are those alive; `calls` the names of control-plane calls so far."""

    host_bytes: int = 1 << 30
    arena_bytes: int | None = None  # leases beyond it fail; None: as many as you like
    shards: list[FakeShard] = field(default_factory=list)
    leases: dict[int, FakeLease] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    gradients_fit: bool = True
    synced: bool = True
    committed_step: int = 0
    session_count: int = 0
    open_sessions: set[int] = field(default_factory=set)
    last_steps: dict[int, int] = field(default_factory=dict)  # that a session has made
    step_calls: dict[int, FakeCall] = field(default_factory=dict)  # of the last session
    followed_call: int = 0
    step_failures: list[Exception] = field(default_factory=list)  # what the next steps raise
    # What is raised instead of the next answers, of steps that are made.
    lost_answers: list[BaseException] = field(default_factory=list)
    expected: list[session_pb2.StepGroup] = field(default_factory=list)
    final_gradients: list[int] = field(default_factory=list)
    disk_error: str = ""  # why steps are in memory alone
    durable_step: int = 0
    lease_count: int = 0
    asked: list[FakeAsked] = field(default_factory=list)
    asked_ahead: list[list[str]] = field(default_factory=list)
    groups: list[str] = field(default_factory=lambda: ["other"])
    stalls: list[tuple[int, str, int]] = field(default_factory=list)  # phase, group, reason
    step_walls: list[float] = field(default_factory=list)
    can_maximize: bool = True
    can_amsgrad: bool = True
    can_load_in_place: bool = True
    can_keep_scratch: bool = True
    maxima_max: int = 1 << 30  # parameters that may have one
    lease_bytes_max: int = 0  # most alive at a time since it was set to 0
    reads_privately: bool = True
    watched: Counter[int] = field(default_factory=Counter)  # shards, and by how many
    written: list[int] = field(default_factory=list)  # keys of leases that have ended
    # Leases begin and end in any thread; a finalizer may end one within another's beginning.
    lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def session(self, job: str = "fake") -> Session:
        self.session_count += 1
        self.open_sessions.add(self.session_count)
        attached = session_pb2.AttachResponse(
            session_id=self.session_count,
            job_id=1,
            committed_step=self.committed_step,
            host_bytes=self.host_bytes,
            nvme_bytes=1 << 30,
            can_maximize=self.can_maximize,
            can_amsgrad=self.can_amsgrad,
            can_load_in_place=self.can_load_in_place,
            can_keep_scratch=self.can_keep_scratch,
        )
        return Session(
            Job(
                job,
                attached=attached,
                control=self,
                leases=Leases(self, job=job),
                daemon_process_id=1,
                close_connection=lambda: None,
            )
        )

    # Data plane

    def lease_together(
        self,
        shards: Sequence[tuple[int, int, Sequence[int], int]],
        part: int,
        mode: int,
        timeout_s: float,
        phase: int,
        follows: bool = True,
    ) -> list[torch.Tensor | memd_native.StatusError]:
        assert follows  # others are of devices, which this has not
        self.asked.append(
            FakeAsked(
                names=[self.shards[shard_id].spec.name for shard_id, _, _, _ in shards],
                groups=[self.groups[group] for _, _, _, group in shards],
                part=part,
                phase=phase,
            )
        )
        answers: list[torch.Tensor | memd_native.StatusError] = []
        # The native module makes tensors without torch's dispatcher, so transforms of torch.func do
        # not see them.
        with temporarily_clear_interpreter_stack():
            for shard_id, dtype, shape, _ in shards:
                try:
                    answers.append(self.lease(shard_id, part, mode, dtype, tuple(shape), timeout_s))
                except memd_native.StatusError as error:
                    answers.append(error)
        return answers

    def stall_group(self, name: str) -> int:
        if name not in self.groups:
            self.groups.append(name)
        return self.groups.index(name)

    def note_stall(self, phase: int, group: int, reason: int, seconds: float) -> None:
        assert seconds >= 0
        self.stalls.append((phase, self.groups[group], reason))

    def note_step(self, wall_seconds: float) -> None:
        self.step_walls.append(wall_seconds)

    def lease(
        self,
        shard_id: int,
        part: int,
        mode: int,
        dtype: int,
        shape: tuple[int, ...],
        timeout_s: float,
    ) -> torch.Tensor:
        assert timeout_s > 0
        if self.followed_call:
            call = self.step_calls[self.followed_call]
            call.arrive()
            if call.is_refused:
                raise status_error(_INVALID_ARGUMENT, "the step before it was not made")
        shard = self.shards[shard_id]
        memory = torch.empty(tuple(shard.spec.shape), dtype=shard.dtype)
        if torch.Size(shape).numel() * torch_dtype(dtype).itemsize != memory.nbytes:
            raise status_error(_INVALID_ARGUMENT, "shape and dtype do not fit the shard")
        with self.lock:
            self._refuse_conflict(shard, part, mode)
            source = shard.value if part == PART_VALUE else shard.gradient
            if source is None and mode != MODE_OVERWRITE:
                raise status_error(_NOT_FOUND, f"part {part} was never written")
            if mode != MODE_OVERWRITE and source is not None:
                memory.copy_(source)
            for lease in self.leases.values():
                same = (lease.shard, lease.part, lease.mode) == (shard.spec.name, part, MODE_READ)
                same = same and lease.shown is None
                if same and mode == MODE_READ and not _is_written(lease):
                    memory = lease.memory if torch.equal(lease.memory, memory) else memory
            leased = self._hand_out(shard, part, mode, memory)
        return _in_form(leased, shard, dtype, shape)

    def _refuse_conflict(self, shard: FakeShard, part: int, mode: int) -> None:
        for lease in self.leases.values():
            same = (lease.shard, lease.part) == (shard.spec.name, part)
            if same and lease.mode != MODE_READ:
                raise status_error(_DEADLINE, f"{shard.spec.name!r} is being written")
            if same and part == PART_GRADIENT and mode != MODE_READ:
                raise status_error(_DEADLINE, f"the gradient of {shard.spec.name!r} is being read")

    def _hand_out(
        self, shard: FakeShard, part: int, mode: int, memory: torch.Tensor
    ) -> torch.Tensor:
        held_bytes = sum(lease.size_bytes for lease in self.leases.values()) + memory.nbytes
        if self.arena_bytes is not None and held_bytes > self.arena_bytes:
            raise status_error(
                _CAPACITY, f"{held_bytes} bytes are leased, {self.arena_bytes} there are"
            )
        self.lease_count += 1
        key = self.lease_count
        self.leases[key] = FakeLease(
            shard=shard.spec.name,
            part=part,
            mode=mode,
            size_bytes=memory.nbytes,
            memory=memory,
            granted=memory.clone(),
        )
        self.lease_bytes_max = max(self.lease_bytes_max, held_bytes)
        return _handed(memory, self._release, key, shard)

    # The real daemon's leases end without Python.
    @untraced
    def _release(self, key: int, shard: FakeShard) -> None:
        with self.lock:
            lease = self.leases[key]
            if self.watched[shard.shard_id] and _is_written(lease):
                self.written.append(key)
            else:
                self._end(key, shard)

    def _end(self, key: int, shard: FakeShard) -> None:
        with self.lock:
            lease = self.leases.pop(key)
            if lease.mode != MODE_READ:
                if lease.part == PART_GRADIENT:
                    shard.gradient = lease.memory.clone()
                else:
                    self._set_value(shard, lease.memory.clone())
            if all(other.memory is not lease.memory for other in self.leases.values()):
                _bytes_of(lease.memory).fill_(0xFF)

    def watch_writes(self, shard_id: int) -> None:
        self.watched[shard_id] += 1

    @untraced
    def unwatch_writes(self, shard_id: int) -> None:
        with self.lock:
            self.watched[shard_id] -= 1
            if not self.watched[shard_id] and self.shards:
                shard = self.shards[shard_id]
                for key in [k for k in self.written if self.leases[k].shard == shard.spec.name]:
                    self.written.remove(key)
                    self._end(key, shard)

    @property
    def has_written(self) -> bool:
        return bool(self.written)

    def take_written(self, shard_id: int, dtype: int, shape: Sequence[int]) -> torch.Tensor | None:
        shard = self.shards[shard_id]
        keys = [key for key in self.written if self.leases[key].shard == shard.spec.name]
        if not keys:
            return None
        self.written.remove(keys[0])
        with temporarily_clear_interpreter_stack():
            taken = _handed(self.leases[keys[0]].memory, self._end, keys[0], shard)
            return _in_form(taken, shard, dtype, shape)

    def note_shown(self, address: int, length_bytes: int) -> None:
        for lease in list(self.leases.values()):
            if lease.memory.data_ptr() == address:
                lease.shown = lease.memory.clone()

    def is_written(self, address: int, length_bytes: int) -> bool:
        return any(
            lease.memory.data_ptr() == address and _is_written(lease)
            for lease in list(self.leases.values())
        )

    def _set_value(self, shard: FakeShard, value: torch.Tensor) -> None:
        shard.value = value
        if shard.spec.kind == types_pb2.SHARD_KIND_PARAMETER:
            self.synced = False
        if shard.master is not None:
            with torch.no_grad():
                shard.master.copy_(value)

    def lease_resident(self, shard_id: int, dtype: int, shape: tuple[int, ...]) -> None:
        """Every lease is a request."""

    def overwrite_gradient(
        self,
        shard_id: int,
        stall_group: int,
        address: int,
        length_bytes: int,
        timeout_s: float,
        phase: int,
    ) -> None:
        spec = self.shards[shard_id].spec
        wanted = (shard_id, spec.dtype, spec.shape, stall_group)
        (slot,) = self.lease_together([wanted], PART_GRADIENT, MODE_OVERWRITE, timeout_s, phase)
        if isinstance(slot, memd_native.StatusError):
            raise slot
        assert slot.nbytes == length_bytes
        ctypes.memmove(slot.data_ptr(), address, length_bytes)

    def ask_ahead(self, shard_ids: Sequence[int]) -> None:
        """What is asked for ahead is leased by request all the same."""
        self.asked_ahead.append([self.shards[shard_id].spec.name for shard_id in shard_ids])

    @property
    def arena_address(self) -> int:
        raise NotImplementedError  # its leases lie in no arena

    @property
    def segment_bytes(self) -> int:
        raise NotImplementedError

    def arena_view(
        self, lease: object, address: int, dtype: int, shape: Sequence[int]
    ) -> torch.Tensor:
        raise NotImplementedError

    def forget_asked(self) -> bool:
        return False

    def prefetch(self, shard_id: int) -> None:
        self.calls.append(f"prefetch {self.shards[shard_id].spec.name}")

    def gradient_is_final(self, shard_id: int) -> None:
        self.final_gradients.append(shard_id)

    def rank_sum_ended(self, shard_id: int) -> None:
        raise AssertionError(f"only one of several ranks has sums of its own: {shard_id}")

    def scratch_ended(self, shard_id: int) -> None:
        shard = self.shards[shard_id]
        assert shard.spec.name.startswith(memd_native.SCRATCH_PREFIX)
        assert shard.value is not None, "its bytes were ended before"
        shard.value = None

    def follow(self, call: int) -> None:
        self.followed_call = call

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(
            lease_count=self.lease_count,
            resident_count=self.lease_count,  # nothing is ever waited for
            leases_held=len(self.leases),
        )

    def close(self) -> None:
        self.calls.append("close")

    # Control plane

    def detach(self, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        self.calls.append("detach")
        self.open_sessions.discard(request.session_id)
        for shard in self.shards:
            shard.gradient = None
        return session_pb2.DetachResponse(leases_dropped=len(self.leases))

    def declare(self, request: session_pb2.DeclareRequest) -> session_pb2.DeclareResponse:
        self.calls.append("declare")
        if sum(spec.keeps_maximum for spec in request.shards) > self.maxima_max:
            raise from_code(_CAPACITY, "the job's quota does not hold the maxima")
        return session_pb2.DeclareResponse(
            shards=[self._declared(spec).message() for spec in request.shards],
            gradients_fit=self.gradients_fit,
        )

    def _declared(self, spec: types_pb2.ShardSpec) -> FakeShard:
        for shard in self.shards:
            if shard.spec.name == spec.name:
                if (shard.spec.shape, shard.spec.dtype) != (spec.shape, spec.dtype):
                    raise from_code(
                        _ALREADY_EXISTS,
                        f"{spec.name!r}: the job holds it with another shape or dtype",
                    )
                break
        else:
            shard = FakeShard(shard_id=len(self.shards), spec=types_pb2.ShardSpec())
            shard.spec.CopyFrom(spec)
            self.shards.append(shard)
        if not shard.generation and not spec.value_only:
            shard.keeps_maximum = spec.keeps_maximum
        return shard

    def sync(self, request: session_pb2.SyncRequest) -> session_pb2.SyncResponse:
        self.calls.append("sync")
        self._refuse_writers()
        if self.disk_error:
            raise from_code(5, self.disk_error)
        self.durable_step = self.committed_step
        self.synced = True
        return session_pb2.SyncResponse(committed_step=self.committed_step)

    def begin_sync(
        self, request: session_pb2.SyncRequest
    ) -> FakeSentCall[session_pb2.SyncResponse]:
        return FakeSentCall(lambda: self.sync(request))

    def _refuse_writers(self, parts: tuple[int, ...] = (PART_VALUE, PART_GRADIENT)) -> None:
        # Of a blob that is being written, others see the old bytes, or the new ones.
        blobs = {
            shard.spec.name for shard in self.shards if shard.spec.kind == types_pb2.SHARD_KIND_BLOB
        }
        writing = [
            lease.shard
            for lease in self.leases.values()
            if lease.mode != MODE_READ and lease.part in parts and lease.shard not in blobs
        ]
        assert not writing, f"still being written: {writing}"

    def expect_step(self, request: session_pb2.ExpectStepRequest) -> session_pb2.ExpectStepResponse:
        self.calls.append("expect_step")
        self.expected = list(request.groups)
        return session_pb2.ExpectStepResponse()

    def begin_step(self, request: session_pb2.StepRequest) -> FakeCall:
        self.calls.append("step")
        call = FakeCall(lambda: self._step(request))
        self.step_calls[request.call] = call
        return call

    def _step(self, request: session_pb2.StepRequest) -> session_pb2.StepResponse | BaseException:
        """Its answer, or what is raised instead of one."""
        if self.step_failures:
            self.step_calls[request.call].is_refused = True
            return self.step_failures.pop(0)
        if request.step != self.committed_step + 1:
            if request.step != self.last_steps.get(request.session_id):
                return from_code(_FENCED, f"the job stands at step {self.committed_step}")
        else:
            self._make_step(request)
        if self.lost_answers:
            return self.lost_answers.pop(0)
        if not self.disk_error:
            self.durable_step = self.committed_step
        return session_pb2.StepResponse(
            committed_step=self.committed_step,
            durable_step=self.durable_step,
            disk_error=self.disk_error,
            read_bytes=1,
            written_bytes=2,
        )

    def _make_step(self, request: session_pb2.StepRequest) -> None:
        self._refuse_writers()
        assert self.synced, "a step over values that were not made durable"
        for group in request.groups:
            for shard_id in group.shard_ids:
                self._update(self.shards[shard_id], group.settings)
        for pair in request.buffers:
            staged = self.shards[pair.staged_shard_id]
            self.shards[pair.buffer_shard_id].value, staged.value = staged.value, None
        self.committed_step += 1
        self.last_steps[request.session_id] = request.step

    def _update(self, shard: FakeShard, settings: session_pb2.AdamSettings) -> None:
        assert shard.value is not None
        assert shard.gradient is not None, f"a step over {shard.spec.name!r}, which has no gradient"
        assert shard.keeps_maximum or not settings.amsgrad, "amsgrad without a maximum"
        # The first update decides, and memd is told before it.
        assert shard.generation or shard.keeps_maximum == settings.amsgrad
        optimizer = self._optimizer(shard)
        assert shard.master is not None
        state = optimizer.state[shard.master]
        if state and settings.amsgrad:
            state.setdefault(MAXIMUM, torch.zeros_like(shard.master))
        (group,) = optimizer.param_groups
        group.update(
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            maximize=settings.maximize,
            amsgrad=settings.amsgrad,
        )
        group["decoupled_weight_decay"] = settings.decoupled
        shard.master.grad = shard.gradient.float()
        optimizer.step()
        shard.master.grad = shard.gradient = None
        shard.value = shard.master.detach().to(shard.dtype, copy=True)
        shard.generation += 1

    def _optimizer(self, shard: FakeShard) -> torch.optim.Optimizer:
        if shard.optimizer is None:
            assert shard.value is not None
            shard.master = torch.nn.Parameter(shard.value.float().clone())
            shard.optimizer = torch.optim.Adam([shard.master], fused=True)
        return shard.optimizer

    def drop_gradients(
        self, request: session_pb2.DropGradientsRequest
    ) -> session_pb2.DropGradientsResponse:
        self.calls.append("drop_gradients")
        self._refuse_writers((PART_GRADIENT,))
        for shard in self.shards:
            if not request.shard_ids or shard.shard_id in request.shard_ids:
                shard.gradient = None
        return session_pb2.DropGradientsResponse()

    def end_gradients(
        self, request: session_pb2.EndGradientsRequest
    ) -> session_pb2.EndGradientsResponse:
        raise AssertionError(f"only one of several ranks asks this: {request}")

    def delete(self, request: session_pb2.DeleteRequest) -> session_pb2.DeleteResponse:
        self.calls.append("delete")
        unknown = []
        for name in request.names:
            found = [shard for shard in self.shards if shard.spec.name == name]
            for shard in found:
                shard.spec.name, shard.value = f"deleted {shard.shard_id}", None
            if not found:
                unknown.append(name)
        return session_pb2.DeleteResponse(names_unknown=unknown)

    def list_shards(self, request: session_pb2.ListShardsRequest) -> session_pb2.ListShardsResponse:
        self.calls.append("list_shards")
        return session_pb2.ListShardsResponse(shards=[shard.message() for shard in self.shards])

    def get_maxima_bytes(
        self, request: session_pb2.GetMaximaBytesRequest
    ) -> session_pb2.GetMaximaBytesResponse:
        self.calls.append("get_maxima_bytes")
        gaining = [self.shards[shard_id] for shard_id in request.shard_ids]
        count = sum(4 * math.prod(shard.spec.shape) for shard in gaining if not shard.keeps_maximum)
        return session_pb2.GetMaximaBytesResponse(bytes=count)

    def get_job(self, request: job_pb2.GetJobRequest) -> job_pb2.GetJobResponse:
        self.calls.append("get_job")
        return job_pb2.GetJobResponse(job=job_pb2.Job(session_count=len(self.open_sessions)))

    def create_snapshot(
        self, request: job_pb2.CreateSnapshotRequest
    ) -> job_pb2.CreateSnapshotResponse:
        self.calls.append("create_snapshot")
        snapshot = job_pb2.Snapshot(name=request.name, step=self.committed_step)
        is_load = request.session_id != 0
        return job_pb2.CreateSnapshotResponse(snapshot=snapshot, is_load=is_load)

    def list_snapshots(
        self, request: job_pb2.ListSnapshotsRequest
    ) -> job_pb2.ListSnapshotsResponse:
        self.calls.append("list_snapshots")
        return job_pb2.ListSnapshotsResponse()

    def read_snapshot(self, request: job_pb2.ReadSnapshotRequest) -> SnapshotReading:
        raise NotImplementedError

    def drop_snapshot(self, request: job_pb2.DropSnapshotRequest) -> job_pb2.DropSnapshotResponse:
        self.calls.append("drop_snapshot")
        return job_pb2.DropSnapshotResponse()

    def drop_job(self, request: job_pb2.DropJobRequest) -> job_pb2.DropJobResponse:
        self.calls.append(f"drop_job {request.name}")
        self.shards.clear()
        return job_pb2.DropJobResponse()

    def put(self, requests: Iterator[tensor_pb2.PutRequest]) -> tensor_pb2.PutResponse:
        self.calls.append("put")
        first = next(requests)
        shard = self._declared(first.spec)
        data = bytearray(first.data)
        for request in requests:
            assert len(request.data) <= 1 << 20
            data += request.data
        flat = (
            torch.frombuffer(data, dtype=shard.dtype) if data else torch.empty(0, dtype=shard.dtype)
        )
        shard.value = flat.view(torch.Size(shard.spec.shape))
        return tensor_pb2.PutResponse(shard=shard.message())

    def get(self, request: tensor_pb2.GetRequest) -> Iterator[tensor_pb2.GetResponse]:
        self.calls.append("get")
        (shard,) = (shard for shard in self.shards if shard.spec.name == request.name)
        yield tensor_pb2.GetResponse(shard=shard.message())
        assert shard.value is not None
        yield from (tensor_pb2.GetResponse(data=chunk) for chunk in _chunks(shard.value))

    def get_moments(
        self, request: tensor_pb2.GetMomentsRequest
    ) -> Iterator[tensor_pb2.GetMomentsResponse]:
        self.calls.append("get_moments")
        shard = self.shards[request.shard_id]
        optimizer = self._optimizer(shard)
        assert shard.master is not None
        names = MOMENTS if shard.keeps_maximum else MOMENTS[:2]
        zeros = dict.fromkeys(names, torch.zeros_like(shard.master))
        state = {**zeros, **optimizer.state.get(shard.master, {})}
        element_first = 0
        for chunks in zip(*(_chunks(state[name]) for name in names), strict=True):
            yield tensor_pb2.GetMomentsResponse(
                generation=shard.generation,
                element_first=element_first,
                **dict(zip(names, chunks, strict=True)),
            )
            element_first += len(chunks[0]) // 4

    def put_moments(
        self, requests: Iterator[tensor_pb2.PutMomentsRequest]
    ) -> tensor_pb2.PutMomentsResponse:
        self.calls.append("put_moments")
        for request in requests:
            shard = self.shards[request.shard_id]
            optimizer = self._optimizer(shard)
            assert shard.master is not None
            state = optimizer.state[shard.master]
            state["step"] = torch.tensor(float(request.generation))
            given = {name: getattr(request, name) for name in MOMENTS}
            if request.HasField("staged_shard_id"):
                staged = self.shards[request.staged_shard_id]
                assert staged.spec.kind == types_pb2.SHARD_KIND_BLOB
                assert staged.value is not None
                names = MOMENTS if request.staged_has_maximum else MOMENTS[:2]
                parts = staged.value.view(len(names), -1).numpy()
                given.update(zip(names, (part.tobytes() for part in parts), strict=True))
            shard.keeps_maximum = bool(given[MAXIMUM])
            for name, data in given.items():
                if not data:
                    state.pop(name, None)
                    continue
                moment = state.setdefault(name, torch.zeros_like(shard.master))
                part = torch.frombuffer(bytearray(data), dtype=torch.float32)
                moment.view(-1)[request.element_first : request.element_first + part.numel()] = part
            shard.generation = request.generation
        return tensor_pb2.PutMomentsResponse()

    def begin_put_moments(
        self, requests: Sequence[tensor_pb2.PutMomentsRequest]
    ) -> FakeSentCall[tensor_pb2.PutMomentsResponse]:
        return FakeSentCall(lambda: self.put_moments(iter(requests)))


def _in_form(
    leased: torch.Tensor, shard: FakeShard, dtype: int, shape: Sequence[int]
) -> torch.Tensor:
    """The same bytes in another dtype and shape, if that is asked for."""
    if (dtype, list(shape)) == (shard.spec.dtype, list(shard.spec.shape)):
        return leased
    with temporarily_clear_interpreter_stack():
        form = torch.empty(0, dtype=torch_dtype(dtype))
        strides = torch.empty(tuple(shape), device="meta").stride()
        return form.set_(leased.untyped_storage(), 0, tuple(shape), strides)


def _handed(
    memory: torch.Tensor, end: Callable[[int, FakeShard], None], key: int, shard: FakeShard
) -> torch.Tensor:
    """A second storage over `memory`, which outlives it. Its death is the lease's end."""
    storage = torch.from_numpy(_bytes_of(memory).numpy()).untyped_storage()
    handed: torch.Tensor = torch.empty(0, dtype=memory.dtype)
    handed.set_(storage, 0, memory.shape, memory.stride())
    weakref.finalize(storage, end, key, shard).atexit = False
    return handed


def _is_written(lease: FakeLease) -> bool:
    known = lease.granted if lease.shown is None else lease.shown
    # A lease may end inside a dispatch mode of the program.
    with torch._C._DisableTorchDispatch():
        return (lease.part, lease.mode) == (PART_VALUE, MODE_READ) and not torch.equal(
            _bytes_of(lease.memory), _bytes_of(known)
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _chunks(tensor: torch.Tensor, chunk_bytes: int = 1 << 20) -> Iterable[bytes]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [data[first : first + chunk_bytes] for first in range(0, len(data), chunk_bytes)]
