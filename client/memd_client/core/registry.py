"""The shards of one job that a session knows, and the parameters that live in this process."""

from __future__ import annotations

import difflib
import logging
import threading
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from memd_client.base.sizes import format_size
from memd_client.connection.shard import Shard
from memd_client.errors import UnknownName
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from memd_client.connection.calls import ControlPlane
    from memd_client.core.comparisons import Comparison
    from memd_client.core.leases import Leases

_log = logging.getLogger("memd_client")


def _lives_in_host_tier(spec: types_pb2.ShardSpec) -> bool:
    return spec.kind == types_pb2.SHARD_KIND_PARAMETER and spec.tier == types_pb2.TIER_HOST


class LivingParameter(Protocol):
    """A parameter of a module or optimizer that still exists: `parameter.StreamedParameter` or
    `targets.ResidentTarget`.
    """

    @property
    def shard(self) -> Shard: ...
    @property
    def parameter(self) -> torch.Tensor | None: ...
    def take_writes(self) -> None: ...
    def compare_value(self) -> Sequence[Comparison]:
        """Comparisons that `refuse_writes` needs; they are made by then."""
        ...

    def refuse_writes(self) -> None: ...
    def note_sum(self) -> None: ...
    def forget_gradient(self) -> None:
        """All ranks drop what they have of it in memd."""
        ...


class ShardRegistry:
    """Shards by name, and the living parameters of this session. Any thread may call."""

    def __init__(
        self,
        *,
        job: str,
        session_id: int,
        host_bytes: int,
        control: ControlPlane,
        leases: Leases | None,
    ) -> None:
        self._job = job
        self._session_id = session_id
        self._host_bytes = host_bytes
        self._control = control
        self._leases = leases
        self._shards: dict[str, Shard] = {}
        self._forget_count = 0
        # Guards both: a listing must not bring back what was forgotten since it was asked for.
        self._lock = threading.Lock()
        self._parameters: WeakSet[LivingParameter] = WeakSet()
        self._gradients_fit = True
        self._has_host_tier = False

    def declare(self, specs: Sequence[types_pb2.ShardSpec]) -> list[types_pb2.Shard]:
        """Creates shards, or finds those that the job has.

        Raises:
            InvalidArgument: the job has a shard of this name with another shape or dtype.
        """
        request = session_pb2.DeclareRequest(session_id=self._session_id, shards=specs)
        response = self._control.declare(request)
        shards = list(response.shards)
        if not response.gradients_fit:
            self._note_gradients_spill()
        if any(map(_lives_in_host_tier, specs)):
            self._note_host_tier()
        with self._lock:
            self._shards.update((shard.spec.name, Shard.of(shard)) for shard in shards)
        return shards

    def find(self, name: str) -> Shard:
        """The shard of this name; asks the daemon if this session has not met it yet. Whether it
        was ever written shows when it is leased.

        Raises:
            UnknownName: the job has no such shard; the message names similar ones.
        """
        shard = self._shards.get(name)
        if shard is None:
            shard = self._learn_all().get(name)
        if shard is None:
            raise self.unknown(name)
        return shard

    def _learn_all(self) -> dict[str, Shard]:
        while True:
            forget_count = self._forget_count
            listed = {shard.spec.name: Shard.of(shard) for shard in self.list_all()}
            with self._lock:
                if forget_count == self._forget_count:
                    self._shards = listed
                    return listed

    def remember(self, shard: Shard) -> None:
        with self._lock:
            self._shards[shard.name] = shard

    def forget(self, name: str) -> None:
        """The shard may be another one by now: the next `find` asks the daemon."""
        with self._lock:
            self._forget_count += 1
            self._shards.pop(name, None)

    def list_all(self) -> Iterable[types_pb2.Shard]:
        """All shards of the job, from the daemon."""
        return self._control.list_shards(
            session_pb2.ListShardsRequest(session_id=self._session_id)
        ).shards

    def unknown(self, name: str) -> UnknownName:
        names = [shard.spec.name for shard in self.list_all()]
        close = difflib.get_close_matches(name, names, n=3)
        hint = (
            f"; similar names: {', '.join(map(repr, close))}"
            if close
            else f"; it holds {len(names)} other names"
        )
        return UnknownName(f"job {self._job!r} holds nothing under {name!r}{hint}")

    def add_parameter(self, parameter: LivingParameter) -> None:
        """Counts it for as long as it lives."""
        self._parameters.add(parameter)

    @property
    def parameters(self) -> list[LivingParameter]:
        return list(self._parameters)

    @property
    def parameter_names(self) -> set[str]:
        return {parameter.shard.name for parameter in self._parameters}

    def _note_host_tier(self) -> None:
        if self._has_host_tier:
            return
        self._has_host_tier = True
        _log.warning(
            'job %r: parameters in tier "host" are on disk only in snapshots, so a power cut takes '
            "the whole job back to its last one, and so does the end of an embedded daemon; make "
            "some with session.snapshot(name)",
            self._job,
        )

    def _note_gradients_spill(self) -> None:
        if not self._gradients_fit:
            return
        self._gradients_fit = False
        _log.warning(
            "job %r: its host memory (%s) cannot hold all gradients, so some go to disk in every "
            "step; raise host_bytes to make it faster",
            self._job,
            format_size(self._host_bytes),
        )
        if self._leases is not None:
            # A slot that is reserved ahead is one that somebody else needs now.
            self._leases.gradient_order.stop_asking()
