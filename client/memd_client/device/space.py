"""The places of copies in a range of device memory, and which of them give way.

Only places are decided here; nobody's bytes are touched.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Views on a device begin on such boundaries, as those of torch's allocators do: kernels round
# differently on other alignments.
GRANULE_BYTES = 512


def aligned(size_bytes: int) -> int:
    """The device memory that a view of so many bytes takes."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


@dataclass(slots=True, eq=False)
class Place:
    """The bytes from `begin` to `end`. `DeviceSpace` counts the users."""

    begin: int
    end: int
    user_count: int = 0

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Room:
    """A range that may be taken once `victims` have given way."""

    begin: int
    victims: Sequence[Place]


class DeviceSpace:
    """The places in a range of `size_bytes`.

    A free range of `needed_bytes`, the most that modules need at once, always remains: no place is
    taken that would leave only smaller ones.
    """

    def __init__(self, size_bytes: int, needed_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._needed_bytes = needed_bytes
        self._places: list[Place] = []  # by `begin`
        self._used: list[Place] = []  # those that somebody uses, by `begin`
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of places that somebody uses."""
        return self._used_bytes

    def use(self, place: Place) -> None:
        """Somebody uses it: until `leave` was called as often, it does not give way."""
        if not place.user_count:
            insort(self._used, place, key=_begin)
            self._used_bytes += place.size_bytes
        place.user_count += 1

    def leave(self, place: Place) -> None:
        """Undoes one `use`."""
        place.user_count -= 1
        if not place.user_count:
            self._used.remove(place)
            self._used_bytes -= place.size_bytes

    def find(
        self, size_bytes: int, *, next_use: Callable[[Place], float], sooner_than: float = -1.0
    ) -> Room | None:
        """Room for `size_bytes`, whose victims are next used as late as can be; None if there is
        none.

        Args:
            next_use: when the copy at a place that nobody uses is needed again.
            sooner_than: for a copy ahead of its use: the victims must be needed later than this.
        """
        runs = list(self._runs())
        is_ahead = sooner_than >= 0
        for begin, end, inside in runs:
            # Most have no victims: then nobody is asked for uses.
            ends = [begin, *(each.end for each in inside)]
            for start, stop in zip(ends, [*(each.begin for each in inside), end], strict=True):
                if stop - start < size_bytes:
                    continue
                for place in (start, stop - size_bytes):
                    if self._keeps_room(place, place + size_bytes, is_ahead=is_ahead):
                        return Room(place, [])
        best, best_use = None, sooner_than
        for begin, end, inside in runs:
            begins, ends = [each.begin for each in inside], [each.end for each in inside]
            uses = [next_use(each) for each in inside] if end - begin >= size_bytes else []
            for start in sorted(
                {begin, end - size_bytes, *ends, *(at - size_bytes for at in begins)}
            ):
                stop = start + size_bytes
                if start < begin or end < stop:
                    continue
                first, last = bisect_right(ends, start), bisect_left(begins, stop)
                nearest = min(uses[first:last], default=math.inf)
                if nearest > best_use and self._keeps_room(start, stop, is_ahead=is_ahead):
                    best, best_use = Room(start, inside[first:last]), nearest
        return best

    def may_be_used(self, place: Place) -> bool:
        """Whether what modules need besides finds a range once `place` does not give way."""
        return bool(place.user_count) or self._keeps_room(place.begin, place.end)

    def take(self, room: Room, size_bytes: int) -> Place:
        """The victims were freed before."""
        place = Place(room.begin, room.begin + size_bytes)
        insort(self._places, place, key=_begin)
        return place

    def free(self, place: Place) -> None:
        """Its copy is gone."""
        self._places.remove(place)

    def _runs(self) -> Iterator[tuple[int, int, list[Place]]]:
        """The ranges between places that are used: begin, end, and the places inside."""
        begin, inside = 0, list[Place]()
        for place in self._places:
            if place.user_count:
                yield begin, place.begin, inside
                begin, inside = place.end, []
            else:
                inside.append(place)
        yield begin, self._size_bytes, inside

    def _keeps_room(self, begin: int, end: int, *, is_ahead: bool = False) -> bool:
        """Once these bytes are used too. `is_ahead`: and when only they are used, as those that are
        used now may have left by then."""
        alone_bytes = max(begin, self._size_bytes - end) + (end - begin)
        if is_ahead and alone_bytes < self._needed_bytes:
            return False
        wanted_bytes = self._needed_bytes - self._used_bytes - (end - begin)
        if wanted_bytes <= 0:
            return True
        edges = sorted([*((each.begin, each.end) for each in self._used), (begin, end)])
        last, largest = 0, 0
        for first, behind in edges:
            largest = max(largest, first - last)
            last = max(last, behind)
        return max(largest, self._size_bytes - last) >= wanted_bytes


def _begin(place: Place) -> int:
    return place.begin
