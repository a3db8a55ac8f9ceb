"""Leases: torch tensors over the arena's own bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

import memd_native
from memd_client.base.dtypes import DTYPE_NUMBERS
from memd_client.base.interrupts import safe_point
from memd_client.base.stalls import current_phase, module_group
from memd_client.connection.retry import AtOnce
from memd_client.core.devices import Devices
from memd_client.core.gradient_order import GradientOrder
from memd_client.core.ranks import Ranks
from memd_client.core.registration import ArenaPlane, HostRegistration
from memd_client.errors import (
    CODE_CAPACITY,
    CODE_DEADLINE,
    CODE_NOT_FOUND,
    CODE_UNAVAILABLE,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    MemdError,
    from_code,
)
from memd_native import MODE_OVERWRITE, MODE_READ, MODE_WRITE, PART_GRADIENT, PART_VALUE
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.retry import Retrying
    from memd_client.connection.shard import Shard
    from memd_client.core.parameter_leases import ParameterLeases

__all__ = [
    "MODE_OVERWRITE",
    "MODE_READ",
    "MODE_WRITE",
    "DataPlane",
    "LeaseStatistics",
    "Leases",
]

# A lease may wait for the disk, and for a step to end.
_TIMEOUT_S = 60.0
# torch copies larger gradients, on as many threads as it computes with. Up to this size one thread
# that writes past the caches is as fast, and saves the cost of a tensor over the slot.
_COPIED_BYTES_MAX = 4 << 20
# How often a lease that follows a step checks whether that step failed before it reached the store.
_LOOK_S = 10.0


class LeaseStatistics(Protocol):
    """Counters of the native session."""

    @property
    def lease_count(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def resident_count(self) -> int: ...
    @property
    def lease_wait_seconds(self) -> float: ...
    @property
    def step_wall_seconds(self) -> float: ...
    @property
    def stall_phase_seconds(self) -> dict[str, dict[str, float]]: ...
    @property
    def stall_group_seconds(self) -> dict[str, dict[str, float]]: ...
    @property
    def leases_held(self) -> int: ...


class DataPlane(ArenaPlane, Protocol):
    """The part of `memd_native.ClientSession` that leases use."""

    def lease_together(
        self,
        shards: Sequence[tuple[int, int, Sequence[int], int]],
        part: int,
        mode: int,
        timeout_s: float,
        phase: int,
        follows: bool = True,
    ) -> list[Any]: ...
    def lease_resident(self, shard_id: int, dtype: int, shape: tuple[int, ...]) -> Any: ...
    def overwrite_gradient(
        self,
        shard_id: int,
        stall_group: int,
        address: int,
        length_bytes: int,
        timeout_s: float,
        phase: int,
    ) -> None: ...
    def ask_ahead(self, shard_ids: Sequence[int]) -> None: ...
    def forget_asked(self) -> bool: ...
    def prefetch(self, shard_id: int) -> None: ...
    def gradient_is_final(self, shard_id: int) -> None: ...
    def rank_sum_ended(self, shard_id: int) -> None: ...
    def scratch_ended(self, shard_id: int) -> None: ...
    def follow(self, call: int) -> None: ...
    def stall_group(self, name: str) -> int: ...
    def note_stall(self, phase: int, group: int, reason: int, seconds: float) -> None: ...
    def note_step(self, wall_seconds: float) -> None: ...
    @property
    def reads_privately(self) -> bool: ...
    def watch_writes(self, shard_id: int) -> None: ...
    def unwatch_writes(self, shard_id: int) -> None: ...
    @property
    def has_written(self) -> bool: ...
    def take_written(self, shard_id: int, dtype: int, shape: Sequence[int]) -> Any: ...
    def note_shown(self, address: int, length_bytes: int) -> None: ...
    def is_written(self, address: int, length_bytes: int) -> bool: ...
    def statistics(self) -> LeaseStatistics: ...
    def close(self) -> None: ...


class FollowedStep(Protocol):
    """The part of `steps.Steps` that leases use."""

    @property
    def is_open(self) -> bool: ...
    def settle_answered(self) -> bool: ...
    def settle_for_lease(self) -> None: ...
    def note_unreachable(self, error: DaemonUnavailable) -> None: ...


class NoStep:
    """For leases that follow no step."""

    @property
    def is_open(self) -> bool:
        return False

    def settle_answered(self) -> bool:
        return False

    def settle_for_lease(self) -> None:
        pass

    def note_unreachable(self, error: DaemonUnavailable) -> None:
        pass


class Leases:
    """Leases of one session. Any thread may call. A lease waits for at most a minute after the step
    that it follows has ended.

    A lease ends when the last tensor that shares its storage is freed, so keep none longer than you
    use it.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        job: str,
        retrying: Retrying | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._plane = plane
        self._job = job
        self._ranks = ranks or Ranks()
        self._retrying = retrying or AtOnce()
        self._groups: dict[int, int] = {}  # shard id → the group that its waits are counted under
        self._step: FollowedStep = NoStep()
        self._gradient_order = GradientOrder(plane)
        self._registration = HostRegistration(plane)
        self._devices = Devices()
        if self._ranks.are_several:
            self._gradient_order.stop_asking()  # they take a slot in turn

    def follow_steps(self, steps: FollowedStep) -> None:
        """From now on leases follow the step in flight, and raise its error if it fails."""
        self._step = steps

    @property
    def devices(self) -> Devices:
        """The devices on which parameters are used."""
        return self._devices

    def of(self, shard: Shard) -> ParameterLeases:
        """Those of a parameter where it is used."""
        return self._devices.leases_of(shard) if shard.is_on_device else self

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        self._gradient_order.end_round()
        self._devices.end_round()

    @property
    def is_step_open(self) -> bool:
        """Gradients are sealed, and their step is not closed."""
        return self._step.is_open

    @property
    def gradient_order(self) -> GradientOrder:
        return self._gradient_order

    @property
    def registration(self) -> HostRegistration:
        """For copies between leases and devices."""
        return self._registration

    def expect_backward(self, shard: Shard) -> None:
        """Backward uses a parameter: its first gradient slots may be reserved now, unless a step
        still has gradients."""
        if not self._step.settle_answered() and not self._step.is_open:
            self._gradient_order.expect_backward(shard.shard_id)

    def value(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        """The bytes of a parameter, buffer or blob, in the shard's shape."""
        self._refuse_other_rank([shard], mode)
        if mode == MODE_READ:
            # First the fast path, which sends no request.
            lease = self.resident(shard)
            if lease is not None:
                return lease
        return self._ask([shard], PART_VALUE, mode)[0]

    def _refuse_other_rank(self, shards: Sequence[Shard], mode: int) -> None:
        if mode == MODE_READ or self._ranks.is_first:
            return
        for shard in shards:
            if shard.kind == types_pb2.SHARD_KIND_PARAMETER or shard.is_bytes:
                raise InvalidArgument(
                    f"job {self._job!r}: rank {self._ranks.rank} cannot write {shard.label!r}, "
                    "which all ranks share: values are rank 0's; write them there alone, and wait "
                    "for it with torch.distributed.barrier() on all ranks"
                )

    def resident(self, shard: Shard) -> torch.Tensor | None:
        """A lease for reading that needs no request; None if there is none, for any reason."""
        lease: torch.Tensor | None
        if shard.is_bytes:
            lease = self._plane.lease_resident(shard.shard_id, *shard.lease_form)
            return shard.over(lease) if lease is not None else None
        lease = self._plane.lease_resident(shard.shard_id, DTYPE_NUMBERS[shard.dtype], shard.shape)
        return lease

    def values(self, shards: Sequence[Shard], mode: int = MODE_READ) -> list[torch.Tensor]:
        """`value` of each, all or none. The requests are sent together."""
        self._refuse_other_rank(shards, mode)
        return self._ask(shards, PART_VALUE, mode)

    def gradient(
        self, shard: Shard, mode: int = MODE_READ, *, part: int = PART_GRADIENT
    ) -> torch.Tensor:
        """The gradient of a parameter, in the parameter's shape and dtype. PART_RANK_SUM: what this
        rank has accumulated of it, which is there from the first lease for writing on."""
        return self._ask([shard], part, mode)[0]

    def gradient_before_step(self, shard: Shard) -> torch.Tensor:
        """A lease for writing of a gradient that the step in flight has taken, and nobody has sent
        yet."""
        return self._ask([shard], PART_GRADIENT, MODE_WRITE, follows=False)[0]

    def overwrite_gradient(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Copies `gradient`, in the parameter's shape and dtype, into the parameter's slot."""
        if not _is_plain_memory(gradient) or self._step.settle_answered():
            self.gradient(shard, MODE_OVERWRITE).copy_(gradient)
            return

        def overwrite() -> None:
            try:
                self._plane.overwrite_gradient(
                    shard.shard_id,
                    self._group_of(shard),
                    gradient.data_ptr(),
                    gradient.nbytes,
                    _TIMEOUT_S,
                    current_phase(),
                )
            except memd_native.StatusError as error:
                raise self._translated(error, shard) from error

        try:
            self._retrying.calling(overwrite, lease=True)
        except DaemonUnavailable as error:
            self._step.note_unreachable(error)
            raise

    def join(self, shard: Shard) -> None:
        """See `ParameterLeases`. Host memory has no streams."""

    def note_change(self, shard: Shard) -> None:
        """See `ParameterLeases`. The daemon knows."""

    def add_gradient(self, shard: Shard, part: torch.Tensor) -> None:
        """Adds this rank's part to a sum, when the ranks before it have added theirs.

        Raises:
            DeadlineExceeded: names the rank that has not.
            SessionFenced: a rank has ended.
        """
        began = time.monotonic()
        while True:
            try:
                self.gradient(shard, MODE_WRITE).add_(part)
            except DeadlineExceeded:
                safe_point()
                if time.monotonic() - began > self._ranks.limit_s:
                    raise
            else:
                return

    @property
    def read_privately(self) -> bool:
        """A write through a lease for reading stays in this process."""
        return self._plane.reads_privately

    def watch_writes(self, shard: Shard) -> None:
        """From now on `take_written` has leases of this shard, until `unwatch_writes` was called as
        often. Writes to others end with the lease."""
        self._plane.watch_writes(shard.shard_id)

    def unwatch_writes(self, shard: Shard) -> None:
        """Undoes one `watch_writes`. After the last one, leases that nobody has taken end."""
        self._plane.unwatch_writes(shard.shard_id)

    @property
    def has_written(self) -> bool:
        """Whether `take_written` has any, of whatever shard."""
        return self._plane.has_written

    def take_written(self, shard: Shard) -> torch.Tensor | None:
        """The next lease for reading that has ended, and through which the value was written."""
        if not self._plane.has_written:
            return None
        taken = self._plane.take_written(shard.shard_id, *shard.lease_form)
        return shard.over(taken) if taken is not None else None

    def note_shown(self, lease: torch.Tensor) -> None:
        """memd has put these bytes into a lease for reading, which lives: they are no write."""
        self._plane.note_shown(lease.data_ptr(), lease.nbytes)

    def is_written(self, lease: torch.Tensor) -> bool:
        """Whether the value was written through a lease for reading, which lives."""
        return self._plane.is_written(lease.data_ptr(), lease.nbytes)

    def write(self, shard: Shard, value: torch.Tensor) -> None:
        """Replaces the bytes of `shard`."""
        if value.shape != shard.shape or value.dtype != shard.dtype:
            raise InvalidArgument(
                f"job {self._job!r}: {shard.name!r} is {shard.dtype} {list(shard.shape)} and "
                f"cannot become {value.dtype} {list(value.shape)}"
            )
        if shard.element_count:
            with torch.no_grad():
                self.value(shard, MODE_OVERWRITE).copy_(value)

    def fill(self, shard: Shard, fill: Callable[[torch.Tensor], None]) -> None:
        """`fill` writes all bytes of `shard`, which has elements, into a tensor of uint8."""
        lease = self.value(shard, MODE_OVERWRITE)
        fill(lease.view(-1).view(torch.uint8))

    def read(self, shard: Shard) -> torch.Tensor:
        """The bytes of `shard`. A shard without elements cannot be leased."""
        return (
            self.value(shard)
            if shard.element_count
            else torch.empty(shard.shape, dtype=shard.dtype)
        )

    def prefetch(self, shard: Shard) -> None:
        def prefetch() -> None:
            try:
                self._plane.prefetch(shard.shard_id)
            except memd_native.StatusError as error:
                raise self._translated(error, shard) from error

        self._retrying.calling(prefetch, lease=True)

    def gradient_is_final(self, shard: Shard) -> None:
        """Tells the daemon; a hint, which is not repeated if the daemon is gone."""
        try:
            self._plane.gradient_is_final(shard.shard_id)
        except memd_native.StatusError as error:
            if error.code != CODE_UNAVAILABLE:
                raise self._translated(error, shard) from error

    def follow(self, call: int) -> None:
        """Leases from now on come after the step of this call; 0: no step is in flight."""
        self._plane.follow(call)

    def statistics(self) -> LeaseStatistics:
        return self._plane.statistics()

    @property
    def plane(self) -> DataPlane:
        """For measurements."""
        return self._plane

    def close(self) -> None:
        """Waits for the copies to and from devices."""
        self._devices.close()
        self._registration.close()
        self._plane.close()

    def note_stall(self, shard: Shard | None, reason: int, seconds: float) -> None:
        """Counts a wait of the caller that was no lease, under `shard` if it was for one."""
        group = self._group_of(shard) if shard is not None else 0
        self._plane.note_stall(current_phase(), group, reason, seconds)

    def note_step(self, wall_seconds: float) -> None:
        self._plane.note_step(wall_seconds)

    def _ask(
        self, shards: Sequence[Shard], part: int, mode: int, *, follows: bool = True
    ) -> list[torch.Tensor]:
        step = self._step if follows else NoStep()
        wanted = [(shard.shard_id, *shard.lease_form, self._group_of(shard)) for shard in shards]
        phase = current_phase()

        def ask() -> list[torch.Tensor]:
            found: list[Any] = [None] * len(shards)
            was_settled = False
            while True:
                # The step has its own deadline, and the lease's begins when the step ends.
                is_behind = step.settle_answered()
                timeout_s = _LOOK_S if is_behind else _TIMEOUT_S
                missing = [index for index, lease in enumerate(found) if lease is None]
                answers = self._plane.lease_together(
                    [wanted[index] for index in missing], part, mode, timeout_s, phase, follows
                )
                failures = []
                for index, answer in zip(missing, answers, strict=True):
                    if isinstance(answer, memd_native.StatusError):
                        failures.append((answer, shards[index]))
                    else:
                        found[index] = shards[index].over(answer)
                if not failures:
                    return found
                # A refusal tells more than a timeout.
                failures.sort(key=lambda each: each[0].code == CODE_DEADLINE)
                error, shard = failures[0]
                if is_behind and error.code == CODE_DEADLINE:
                    safe_point()
                    continue
                # Keep no other lease while waiting for the step's outcome.
                found = [None] * len(shards)
                del answers, answer
                if is_behind and error.code != CODE_UNAVAILABLE and not was_settled:
                    # If the step failed, that is the cause, and its own error tells more.
                    step.settle_for_lease()
                    was_settled = True
                    continue
                raise self._translated(error, shard) from error

        try:
            return self._retrying.calling(ask, lease=True)
        except DaemonUnavailable as error:
            # The step in flight matters most: it is unknown now. Its answer is not waited for,
            # since the lease has already waited as long as a caller should.
            step.note_unreachable(error)
            raise

    def _group_of(self, shard: Shard) -> int:
        # The id of a blob that is deleted may be a parameter's later.
        if shard.kind != types_pb2.SHARD_KIND_PARAMETER:
            return 0
        group = self._groups.get(shard.shard_id)
        if group is None:
            group = self._plane.stall_group(module_group(shard.name))
            self._groups[shard.shard_id] = group
        return group

    def _translated(self, error: memd_native.StatusError, shard: Shard) -> MemdError:
        message = f"job {self._job!r}, shard {shard.name!r}: {error}"
        if error.code == CODE_CAPACITY:
            message += "; free tensors that share memd's memory, or raise the job's host_bytes"
        if error.code == CODE_NOT_FOUND:
            message += "; was it deleted, or the job dropped, by another process?"
        return from_code(error.code, message, error.error_number)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Its elements lie in memory in the order of its shape, and are few enough for one thread to
    copy."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and 0 < tensor.nbytes <= _COPIED_BYTES_MAX
    )
