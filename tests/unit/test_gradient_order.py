"""Slots of gradients that are asked for before backward makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memd_client.connection.shard import Shard
from memd_client.core.gradient_order import GradientOrder
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


class FakeSlot:
    def __init__(self, shard_id: int, *, size_bytes: int = 4096) -> None:
        self.shard = Shard(
            shard_id=shard_id,
            name=f"p{shard_id}",
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=torch.float32,
            shape=torch.Size([size_bytes // 4]),
        )
        self.present = self.is_sealed = False


class Backward:
    """A model of `count` parameters whose gradients come in any order."""

    def __init__(self, count: int, *, size_bytes: int = 4096) -> None:
        self.slots = [FakeSlot(i, size_bytes=size_bytes) for i in range(count)]
        self.asked: list[int] = []
        self.outstanding: set[int] = set()
        self.forgotten = 0
        self.order = GradientOrder(self)
        self.parameters = [torch.ones(1, requires_grad=True) for _ in range(count)]
        for shard_id, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=shard_id: self._came(i))

    def ask_ahead(self, shard_ids: Sequence[int]) -> None:
        for shard_id in shard_ids:
            assert not self.slots[shard_id].present, "a step could take it while it is leased"
        self.asked += shard_ids
        self.outstanding.update(shard_ids)

    def forget_asked(self) -> bool:
        self.forgotten += 1
        self.outstanding.clear()
        return True

    def _came(self, shard_id: int) -> None:
        slot = self.slots[shard_id]
        is_first, slot.present = not slot.present, True
        self.outstanding.discard(shard_id)
        self.order.came(slot, is_first=is_first)

    def run(self, shard_ids: list[int], *, is_expected: bool = False) -> list[int]:
        """A backward; what is asked for meanwhile."""
        self.asked = []
        loss = torch.zeros(1)
        for shard_id in reversed(shard_ids):  # what was used last has its gradient first
            loss = loss + self.parameters[shard_id]
        if is_expected:
            loss.register_hook(lambda _: self.order.expect_backward(shard_ids[0]))
        loss.backward()
        assert not self.outstanding, "backward has ended"
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
    assert backward.run(order) == order[1:]
    assert backward.forgotten == 1, "at its end"


def test_a_backward_that_is_expected_asks_for_the_first_slots_before_their_gradients() -> None:
    order = list(range(60))
    backward = Backward(60)
    assert backward.run(order, is_expected=True) == [], "nobody knows yet what comes"
    backward.step()
    assert backward.run(order, is_expected=True) == order
    assert backward.forgotten == 1, "at its end"
    assert backward.run(order, is_expected=True) == [], "a step would take them"


def test_what_an_expected_backward_does_not_make_is_given_back_at_its_end() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()
    loss = torch.ones(1, requires_grad=True) * 2
    loss.register_hook(lambda _: backward.order.expect_backward(19))
    loss.backward()
    assert backward.asked == list(range(8))
    assert not backward.outstanding


def test_backward_of_another_model_asks_for_nothing() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()
    backward.asked = []
    loss = torch.ones(1, requires_grad=True) * 2
    loss.register_hook(lambda _: backward.order.expect_backward(20))
    loss.backward()
    assert backward.asked == []


def test_no_more_is_asked_for_than_the_next_few() -> None:
    backward = Backward(60)
    backward.run(list(range(60)))
    backward.step()
    assert backward.run([0]) == list(range(1, 17))


def test_a_second_micro_batch_asks_for_nothing_that_a_step_would_take() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()
    backward.run(list(range(5)))
    assert backward.run(list(range(20))) == list(range(5, 20))
    assert backward.run(list(range(20))) == []


def test_another_order_gives_back_what_was_asked_for_and_is_the_next_one() -> None:
    backward = Backward(60)
    backward.run(list(range(60)))
    backward.step()
    backward.run([0, *range(40, 60)])
    assert backward.forgotten == 2, "where it left the order, and at its end"
    backward.step()
    assert backward.run([0, *range(40, 60)]) == list(range(40, 60))


def test_what_a_backward_that_failed_left_is_given_back_at_once() -> None:
    backward = Backward(20)
    backward.run(list(range(20)))
    backward.step()

    def fail(_: torch.Tensor) -> None:
        assert backward.outstanding
        raise RuntimeError("in the middle of it")

    failing = backward.parameters[2].register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        backward.run(list(range(20)))
    assert not backward.outstanding
    failing.remove()
    for slot in backward.slots:
        slot.present = False
    assert backward.run(list(range(20))) == list(range(1, 20))


def test_a_backward_inside_of_another_ends_for_itself() -> None:
    backward = Backward(40)
    order = list(range(40))
    backward.run(order)
    backward.step()
    inner = torch.zeros(1)
    for shard_id in reversed(range(3, 6)):
        inner = inner + backward.parameters[shard_id]
    # As torch's reentrant checkpoints do.
    backward.parameters[2].register_post_accumulate_grad_hook(lambda _: inner.backward())
    backward.run([*range(3), *range(6, 40)])
    assert all(slot.present for slot in backward.slots)
    assert not backward.outstanding


def test_large_gradients_are_asked_for_as_far_as_their_bytes_allow() -> None:
    backward = Backward(20, size_bytes=12 << 20)
    backward.run(list(range(20)))
    backward.step()
    assert backward.run([0]) == [1, 2]


def test_a_gradient_larger_than_all_that_may_be_asked_for_is_waited_for() -> None:
    backward = Backward(3, size_bytes=64 << 20)
    backward.run([0, 1, 2])
    backward.step()
    assert backward.run([0, 1, 2]) == []


def test_loops_without_a_step_list_each_slot_once() -> None:
    """With `zero_grad(set_to_none=False)` each of their gradients is a first one."""
    order = [3, 1, 2, 0]
    backward = Backward(4)
    for _ in range(3):
        backward.run(order)
        for slot in backward.slots:
            slot.present = False
    backward.step()
    assert [known() for known in backward.order._order] == [backward.slots[i] for i in order]


def test_slots_of_a_model_that_is_gone_are_not_asked_for() -> None:
    backward = Backward(4)
    backward.run([0, 1, 2, 3])
    backward.step()
    backward.slots[2] = FakeSlot(99)
    assert backward.run([0]) == [1, 3]


def test_slots_of_a_step_that_is_not_closed_are_not_asked_for() -> None:
    backward = Backward(4)
    backward.run([0, 1, 2, 3])
    backward.step()
    backward.slots[2].is_sealed = True
    assert backward.run([0]) == [1, 3]


def test_nothing_is_asked_for_where_gradients_do_not_fit() -> None:
    backward = Backward(20)
    backward.order.stop_asking()
    backward.run(list(range(20)))
    backward.step()
    assert backward.run(list(range(20))) == []


def test_nothing_is_asked_for_outside_of_a_backward() -> None:
    backward = Backward(4)
    backward.run([0, 1, 2, 3])
    backward.step()
    backward.order.came(backward.slots[0], is_first=True)
    assert not backward.outstanding
