"""The devices on which one session's parameters are used, and what is on its way to and from
them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.core.parameter_leases import (
        DepartedGradients,
        DeviceTraffic,
        LeasesOnDevice,
        ParameterLeases,
    )


class SessionCopies(Protocol):
    """Copies that end with the session: `activation_copies.ActivationCopies`."""

    def close(self) -> None:
        """Waits. A second call does nothing."""
        ...


class Devices:
    """Those of one session's models. Any thread may ask."""

    def __init__(self) -> None:
        self._traffic: list[DeviceTraffic] = []
        self._leases: dict[int, LeasesOnDevice] = {}  # by shard id
        self._others: list[SessionCopies] = []

    @property
    def traffic(self) -> Sequence[DeviceTraffic]:
        return tuple(self._traffic)

    def add(self, traffic: DeviceTraffic) -> None:
        """From now on steps wait for what leaves this device."""
        self._traffic.append(traffic)

    def use(self, leases: LeasesOnDevice, traffic: DeviceTraffic, shards: Sequence[Shard]) -> None:
        """From now on these are used on a device."""
        self.add(traffic)
        self._leases.update((shard.shard_id, leases) for shard in shards)

    def close_too(self, copies: SessionCopies) -> None:
        """These are no parameters' and no gradients', so no step waits for them."""
        self._others.append(copies)

    def leases_of(self, shard: Shard) -> ParameterLeases:
        """Those of a parameter that is used on a device."""
        return self._leases[shard.shard_id]

    def departed(self, shard: Shard) -> DepartedGradients:
        """Those of the device on which a parameter is used, with its own."""
        return self._leases[shard.shard_id].departed

    def traffic_with(self, device: torch.device) -> DeviceTraffic:
        """That of one of those on this device.

        Raises:
            InvalidArgument: there is none.
        """
        for each in self._traffic:
            if each.device == device:
                return each
        raise InvalidArgument(
            f"a buffer is on {device}, where no model was offloaded to; move it back to the device "
            "of its module"
        )

    def begin_step(self, begin: Callable[[], StepCall]) -> StepCall:
        """`begin()` once what comes from devices has arrived, for which nobody waits here."""
        for traffic in self._traffic:
            begin = partial(traffic.send_after, begin)
        return begin()

    def follow_values(self) -> None:
        """Any thread may have settled a step. The current streams come after its values."""
        for traffic in self._traffic:
            traffic.follow_values()

    def give_up(self) -> None:
        """Gradients are dropped: no copy is under way to their slots when this returns."""
        for traffic in self._traffic:
            traffic.give_up()

    def end_round(self) -> None:
        """A step takes the gradients, or they are dropped."""
        for traffic in self._traffic:
            traffic.end_round()

    def close(self) -> None:
        """Waits for the copies. A second call does nothing."""
        for traffic in self._traffic:
            traffic.close()
        for copies in self._others:
            copies.close()
