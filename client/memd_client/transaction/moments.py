"""Adam's moments in a `state_dict()`: tensors whose bytes stay in memd until somebody uses them.

torch's distributed checkpoint, and Accelerate's `prepare()`, ask for the state of an optimizer to
learn its form, or to load it where it came from. That takes no bytes.
"""

from __future__ import annotations

import logging
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, ref

import torch
from torch.utils._pytree import tree_map

from memd_client.connection.shard import MASTER, MAXIMUM, MOMENTS
from memd_client.errors import InvalidArgument, MemdError
from memd_client.transaction.metadata import asks_for_metadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job

_log = logging.getLogger("memd_client")
_no_bytes = torch.zeros(())
# They return a float32 tensor on the CPU as it is.
_CONVERSIONS: frozenset[Any] = frozenset(
    {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.detach}
)


class MomentTensor(torch.Tensor):
    """One moment of one parameter: float32, in the parameter's shape, as it was when `state_dict()`
    returned. Its first use reads it, and from then on it is an ordinary tensor's value. One that is
    `MASTER` is for those who ask for `passing_values_and_master()`."""

    _whole: MomentSet
    _moment: str

    @staticmethod
    def of(whole: MomentSet, name: str) -> MomentTensor:
        moment = torch.Tensor._make_subclass(MomentTensor, _no_bytes.expand(whole.shard.shape))
        moment._whole = whole
        moment._moment = name
        return moment

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if asks_for_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CONVERSIONS and _changes_nothing(func, args[1:], kwargs):
            return args[0]
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    @property
    def whole(self) -> MomentSet:
        """All moments of the parameter."""
        return self._whole

    @property
    def moment(self) -> str:
        """Its name among them."""
        return self._moment

    def value(self) -> torch.Tensor:
        """The bytes, the same tensor with each call. The first one waits for the daemon."""
        return self._whole.values()[self._moment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = memo.setdefault(id(self), self.value().clone())
        return copy


class MomentSource(Protocol):
    """Has the bytes of moments that nobody has used yet."""

    def look(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """By their names: float32, in the parameter's shape."""
        ...

    def read(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """As `look`, for the last time."""
        ...


class MomentSet:
    """The moments `names` of one parameter after `update_count` updates. Any thread may call."""

    def __init__(
        self, shard: Shard, update_count: int, names: Sequence[str], moments: Moments
    ) -> None:
        self._shard = shard
        self._names = names
        self._update_count = update_count
        # None when they were read: a state_dict that is kept must not keep the session.
        self._moments: MomentSource | None = moments
        self._values: dict[str, torch.Tensor] | None = None
        self._lock = RLock()
        self._session = ref(moments)

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def update_count(self) -> int:
        return self._update_count

    def refuse_outdated(self) -> None:
        """Before they go beside parameters of now. Those that were read are compared with the
        daemon's.

        Raises:
            InvalidArgument: the optimizer has others by now.
        """
        moments = self._session()
        with self._lock:
            held = self._values
            if held is None and self._moments is not moments:
                held = self.passing_values()  # those of a checkpoint
        if held is not None and moments is not None and not moments.is_over:
            moments.refuse_outdated(self, held)

    def values(self) -> dict[str, torch.Tensor]:
        """By their names; the first call waits for the daemon.

        Raises:
            MemdError: the daemon can't be asked any more, or has later ones.
        """
        with self._lock:
            if self._values is None:
                assert self._moments is not None
                self._values = self._moments.read(self)
                self._moments = None
            return self._values

    def passing_values(self) -> dict[str, torch.Tensor]:
        """As `values()`, and nobody keeps them: the next call reads them again."""
        with self._lock:
            if self._values is not None:
                return self._values
            assert self._moments is not None
            return self._moments.look(self)

    def passing_values_and_master(self) -> dict[str, torch.Tensor]:
        """As `passing_values()`, and `MASTER` beside them where `has_master`."""
        moments = self.session_moments
        if moments is None or not self.has_master:
            return self.passing_values()
        if self.is_unread_in(moments):
            return moments.look_with_master(self)
        # Those that somebody has read stay his.
        return {**self.passing_values(), MASTER: moments.look_with_master(self)[MASTER]}

    @property
    def has_master(self) -> bool:
        """The session has the fp32 values of the parameter, which is bfloat16, beside them."""
        moments = self.session_moments
        return moments is not None and moments.has_master(self._shard)

    @property
    def is_passing(self) -> bool:
        """Nobody has asked to keep the values."""
        with self._lock:
            return self._values is None

    def replace(self, source: MomentSource) -> None:
        """They are those of `source` from now on, whoever has read others."""
        with self._lock:
            self._moments, self._values = source, None

    def follow(self, update_count: int) -> None:
        """They are those that the job has from now on, after `update_count` updates. The session
        is not over."""
        moments = self._session()
        assert moments is not None
        with self._lock:
            self._moments, self._values, self._update_count = moments, None, update_count
            moments.note_unread(self)

    @property
    def session_moments(self) -> Moments | None:
        """The session has them, unless it is over: then None."""
        moments = self._session()
        return moments if moments is not None and not moments.is_over else None

    def is_unread_in(self, moments: Moments) -> bool:
        with self._lock:
            return self._moments is moments


class Moments:
    """The moments of one session that state_dicts refer to. Any thread may call."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unread: WeakSet[MomentSet] = WeakSet()
        self._has_warned = False

    def refer(
        self, shard: Shard, update_count: int, names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """The state of one parameter after `update_count` updates, in torch's format. No bytes are
        read."""
        whole = MomentSet(shard, update_count, names, self)
        self.note_unread(whole)
        return {
            "step": torch.tensor(float(update_count), dtype=torch.float32),
            **{name: MomentTensor.of(whole, name) for name in names},
        }

    def note_unread(self, whole: MomentSet) -> None:
        """Its bytes are in memd alone."""
        self._unread.add(whole)

    def are_in_memd(self, state: dict[str, Any], shard: Shard, update_count: int) -> bool:
        """Whether `state` is what memd has of this parameter: to load it would change nothing."""
        found = {name: state[name] for name in MOMENTS if name in state}
        first = found[MOMENTS[0]]
        return (
            isinstance(first, MomentTensor)
            and all(
                isinstance(moment, MomentTensor) and moment.whole is first.whole
                for moment in found.values()
            )
            and list(found) == list(first.whole.names)
            and first.whole.shard is shard
            and first.whole.update_count == update_count == int(state["step"])
            and first.whole.is_unread_in(self)
        )

    def read(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """Asks the daemon, for the last time."""
        values = self.look(whole)
        self._unread.discard(whole)
        return values

    def look(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """Asks the daemon."""
        found = self._look(whole, with_master=False)
        return {name: found[name] for name in whole.names}

    def look_with_master(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """As `look`, of a parameter that `has_master`."""
        found = self._look(whole, with_master=True)
        return {name: found[name] for name in (*whole.names, MASTER)}

    def has_master(self, shard: Shard) -> bool:
        """The daemon gives the fp32 values of this parameter: it is bfloat16."""
        if shard.dtype != torch.bfloat16:
            return False
        can_give = self._job.store.can_give_masters
        if not can_give and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "job %r: the daemon is older than this client and does not give the fp32 values of "
                "bfloat16 parameters, so checkpoints of this session are without them; update it",
                self._job.name,
            )
        return can_give

    def _look(self, whole: MomentSet, *, with_master: bool) -> dict[str, torch.Tensor]:
        shard = whole.shard
        generation, found = self._job.moments(shard, with_master=with_master)
        if generation != whole.update_count:
            raise MemdError(
                f"job {self._job.name!r}: the optimizer's state of parameter {shard.name!r} "
                f"is of {whole.update_count} updates and was not read before update {generation}; "
                "call state_dict() again"
            )
        if not generation:
            # The first update decides whether there is a maximum, and the daemon has none yet.
            found.setdefault(MAXIMUM, torch.zeros(shard.shape))
        return found

    @property
    def is_over(self) -> bool:
        """The session has ended, and its parameters with it."""
        return self._job.is_closed

    def refuse_outdated(self, whole: MomentSet, held: Mapping[str, torch.Tensor]) -> None:
        """See `MomentSet.refuse_outdated`; `held` are the values that were read."""
        generation, found = self._job.moments(whole.shard)
        if generation != whole.update_count or any(
            name in found and not _have_same_bits(found[name], held[name]) for name in held
        ):
            raise InvalidArgument(
                f"job {self._job.name!r}: a step was made, or the optimizer's state of parameter "
                f"{whole.shard.name!r} was changed, since state_dict() returned it; call "
                "state_dict() again right before the save"
            )

    def read_all(self) -> None:
        """Before moments change, or the session ends: state_dicts that somebody still holds keep
        the moments of their time."""
        self._read(list(self._unread))

    def read_of(self, shards: Collection[Shard], *, besides: Collection[MomentSet]) -> None:
        """As `read_all`, where those of `shards` alone change, and `besides` change with them."""
        shard_ids = {shard.shard_id for shard in shards}
        self._read(
            [
                whole
                for whole in list(self._unread)
                if whole.shard.shard_id in shard_ids and whole not in besides
            ]
        )

    def _read(self, wholes: Sequence[MomentSet]) -> None:
        for whole in wholes:
            if whole.is_unread_in(self):
                whole.values()


def ordinary_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `state`, which is in torch's format. None is kept that nobody has read before."""
    found = {name: state[name] for name in MOMENTS if name in state}
    wholes = {each.whole for each in found.values() if isinstance(each, MomentTensor)}
    values = {whole: whole.passing_values() for whole in wholes}
    return {
        name: values[each.whole][each.moment] if isinstance(each, MomentTensor) else each
        for name, each in found.items()
    }


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN too. Both are float32."""
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def _read(value: Any) -> Any:
    return value.value() if isinstance(value, MomentTensor) else value


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a conversion of a float32 tensor on the CPU returns that tensor."""
    if func is not torch.Tensor.to:
        return not args and not kwargs
    if "copy" in kwargs or len(args) > 2 or any(isinstance(each, torch.Tensor) for each in args):
        return False
    kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, memory_format = parsed
    return (
        (device is None or device.type == "cpu")
        and dtype in {None, torch.float32}
        and memory_format is None
    )
