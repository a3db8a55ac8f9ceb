"""A session: one process's attachment to one job, as users see it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from memd_client.base.dynamo import untraced
from memd_client.core.blobs import Blobs
from memd_client.errors import MemdError
from memd_client.parameters.unnamed import UnnamedParameters
from memd_client.parameters.unnamed_parameter import UnnamedParameter
from memd_client.tracked import Tracked
from memd_client.transaction.transaction import Participants, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    import torch

    from memd_client.base.statistics import SessionStatistics
    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.leases import Leases

_log = logging.getLogger("memd_client")


class Session:
    """One process's attachment to one job; `connect` makes it. Any thread may use it; a forked
    child may not.

    The job outlives the session and the process, until it is dropped.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blobs = Blobs(job)
        self._tracked = Tracked()
        self._participants = Participants(self._tracked)
        self._transaction = Transaction(job, self._participants)
        self._unnamed = UnnamedParameters(job, away=UnnamedParameter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MemdError as failure:
            if error is None:
                raise
            # The user must see the first error.
            error.add_note(f"closing the session failed too: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._job.is_closed else f"at step {self._job.steps.committed_step}"
        return f"<memd session of job {self.job!r}, {state}>"

    @property
    def job(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def host_bytes(self) -> int:
        """The job's quota of host memory."""
        return self._job.host_bytes

    @property
    def nvme_bytes(self) -> int:
        """The job's quota of disk space."""
        return self._job.nvme_bytes

    @property
    def daemon_process_id(self) -> int:
        """The daemon that serves the session at present."""
        return self._job.daemon_process_id

    # Tensors under a name

    @untraced
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stores a copy of `tensor` under `name`: any shape, fp16 to fp64, bf16, int8 to int64,
        uint8 or bool. A name keeps its shape and dtype until it is deleted. Durable with the next
        step, or when the session is closed. The old bytes of a name stay on disk until then: if the
        disk quota does not hold both, that commit fails; `delete` it and commit before it is put.

        Raises:
            InvalidArgument: a tensor of another shape or dtype, or a parameter, has this name.
            CapacityError: the tensor is larger than what the job may hold.
        """
        self._blobs.put(name, tensor)

    @untraced
    def get(self, name: str) -> torch.Tensor:
        """The tensor stored under `name`, on the CPU.

        Over shared memory it shows memd's own memory, not a copy: cheap, and kept in host memory
        for as long as a tensor shares it. What you write to it stays in this process: nobody else
        sees it, and `get` does not return it once the tensor is gone; `put` stores it. Two tensors
        of one name may share memory while both live; clone what must not. Without shared memory
        each is a copy.

        Raises:
            UnknownName: nothing is stored under `name`; the message shows similar names.
        """
        return self._blobs.get(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Asks the daemon to read these tensors into host memory; returns at once. A hint: without
        shared memory, or if host memory is short, it has no effect.

        Raises:
            UnknownName: one of them is not stored; none is prefetched.
        """
        self._blobs.prefetch(names)

    def delete(self, name: str) -> None:
        """Removes what `put` stored under `name`. Tensors that `get` returned stay valid.

        Raises:
            UnknownName: nothing is stored under `name`.
            InvalidArgument: the name is that of a parameter or buffer.
        """
        self._blobs.delete(name)

    # Steps

    def track(self, *, rng: bool = False, **objects: Any) -> None:
        """Saves objects inside every commit: those with `state_dict()` and `load_state_dict()`,
        such as LR schedulers, a GradScaler, torchdata's `StatefulDataLoader`, or a sampler of your
        own. Their state must be plain data and tensors on the CPU; no pickle is ever loaded.

        From now on `commit()` closes a step and `optimizer.step()` only prepares it. Commits also
        contain the settings of memd's optimizers, such as learning rates, and in any case the
        buffers of offloaded modules.

        Args:
            rng: the states of Python's, numpy's and torch's random number generators too.
            objects: each under the name that `resume()` will look for.

        Raises:
            InvalidArgument: an object without state, such as torch's own samplers; a name that is
                taken; a call after `resume()` or with a step open. Nothing is tracked then.
        """
        self._transaction.refuse_late("track()")
        _ = self._job.leases  # needs shared memory
        self._tracked.add(objects, rng=rng)
        self._transaction.close_by_commit()

    def after_commit(self, function: Callable[[int], None]) -> None:
        """Calls `function` with the number of each commit once it is made: for what changes after a
        commit by the commit's parameters, such as an average of the weights.

            session.track(ema=ema)
            session.after_commit(lambda step: ema.update_parameters(model))

        A commit stores what is tracked as it was before these calls, and `resume()` makes those of
        the commit that it restores. So what happens after a commit must depend on its number and on
        what it restores: to average every tenth step, ask `step % 10 == 0`.

        `commit()` waits for the step then, as a use of its parameters does. From now on it closes a
        step, and `optimizer.step()` only prepares it.

        Raises:
            InvalidArgument: a call after `resume()` or with a step open.
        """
        self._transaction.refuse_late("after_commit()")
        self._participants.call_after_commit(function)
        self._transaction.close_by_commit()

    @untraced
    def commit(self, *, wait: bool = False) -> None:
        """Closes the step: what optimizers have prepared since the last commit, the buffers that
        changed and what is tracked become one transaction. Returns at once; whatever needs the
        result waits for it. Only if parameters stay in this process, it waits for their new values.
        A commit without a step is allowed and counts.

        Without `track()` every `optimizer.step()`, or the end of the backward that it was called
        in, has closed its step already: then `commit()` only makes durable what was put, and does
        not count.

        Args:
            wait: returns when the step is committed, as the job's durability requires. The log
                says then if it has an update that is pending in this process: see
                `has_pending_update`.

        Raises:
            InvalidArgument: something tracked holds what is not plain data; the message gives the
                path to it. Or it is called in backward after `step()`, or after a backward that has
                raised after it. The step is open as before.
            DaemonUnavailable, DeadlineExceeded: it is not known whether the step before (with
                `wait`: or this step) is committed. Every use of the session asks again, and
                `commit()` as the next call does nothing else.
            NotDurable: the step before (with `wait`: or this step) is committed in memory and could
                not be put on disk, as the job's durability requires. Without `wait` it is raised
                once, until a step reaches the disk again. `commit(wait=True)` as the next call
                tries the disk again and does nothing else.
            MemdError: the step before (with `wait`: or this step) was not committed. Gradients are
                as they were before it. Or the message says that it is committed, but new values
                could not be put in place in this process: call again.
        """
        self._transaction.commit(wait=wait)
        if wait and self.has_pending_update:
            _log.info(
                "job %r: commit %d has an update that is pending: the next step() brings it to the "
                "parameters here",
                self.job,
                self._job.steps.committed_step,
            )

    @untraced
    def resume(self) -> int:
        """Restores what is tracked, and buffers, as the last commit left them. Returns how many
        commits the job has made: calls of `commit()`, or of `optimizer.step()` without `track()`,
        of which those in one backward are one. For a new job it restores nothing and returns 0.
        Call it once, before the first step and after everything that is tracked, offloaded or
        optimized was made. Random numbers continue where they were, so draw none before the loop
        begins.

        Each of several ranks gets what it has tracked itself. A rank that did not make that commit
        gets the state of schedulers, scalers and modules, and of what all its
        ranks had tracked alike; of the rest it keeps what it has, and a warning names that.

        Raises:
            InvalidArgument: other objects, optimizers or groups than in that commit, all named; a
                second call; a call after a step. Nothing has changed.
            IntegrityError: what was stored cannot be read.
        """
        return self._transaction.resume()

    @untraced
    def snapshot(self, name: str) -> int:
        """Keeps the last committed step under `name`, and returns its number. Nothing is copied but
        tier "host": later steps leave alone what the snapshot names. It waits for the step in
        flight, writes first what is newer in memory than on disk, with what was put since, and is
        on disk when it returns: it survives a power cut, whatever the job's durability is.

        A snapshot counts as one state more against the job's disk quota; with tier "host" the first
        one counts as two of it. It stays until `memd
        snapshot drop`; a job that has some is not dropped with its session.

        Args:
            name: 1 to 128 letters, digits and any of . _ : @ / + -, unique in its job. Those that
                begin with async_save/ are the ones that `dcp.async_save` makes and drops.

        Raises:
            InvalidArgument: another name, or one that a snapshot of the job has; or it is called
                between `step()` and `commit()`.
            CapacityError: the job's disk quota does not hold one state more, which the message adds
                up; or it has 64 snapshots.
            DaemonUnavailable, DeadlineExceeded: it is not known whether it was made; `memd snapshot
                list` shows it.
        """
        return self._transaction.snapshot(name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, several ranks accumulate gradients, each by itself, as in `no_sync()` of
        DistributedDataParallel. The first backward outside adds its own to them, and the sums of
        all ranks are averaged. Each forward belongs into the block with its backward.

            for micro_batch in micro_batches[:-1]:
                with session.no_sync():
                    model(micro_batch).backward()
            model(micro_batches[-1]).backward()
            optimizer.step()

        A rank's sums count against the job's quotas, as gradients do. All ranks accumulate the same
        number of backwards before each step. With one rank every backward accumulates, here and
        elsewhere. A model in DistributedDataParallel, which stays in the processes, has a
        `no_sync()` of its own.

        Raises:
            InvalidArgument: it is entered in backward. In a backward: its forward ran outside. At
                the end of the backward that averages, on all ranks: another rank has accumulated
                another number of them; drop all gradients then.
            CapacityError: in a backward: the job's quotas do not hold the sums.
        """
        with self._job.rank_gradients.no_sync():
            yield

    @property
    def committed_step(self) -> int:
        """How many steps the job has committed, as far as this session knows. Waits for the step in
        flight.

        Raises:
            DaemonUnavailable, DeadlineExceeded: it is not known whether that step is committed; the
                next call asks again.
            MemdError: that step was not committed. Gradients are as they were before it. Or, once:
                it is committed after an earlier error, and what was computed since with values that
                stay in this process is out of date.
        """
        return self._transaction.committed_step

    @property
    def durable_step(self) -> int:
        """The last step that is on disk: behind `committed_step` unless durability is "step"; 0 if
        "none" has given up what was there. With parameters in tier "host" it is that of the last
        snapshot, or 0. Waits for the step in flight.

        Raises:
            DaemonUnavailable, DeadlineExceeded, MemdError: as `committed_step`, once too after an
                unknown outcome.
        """
        return self._transaction.durable_step

    @property
    def has_pending_update(self) -> bool:
        """Parameters in this process lack the update of the last step, which `delayed_update` of an
        optimizer has delayed: its next `step()`, or `bring_pending_update()`, brings it. The commit
        has both values. `commit(wait=True)` logs that there is one."""
        return any(each.has_pending_update for each in self._transaction.optimizers)

    # The session itself

    def statistics(self) -> SessionStatistics:
        """Counts what this session did since `connect`. It waits for nothing: a step in flight is
        counted once something has waited for it.
        """
        return self._job.statistics()

    def drop_job(self) -> None:
        """Ends the session and drops everything the job holds, in memory and on disk.

        Raises:
            MemdError: other sessions are attached to the job; nothing is dropped then, but this
                session is closed.
        """
        self._transaction.drop_job()

    def close(self) -> None:
        """Makes durable what was put, and detaches. Offloaded parameters cannot be used afterwards;
        tensors that `get` returned can. A second call does nothing, and neither does one in a
        forked child.
        """
        if not self._job.is_closed and not self._job.is_of_another_process:
            try:
                self._unnamed.close()
            finally:
                self._transaction.close()

    # For the other parts of the client, and for measurements

    @property
    def transaction(self) -> Transaction:
        return self._transaction

    @property
    def unnamed(self) -> UnnamedParameters:
        return self._unnamed

    @property
    def leases(self) -> Leases:
        return self._job.leases

    def find_shard(self, name: str) -> Shard:
        return self._job.shards.find(name)
