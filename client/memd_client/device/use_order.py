"""The order in which parameters are used between two steps: what will be needed next."""

from __future__ import annotations

import math
from bisect import bisect_left

# Without steps, as in evaluation, a round ends after so many uses.
_USES_MAX = 1 << 16


class UseOrder:
    """The uses of the last round, a step's forwards and backwards, and how far this one has come.
    Not for several threads at once."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._places: dict[int, list[int]] = {}  # shard id → where in `_order`
        self._position = 0  # of the next expected use
        self._looked = 0  # behind the last use that `ahead` has returned
        self._current: list[int] = []

    def note(self, shard_id: int) -> None:
        """It is used now."""
        self._current.append(shard_id)
        places = self._places.get(shard_id)
        if places is not None:
            at = bisect_left(places, self._position)
            if at == len(places):  # the program repeats a part of the round
                at = self._looked = 0
            self._position = places[at] + 1
        if len(self._current) > _USES_MAX:
            self.end_round()

    def begins_with(self, shard_id: int) -> bool:
        """Whether the program begins the round with it, perhaps once more."""
        return not self._current or self._current[0] == shard_id

    def end_round(self) -> None:
        """A step takes the gradients."""
        if not self._current:
            return
        self._order, self._current = self._current, []
        self._places = {}
        for position, shard_id in enumerate(self._order):
            self._places.setdefault(shard_id, []).append(position)
        self._position = self._looked = 0

    def next_use(self, shard_id: int, *, outlasts_step: bool) -> float:
        """How many uses of others come before its next one; infinity if none is expected.
        `outlasts_step`: its copy is good in the next round too."""
        places = self._places.get(shard_id)
        if not places:
            return math.inf
        at = bisect_left(places, self._position)
        if at < len(places):
            return places[at] - self._position
        return len(self._order) - self._position + places[0] if outlasts_step else math.inf

    def ahead(self, count: int) -> list[int]:
        """The next uses of this round, `count` of them, but for those that an earlier call has
        returned; empty until half of `count` are left of those."""
        begin = max(self._looked, self._position)
        if begin - self._position > count // 2:
            return []
        self._looked = max(begin, min(self._position + count, len(self._order)))
        return self._order[begin : self._looked]

    def look_again(self, count: int) -> None:
        """The last `count` uses that `ahead` has returned are returned again."""
        self._looked -= count
