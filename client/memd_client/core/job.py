"""One process's attachment to one job: the core that all other parts of the client share."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakMethod

from memd_client.base.device_waits import device_waits
from memd_client.base.process import OwnProcess
from memd_client.base.statistics import SessionStatistics, summed
from memd_client.connection.retry import AtOnce
from memd_client.core.first_values import FirstValues
from memd_client.core.held_names import HeldNames
from memd_client.core.job_store import JobStore
from memd_client.core.old_loads import OldLoads
from memd_client.core.rank_gradients import RankGradients
from memd_client.core.ranks import Ranks
from memd_client.core.registry import ShardRegistry
from memd_client.core.scratch_uses import ScratchUses
from memd_client.core.steps import Steps
from memd_client.core.temporary_snapshots import TemporarySnapshots
from memd_client.core.tensor_streams import TensorStreams
from memd_client.errors import InvalidArgument, MemdError
from memd_native import STALL_GRADIENT
from memd_proto.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.retry import OnReturn, Retrying
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.core.open_steps import OpenStep
    from memd_client.core.parameter_leases import ParameterLeases
    from memd_proto.v1 import types_pb2


class Job:
    """Control plane, leases, steps and shards of one session. It owns the session's life: every
    call fails once the session is closed, and in a forked child. Any thread may call.

    A lease must not show a value from before a step that was closed. Leases are therefore handed
    out only here, after the step in flight has settled as far as the caller needs.
    """

    def __init__(
        self,
        name: str,
        *,
        attached: session_pb2.AttachResponse,
        control: ControlPlane,
        leases: Leases | None,
        daemon_process_id: int,
        close_connection: Callable[[], None],
        retrying: Retrying | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._name = name
        self._host_bytes = attached.host_bytes
        self._nvme_bytes = attached.nvme_bytes
        self._adam_settings_known = frozenset(
            name
            for name, is_known in (
                ("maximize", attached.can_maximize),
                ("amsgrad", attached.can_amsgrad),
            )
            if is_known
        )
        self._session_id = attached.session_id
        self._daemon_process_id = daemon_process_id
        self._return_count = 0
        self._control = control
        self._leases = leases
        self._close_connection = close_connection
        self._process = OwnProcess()
        self._closed = False
        # Something was written that only a sync or a step makes durable.
        self._unsynced = False
        retrying = retrying or AtOnce()
        retrying.tell_returns(_weakly(self._note_return))
        self._streams = TensorStreams(
            control, job=name, session_id=attached.session_id, retrying=retrying
        )
        self._ranks = ranks or Ranks()
        self._shards = ShardRegistry(
            job=name,
            session_id=attached.session_id,
            host_bytes=attached.host_bytes,
            control=control,
            leases=leases,
        )
        self._steps = Steps(
            job=name,
            committed_step=attached.committed_step,
            durable_step=attached.durable_step,
            leases=leases,
        )
        self._rank_gradients = RankGradients(
            job=name,
            session_id=attached.session_id,
            ranks=self._ranks,
            control=control,
            leases=leases,
            parameters=self._shards,
            can_keep_own=attached.can_keep_rank_sums,
            settle=self._steps.settle_for_lease,
        )
        snapshots = TemporarySnapshots(name, control, retrying)
        self._store = JobStore(
            job=name,
            session_id=attached.session_id,
            host_bytes=attached.host_bytes,
            control=control,
            shards=self._shards,
            streams=self._streams,
            retrying=retrying,
            temporary_snapshots=snapshots,
            leases=leases,
            ranks=self._ranks,
            can_take_masters=attached.can_take_masters,
            can_give_masters=attached.can_give_masters,
            can_load_in_place=attached.can_load_in_place,
            can_keep_scratch=attached.can_keep_scratch,
            scratch_uses=ScratchUses(),
        )
        old_loads = OldLoads(self._store, self._steps)

        def list_settled() -> Iterable[types_pb2.Shard]:
            snapshots.drop_abandoned()
            return old_loads.list_settled()

        self._held_names = HeldNames(
            name,
            list_settled,
            first_values=FirstValues(self._store),
        )
        if leases is not None:
            leases.follow_steps(self._steps)

    @property
    def name(self) -> str:
        return self._name

    @property
    def host_bytes(self) -> int:
        """The job's quota of the daemon's host memory."""
        return self._host_bytes

    @property
    def nvme_bytes(self) -> int:
        return self._nvme_bytes

    @property
    def adam_settings_known(self) -> frozenset[str]:
        """Settings of Adam that older daemons do not know, and this one does."""
        return self._adam_settings_known

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def daemon_process_id(self) -> int:
        return self._daemon_process_id

    @property
    def return_count(self) -> int:
        """How often another daemon has taken the session over."""
        return self._return_count

    @property
    def ranks(self) -> Ranks:
        """Those that train the job."""
        return self._ranks

    @property
    def rank_gradients(self) -> RankGradients:
        return self._rank_gradients

    @property
    def control(self) -> ControlPlane:
        return self._control

    @property
    def streams(self) -> TensorStreams:
        return self._streams

    @property
    def shards(self) -> ShardRegistry:
        return self._shards

    @property
    def store(self) -> JobStore:
        """For values that no step makes."""
        return self._store

    @property
    def held_names(self) -> HeldNames:
        return self._held_names

    @property
    def steps(self) -> Steps:
        return self._steps

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_of_another_process(self) -> bool:
        """This process was forked from the one that attached."""
        return self._process.is_another

    def refuse_if_unusable(self) -> None:
        """Raises if the session was closed, or belongs to the process that this one was forked
        from.
        """
        self._refuse_if_forked()
        if self._closed:
            raise MemdError(f"job {self._name!r}: the session is closed; connect again")

    def _refuse_if_forked(self) -> None:
        if self._process.is_another:
            raise MemdError(
                f"job {self._name!r}: this session belongs to process {self._process.id}, from "
                "which this one was forked; connect again in the child"
            )

    # Leases

    @property
    def has_shared_memory(self) -> bool:
        return self._leases is not None

    @property
    def leases(self) -> Leases:
        """Leases of values as they are after the step in flight, whose answer is waited for.

        Raises:
            InvalidArgument: the session has no shared memory.
            MemdError: the step in flight was not committed, or its outcome is unknown.
        """
        self.refuse_if_unusable()
        self._steps.settle_for_lease()
        return self.unordered_leases

    def leases_of(self, shard: Shard) -> ParameterLeases:
        """Leases of a parameter's value, where it is used. Nothing waits here: the daemon delays
        the lease until the step in flight has updated this parameter.

        Raises:
            InvalidArgument: `step()` has taken its gradient, and `commit()` has not come yet.
            MemdError: the step in flight was not committed, or its outcome is unknown.
        """
        self.refuse_if_unusable()
        self._steps.settle_for(shard)
        return self.unordered_leases.of(shard)

    def gradient_leases_of(self, shard: Shard) -> ParameterLeases:
        """Leases of a parameter's gradient. Waits for the step in flight; raises as `leases_of`."""
        leases = self.leases_of(shard)
        # The slot is free no earlier. And if the daemon died before its answer arrived, the next
        # one would take an older gradient for one that came after the step.
        self._steps.settle_for_lease(shard, STALL_GRADIENT)
        return leases

    @property
    def unordered_leases(self) -> Leases:
        """Leases that wait for no step: of blobs, which no step changes."""
        if self._leases is None:
            raise InvalidArgument(
                f"job {self._name!r}: offloading needs shared memory; connect without "
                "shared_memory=False, on the daemon's machine"
            )
        return self._leases

    @property
    def has_written_leases(self) -> bool:
        """Leases for reading that have ended were written."""
        return self._leases is not None and self._leases.has_written and not self._closed

    # Steps

    def settle(self) -> OpenStep | None:
        """Waits for the step in flight: see `Steps.settle`."""
        # The answer arrives in a thread that a forked child does not have, and that thread may
        # hold the lock.
        self._refuse_if_forked()
        return self._steps.settle()

    def settle_for(self, what: str) -> None:
        """Before `what`, which needs the state after the last step: waits for it, and raises
        between `step()` and `commit()`.
        """
        self.refuse_if_unusable()
        self._steps.refuse_late(self.settle())
        self._steps.open.refuse_if_open(what)

    # Shards

    def declare(self, specs: Sequence[types_pb2.ShardSpec]) -> list[types_pb2.Shard]:
        """As `ShardRegistry.declare`."""
        self.refuse_if_unusable()
        return self._shards.declare(specs)

    def mark_written(self) -> None:
        """Something was written that is not durable yet."""
        self._unsynced = True

    def sync_if_needed(self) -> None:
        """Makes durable what was written outside of steps."""
        if self._unsynced:
            self.refuse_if_unusable()
            late = self.settle()
            self.sync()
            self._steps.refuse_late(late)

    def sync(self) -> None:
        # Cleared before the call: it may not cover what another thread writes meanwhile.
        was_unsynced, self._unsynced = self._unsynced, False
        try:
            response = self._control.sync(session_pb2.SyncRequest(session_id=self._session_id))
        except BaseException:
            self._unsynced |= was_unsynced
            raise
        self._steps.note_sync(response.committed_step)

    def end_gradients(self) -> None:
        """A step takes the gradients, or they are dropped: slots reserved ahead are returned."""
        if self._leases is not None:
            self._leases.end_round()

    def drop_gradients(self, shards: Sequence[Shard]) -> None:
        """Forgets the gradients of `shards` that no step has taken."""
        self.refuse_if_unusable()
        self.end_gradients()
        late = self.settle()
        if self._leases is not None:
            self._leases.devices.give_up()
        self._rank_gradients.drop(shards)
        self._steps.refuse_late(late)

    def moments(
        self, shard: Shard, *, with_master: bool = False
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """The number of updates, and the moments: fp32 copies in the shard's shape. `with_master`:
        beside them the fp32 values of a bfloat16 parameter, of a daemon that `can_give_masters`."""
        self.settle_for("state of the optimizer")
        return self._streams.moments(shard, with_master=with_master)

    # The session

    def statistics(self) -> SessionStatistics:
        leases = self._leases.statistics() if self._leases is not None else None
        registration = self._leases.registration if self._leases is not None else None
        steps = self._steps.totals
        return SessionStatistics(
            job=self._name,
            committed_step=self._steps.committed_step,
            host_bytes=self._host_bytes,
            nvme_bytes=self._nvme_bytes,
            lease_count=leases.lease_count if leases else 0,
            lease_hits=leases.hits if leases else 0,
            lease_resident_count=leases.resident_count if leases else 0,
            leases_held=leases.leases_held if leases else 0,
            activation_bytes=self._store.scratch_uses.held_bytes,
            activation_bytes_max=self._store.scratch_uses.held_bytes_max,
            registered_bytes=registration.registered_bytes if registration else 0,
            registration_refusals=registration.refused_count if registration else 0,
            waited_for=device_waits(),
            lease_wait_seconds=self._steps.lease_wait_seconds
            + (leases.lease_wait_seconds if leases else 0.0),
            lease_wait_reason_seconds=summed(leases.stall_phase_seconds) if leases else {},
            stall_phase_seconds=leases.stall_phase_seconds if leases else {},
            stall_group_seconds=leases.stall_group_seconds if leases else {},
            step_wall_seconds=leases.step_wall_seconds if leases else 0.0,
            parameter_count=len(self._shards.parameters),
            step_count=steps.count,
            step_seconds=steps.seconds,
            step_read_seconds=steps.read_seconds,
            step_update_seconds=steps.update_seconds,
            step_write_seconds=steps.write_seconds,
            step_commit_seconds=steps.commit_seconds,
            step_read_bytes=steps.read_bytes,
            step_written_bytes=steps.written_bytes,
        )

    def detach(self) -> None:
        """The leases end first: the daemon must not wait for them."""
        if self._leases is not None:
            self._leases.close()
        self._control.detach(session_pb2.DetachRequest(session_id=self._session_id))

    def drop(self) -> None:
        """Drops the job and all that it holds. The session must be detached."""
        self._control.drop_job(job_pb2.DropJobRequest(name=self._name))

    def end(self) -> None:
        """Closes the connection; every later call fails."""
        self._closed = True
        self._steps.give_up()
        self._ranks.end()
        self._control.close()
        self._close_connection()

    def _note_return(self, answer: session_pb2.AttachResponse, daemon_process_id: int) -> None:
        """Another daemon has taken the session over. Calls in flight report by themselves what
        they changed."""
        del answer
        self._daemon_process_id = daemon_process_id
        self._return_count += 1


def _weakly(method: OnReturn) -> OnReturn:
    """`method` of a job, for what the job owns: a strong reference back would be a cycle, and would
    keep a session that nobody refers to, and its connection, open until garbage is collected."""
    weak = WeakMethod(method)

    def call(answer: session_pb2.AttachResponse, daemon_process_id: int) -> None:
        held = weak()
        if held is not None:
            held(answer, daemon_process_id)

    return call
