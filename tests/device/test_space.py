"""Places of copies in a device's memory."""

from __future__ import annotations

import math
import random

import pytest

from memd_client.device.space import GRANULE_BYTES, DeviceSpace, Place, Room, aligned
from memd_client.device.use_order import UseOrder

UNIT = GRANULE_BYTES


class Filled:
    """A space whose places have a next use each."""

    def __init__(self, units: int, needed: int) -> None:
        self.space = DeviceSpace(units * UNIT, needed * UNIT)
        self.uses: dict[Place, float] = {}

    def find(self, units: int, *, sooner_than: float = -1.0) -> Room | None:
        return self.space.find(
            units * UNIT, next_use=self.uses.__getitem__, sooner_than=sooner_than
        )

    def add(self, units: int, next_use: float = math.inf) -> Place | None:
        room = self.find(units)
        if room is None:
            return None
        for victim in room.victims:
            self.space.free(victim)
            del self.uses[victim]
        place = self.space.take(room, units * UNIT)
        self.uses[place] = next_use
        return place


def test_views_begin_on_granules() -> None:
    assert [aligned(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_nothing_gives_way_while_there_is_room() -> None:
    filled = Filled(10, 2)
    for _ in range(5):
        assert filled.add(2)
    assert len(filled.uses) == 5


def test_the_farthest_next_use_gives_way() -> None:
    filled = Filled(6, 2)
    for next_use in (3.0, 9.0, 5.0):
        filled.add(2, next_use)
    room = filled.find(2)
    assert room is not None
    assert [filled.uses[each] for each in room.victims] == [9.0]
    assert filled.find(2, sooner_than=9.0) is None


def test_what_is_used_does_not_give_way() -> None:
    filled = Filled(4, 2)
    first, second = filled.add(2), filled.add(2)
    assert first is not None
    assert second is not None
    filled.space.use(first)
    room = filled.find(2)
    assert room is not None
    assert room.victims == [second]
    filled.space.use(second)
    assert filled.find(2) is None
    assert filled.space.used_bytes == 4 * UNIT


def test_a_place_in_the_middle_is_not_used_where_the_largest_module_needs_its_sides() -> None:
    """8 units are needed at once, of 10: a place at 4 would leave 4 and 5."""
    filled = Filled(10, 8)
    for _ in range(10):
        filled.add(1)
    places = {place.begin // UNIT: place for place in filled.uses}
    assert sorted(places) == [0, 1, 2, 7, 8, 9]
    filled.space.use(places[2])
    assert filled.space.may_be_used(places[0])
    assert not filled.space.may_be_used(places[7])


def test_a_copy_ahead_lies_where_it_may_be_used_without_what_is_used_now() -> None:
    """8 units are needed at once, of 10: 4 to 6 would do beside 0 to 4, and not alone."""
    filled = Filled(10, 8)
    used = filled.add(4)
    assert used is not None
    filled.space.use(used)
    now, ahead = filled.find(2), filled.find(2, sooner_than=0.0)
    assert now is not None
    assert ahead is not None
    assert (now.begin // UNIT, ahead.begin // UNIT) == (4, 8)


@pytest.mark.parametrize("seed", range(50))
def test_what_modules_need_at_once_finds_room_whatever_came_before(seed: int) -> None:
    """Modules of up to 16 units, in pieces that come one after the other, in 20 units."""
    dice = random.Random(seed)
    filled = Filled(20, 16)
    for _ in range(200):
        used, left = [], 16
        while left and dice.random() < 0.9:
            size = dice.randint(1, left)
            left -= size
            place = filled.add(size, dice.randint(0, 9))
            assert place is not None
            filled.space.use(place)
            used.append(place)
        for place in used:
            filled.space.leave(place)


def rounds(*uses: int) -> UseOrder:
    order = UseOrder()
    for shard_id in uses:
        order.note(shard_id)
    order.end_round()
    return order


def test_next_uses_are_those_of_the_last_round() -> None:
    order = rounds(1, 2, 3, 2, 1)
    assert order.next_use(3, outlasts_step=False) == 2
    order.note(1)
    order.note(2)
    assert order.next_use(2, outlasts_step=False) == 1
    assert order.next_use(9, outlasts_step=True) == math.inf


def test_a_copy_that_a_step_outdates_is_of_no_use_in_the_next_round() -> None:
    order = rounds(1, 2)
    order.note(1)
    assert order.next_use(1, outlasts_step=False) == math.inf
    assert order.next_use(1, outlasts_step=True) == 1


def test_what_is_ahead_is_told_once() -> None:
    order = rounds(*range(8))
    order.note(0)
    assert order.ahead(4) == [1, 2, 3, 4]
    order.note(1)
    assert order.ahead(4) == []
    order.look_again(2)
    assert order.ahead(4) == [3, 4, 5]
    order.note(5)
    assert order.ahead(4) == [6, 7]
