"""Adam's moments in a `state_dict()`: tensors whose bytes stay in memd until somebody uses them.

torch's distributed checkpoint, and Accelerate's `prepare()`, ask for the state of an optimizer to
learn its form, or to load it where it came from. That takes no bytes.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_map

from memd_client.errors import MemdError
from memd_client.metadata import asks_for_metadata

if TYPE_CHECKING:
    from memd_client.job import Job
    from memd_client.shard import Shard

_no_bytes = torch.zeros(())
# They return a float32 tensor on the CPU as it is.
_CONVERSIONS: frozenset[Any] = frozenset(
    {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.detach}
)


class MomentTensor(torch.Tensor):
    """One moment of one parameter: float32, in the parameter's shape, as it was when `state_dict()`
    returned. Its first use reads it, and from then on it is an ordinary tensor's value."""

    _pair: MomentPair
    _index: int

    @staticmethod
    def of(pair: MomentPair, index: int) -> MomentTensor:
        moment = torch.Tensor._make_subclass(MomentTensor, _no_bytes.expand(pair.shard.shape))
        moment._pair = pair
        moment._index = index
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
    def pair(self) -> MomentPair:
        """Both moments of the parameter."""
        return self._pair

    def value(self) -> torch.Tensor:
        """The bytes, the same tensor with each call. The first one waits for the daemon."""
        return self._pair.values()[self._index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = memo.setdefault(id(self), self.value().clone())
        return copy


class MomentPair:
    """exp_avg and exp_avg_sq of one parameter after `update_count` updates. Any thread may call."""

    def __init__(self, shard: Shard, update_count: int, moments: Moments) -> None:
        self._shard = shard
        self._update_count = update_count
        # None when they were read: a state_dict that is kept must not keep the session.
        self._moments: Moments | None = moments
        self._values: tuple[torch.Tensor, torch.Tensor] | None = None
        self._lock = RLock()

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def update_count(self) -> int:
        return self._update_count

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments; the first call waits for the daemon.

        Raises:
            MemdError: the daemon can't be asked any more, or has later ones.
        """
        with self._lock:
            if self._values is None:
                assert self._moments is not None
                self._values = self._moments.read(self)
                self._moments = None
            return self._values

    def is_unread_in(self, moments: Moments) -> bool:
        with self._lock:
            return self._moments is moments


class Moments:
    """The moments of one session that state_dicts refer to. Any thread may call."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unread: WeakSet[MomentPair] = WeakSet()

    def refer(self, shard: Shard, update_count: int) -> dict[str, torch.Tensor]:
        """The state of one parameter after `update_count` updates, in torch's format. No bytes are
        read."""
        pair = MomentPair(shard, update_count, self)
        self._unread.add(pair)
        return {
            "step": torch.tensor(float(update_count)),
            "exp_avg": MomentTensor.of(pair, 0),
            "exp_avg_sq": MomentTensor.of(pair, 1),
        }

    def are_in_memd(self, state: dict[str, Any], shard: Shard, update_count: int) -> bool:
        """Whether `state` is what memd has of this parameter: to load it would change nothing."""
        first, second = state["exp_avg"], state["exp_avg_sq"]
        return (
            isinstance(first, MomentTensor)
            and isinstance(second, MomentTensor)
            and first.pair is second.pair
            and first.pair.shard is shard
            and first.pair.update_count == update_count == int(state["step"])
            and first.pair.is_unread_in(self)
        )

    def read(self, pair: MomentPair) -> tuple[torch.Tensor, torch.Tensor]:
        """Asks the daemon."""
        generation, *values = self._job.moments(pair.shard)
        if generation != pair.update_count:
            raise MemdError(
                f"job {self._job.name!r}: the optimizer's state of parameter {pair.shard.name!r} "
                f"is of {pair.update_count} updates and was not read before update {generation}; "
                "call state_dict() again"
            )
        self._unread.discard(pair)
        return values[0], values[1]

    def read_all(self) -> None:
        """Before moments change, or the session ends: state_dicts that somebody still holds keep
        the moments of their time."""
        for pair in list(self._unread):
            pair.values()


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
