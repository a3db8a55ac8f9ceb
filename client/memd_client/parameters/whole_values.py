"""Parameters of which a process has a shard, and memd the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd_client.base.identity import ByIdentity
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeValue:
    """The value of a parameter, as the last step has left it."""

    shard: Shard
    job: Job
    # The program has changed this process's part since then.
    is_changed: Callable[[], bool]

    def check(self) -> None:
        """
        Raises:
            InvalidArgument: the parameter has another value here by now.
        """
        if self.is_changed():
            raise InvalidArgument(
                f"{self.shard.label!r} was changed after the last step, and memd has the value "
                "that the step left; save before the change, or after the next step, which takes it"
            )

    def read(self) -> torch.Tensor:
        """A lease."""
        return self.job.leases.value(self.shard)


_wholes: ByIdentity[torch.Tensor, WholeValue] = ByIdentity()


def note_whole(parameter: torch.Tensor, whole: WholeValue) -> None:
    """From now on memd has the whole value of `parameter`."""
    _wholes[parameter] = whole


def whole_of(parameter: torch.Tensor) -> WholeValue | None:
    """None if `parameter` is no shard, or an optimizer of memd does not have it."""
    return _wholes.get(parameter)
