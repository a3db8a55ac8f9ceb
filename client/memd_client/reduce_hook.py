"""A communication hook of DistributedDataParallel that averages gradients in memd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memd_client.base.dynamo import untraced
from memd_client.base.identity import ByIdentity
from memd_client.errors import InvalidArgument
from memd_client.parameters import changes_of_ranks
from memd_client.updates.resident_target import ResidentTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.core.job import Job
    from memd_client.session import Session

    Hook = Callable[[object, "Bucket"], torch.futures.Future[torch.Tensor]]


_current_node = torch._C._current_autograd_node
# By the job. A hook keeps its own.
_reductions: ByIdentity[Job, weakref.ref[_Reduction]] = ByIdentity()


class Bucket(Protocol):
    """`torch.distributed.GradBucket`: gradients that lie in one buffer."""

    def buffer(self) -> torch.Tensor: ...
    def gradients(self) -> list[torch.Tensor]: ...
    def parameters(self) -> list[torch.Tensor]: ...


def reduce_hook(session: Session) -> Hook:
    """For `DistributedDataParallel.register_comm_hook`: the ranks of a node add their gradients to
    one sum in memd, in their order, and `optimizer.step()` uses that (ZeRO-2). `p.grad` gets the
    average on each rank, as without the hook.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, memd_client.reduce_hook(session))
        optimizer = memd_client.AdamW(model.named_parameters(), session=session)

    Each gradient is multiplied by 1/world before the sum. With two ranks that has the bits of the
    average that DistributedDataParallel makes. Its buckets stay in each process; the sums count
    against the job's quotas, as gradients do. Several models may have the hook, beside offloaded
    ones: what comes in one backward is one average. To accumulate, enter the `no_sync()` of each
    wrapped model, and `session.no_sync()` too if other modules are offloaded.

    Raises:
        InvalidArgument: in backward: no optimizer of the session updates one of the parameters; or
            it runs in `session.no_sync()` alone; or the model is wrapped with `static_graph=True`.
        CapacityError: in backward: the job's quotas do not hold the sums.
    """
    reduction = _reduction_of(session.transaction.job)

    @untraced
    @torch.no_grad()
    def hook(state: object, bucket: Bucket) -> Any:
        del state
        return reduction.take(bucket)

    return _without_annotations(hook)


def _reduction_of(job: Job) -> _Reduction:
    weak = _reductions.get(job)
    found = weak() if weak is not None else None
    if found is None:
        found = _Reduction(job)
        _reductions[job] = weakref.ref(found)
    return found


def _without_annotations(hook: Callable[..., Any]) -> Hook:
    """torch refuses annotations that are text, as those of this module are."""

    # Without any, neither tool has a type to look at.
    def communicate(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return hook(state, bucket)

    return communicate


class _Reduction:
    """The buckets of one backward, of all models that have the hook. The thread that runs backward
    calls."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._targets: dict[int, ResidentTarget] = {}
        self._waiting: list[tuple[_Taken, torch.futures.Future[torch.Tensor]]] = []

    def take(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Adds this rank's part. The result is there at the end of backward, when all ranks have
        added theirs, and before DistributedDataParallel waits for it."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if not self._job.ranks.are_several:
            future.set_result(bucket.buffer())
            return future
        self._refuse_static_graph()
        if not self._job.rank_gradients.takes_buckets:
            self._begin()
        taken = _Taken(bucket.buffer(), self._targets_of(bucket.parameters()), bucket.gradients())
        taken.add(self._job)
        self._waiting.append((taken, future))
        return future

    def _refuse_static_graph(self) -> None:
        """DistributedDataParallel(static_graph=True) gives the buckets of its first backward at the
        end of that, outside of any node, and waits for them before other ends are called."""
        if _current_node() is None:
            raise InvalidArgument(
                f"job {self._job.name!r}: reduce_hook() takes gradients while backward runs, and "
                "DistributedDataParallel(static_graph=True) gives those of its first backward "
                "after it; wrap the model without static_graph, and with "
                "find_unused_parameters=True if not all parameters are used"
            )

    def _begin(self) -> None:
        """Sums that no step has taken go: of gradients that were dropped, that no rank has used, or
        of a backward that has raised."""
        gradients = self._job.rank_gradients
        self._waiting = []
        self._targets = {
            id(each.parameter): each
            for each in self._job.shards.parameters
            if isinstance(each, ResidentTarget)
        }
        if gradients.has_failed:
            changes_of_ranks.drop_all(self._job)
        left = [each for each in self._targets.values() if each.is_reduced]
        if left or gradients.are_complete:
            if gradients.takes_gradients:
                raise InvalidArgument(
                    f"job {self._job.name!r}: the last backward has left gradients that no step "
                    "has taken, and offloaded parameters have new ones; call "
                    "optimizer.zero_grad() before each backward"
                )
            self._job.drop_gradients([each.shard for each in left])
            for each in left:
                each.note_reduced(is_reduced=False)
        gradients.expect_buckets(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for taken, future in waiting:
            future.set_result(taken.averaged(self._job))

    def _targets_of(self, parameters: Sequence[torch.Tensor]) -> list[ResidentTarget]:
        found = [self._targets.get(id(parameter)) for parameter in parameters]
        targets = [target for target in found if target is not None]
        if len(targets) < len(found):
            shape = list(parameters[found.index(None)].shape)
            raise InvalidArgument(
                f"job {self._job.name!r}: reduce_hook() has a gradient of shape {shape} of a "
                "parameter that no optimizer of the session updates; make "
                "memd_client.AdamW(model.named_parameters(), session=session) before the first "
                "backward, with all parameters of the model"
            )
        return targets


class _Taken:
    """A bucket that has come, of which the averages are not known yet."""

    def __init__(
        self,
        buffer: torch.Tensor,
        targets: Sequence[ResidentTarget],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._buffer = buffer
        self._gradients = list(zip(targets, gradients, strict=True))

    def add(self, job: Job) -> None:
        for target, gradient in self._gradients:
            job.rank_gradients.add_part(target.shard, gradient.contiguous())
            target.note_reduced(is_reduced=True)

    def averaged(self, job: Job) -> torch.Tensor:
        """The buffer, where the averages take the places of this rank's gradients."""
        for target, gradient in self._gradients:
            gradient.copy_(job.leases.gradient(target.shard))
        return self._buffer
