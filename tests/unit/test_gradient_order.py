"""Slots of gradients that are asked for before backward makes them."""

import torch

from memd_client.gradient_order import GradientOrder
from memd_client.leases import MODE_WRITE, Shard
from memd_native import PART_GRADIENT
from memd_proto.v1 import types_pb2


class FakeSlot:
    def __init__(self, shard_id: int, *, size_bytes: int = 4096) -> None:
        self.shard = Shard(
            shard_id=shard_id,
            name=f"p{shard_id}",
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=torch.float32,
            shape=torch.Size([size_bytes // 4]),
        )
        self.present = False


class Backward:
    """A model of `count` parameters whose gradients come in any order."""

    def __init__(self, count: int, *, size_bytes: int = 4096) -> None:
        self.slots = [FakeSlot(i, size_bytes=size_bytes) for i in range(count)]
        self.asked: list[tuple[int, bool]] = []  # and whether there was a gradient to add to
        self.forgotten = 0
        self.order = GradientOrder(self)

    def ask_ahead(self, shard_id: int, part: int, mode: int) -> None:
        assert part == PART_GRADIENT
        self.asked.append((shard_id, mode == MODE_WRITE))

    def forget_asked(self) -> bool:
        self.forgotten += 1
        return True

    def run(self, shard_ids: list[int]) -> list[tuple[int, bool]]:
        """What is asked for meanwhile."""
        self.asked = []
        for shard_id in shard_ids:
            slot = self.slots[shard_id]
            is_first, slot.present = not slot.present, True
            self.order.came(slot, is_first=is_first)
        return self.asked

    def step(self) -> None:
        for slot in self.slots:
            slot.present = False
        self.order.end_round()


def test_the_second_backward_asks_for_every_slot_but_the_first_one_once() -> None:
    order = [4, 2, 0, 3, 1, *range(5, 60)]
    backward = Backward(60)
    assert backward.run(order) == []
    backward.step()
    assert backward.run(order) == [(shard_id, False) for shard_id in order[1:]]
    assert backward.forgotten == 0


def test_a_slot_is_asked_for_before_its_gradient_comes() -> None:
    backward = Backward(60)
    backward.run(list(range(60)))
    backward.step()
    backward.asked = []
    for shard_id in range(60):
        if shard_id:
            assert (shard_id, False) in backward.asked
        backward.order.came(backward.slots[shard_id], is_first=True)
        assert len(backward.asked) <= shard_id + 16


def test_a_second_micro_batch_asks_for_gradients_to_add_to() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()
    backward.run(list(range(20)))
    assert backward.run(list(range(20))) == [(shard_id, True) for shard_id in range(1, 20)]


def test_another_order_gives_back_what_was_asked_for_and_is_the_next_one() -> None:
    backward = Backward(60)
    backward.run(list(range(60)))
    backward.step()
    backward.run([0, *range(40, 60)])
    assert backward.forgotten == 1
    backward.step()
    assert backward.run([0, *range(40, 60)]) == [(shard_id, False) for shard_id in range(40, 60)]
    assert backward.forgotten == 1


def test_what_a_backward_left_is_given_back_at_the_step() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()
    backward.run([0, 1])
    assert backward.forgotten == 0
    backward.step()
    assert backward.forgotten == 1
    backward.step()
    assert backward.forgotten == 1


def test_large_gradients_are_asked_for_as_far_as_their_bytes_allow() -> None:
    backward = Backward(20, size_bytes=12 << 20)
    backward.run(list(range(20)))
    backward.step()
    assert backward.run([0]) == [(1, False), (2, False)]


def test_a_gradient_larger_than_all_that_may_be_asked_for_is_waited_for() -> None:
    backward = Backward(3, size_bytes=64 << 20)
    backward.run([0, 1, 2])
    backward.step()
    assert backward.run([0, 1, 2]) == []


def test_slots_of_a_model_that_is_gone_are_not_asked_for() -> None:
    backward = Backward(4)
    backward.run([0, 1, 2, 3])
    backward.step()
    del backward.slots[2]
    assert backward.run([0]) == [(1, False), (3, False)]


def test_nothing_is_asked_for_where_gradients_do_not_fit() -> None:
    backward = Backward(20)
    backward.order.may_ask = False
    backward.run(list(range(20)))
    backward.step()
    assert backward.run(list(range(20))) == []
