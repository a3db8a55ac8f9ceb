"""The end of a backward: its place, and whether it raised."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memd_client.core.backward import Backward, is_in_backward, note_backward, running_backward
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable


class Ends:
    """Asks for the backward at each call, and keeps how it ended."""

    def __init__(self) -> None:
        self.found: list[Backward | None] = []
        self.ended: list[bool] = []

    def ask(self, *_: object) -> None:
        backward = running_backward("job")
        if backward is not None and backward not in self.found:
            backward.tell_end(self.ended.append)
        self.found.append(backward)


def leaf(*hooks: Callable[..., None]) -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    for hook in hooks:
        tensor.register_post_accumulate_grad_hook(hook)
    return tensor


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def noted(x: torch.Tensor) -> torch.Tensor:
    note_backward()
    return x * 2


def fail(*_: object) -> None:
    raise ValueError("a hook")


def test_there_is_none_outside_of_backward() -> None:
    assert running_backward("job") is None
    assert not is_in_backward()
    note_backward()


def test_all_that_ask_in_one_backward_find_the_same_and_hear_once_that_it_is_complete() -> None:
    ends = Ends()
    x, y = leaf(ends.ask), leaf(ends.ask, lambda _: ended_by_now.append(bool(ends.ended)))
    ended_by_now: list[bool] = []
    for count in (1, 2):
        (x * 2 + y).sum().backward()
        assert ends.ended == [True] * count
    assert ended_by_now == [False, True], "that of the first"
    assert ends.found[0] is ends.found[1] is not ends.found[2] is ends.found[3]


def test_one_that_raises_says_so_when_it_has_raised() -> None:
    ends = Ends()
    with pytest.raises(ValueError, match="a hook"):
        leaf(ends.ask, fail).sum().backward()
    assert ends.ended == [False]
    leaf(ends.ask).sum().backward()
    assert ends.ended == [False, True]
    assert ends.found[0] is not ends.found[1]


def test_what_a_listener_raises_is_raised_by_backward_and_the_others_are_called() -> None:
    called: list[bool] = []

    def ask(_: torch.Tensor) -> None:
        backward = running_backward("job")
        assert backward is not None
        backward.tell_end(called.append)
        backward.tell_end(fail)
        backward.tell_end(called.append)

    with pytest.raises(ValueError, match="a hook"):
        leaf(ask).sum().backward()
    assert called == [True, True]
    assert running_backward("job") is None


def test_reentrant_checkpoints_are_part_of_the_backward_around_them() -> None:
    ends = Ends()
    ended_by_now: list[bool] = []
    first = leaf(ends.ask, lambda _: ended_by_now.append(bool(ends.ended)))
    second = leaf(ends.ask)

    def inner(x: torch.Tensor) -> torch.Tensor:
        note_backward()
        return x * second

    checkpoint(
        inner, checkpoint(noted, first, use_reentrant=True), use_reentrant=True
    ).sum().backward()
    assert len(set(map(id, ends.found))) == 1
    assert ended_by_now == [False]
    assert ends.ended == [True]


def test_one_inside_another_of_which_nothing_is_known_is_refused() -> None:
    ends = Ends()
    parameter = leaf(ends.ask)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * parameter

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(InvalidArgument, match=r"'job'.*inside another.*use_reentrant=False"):
        checkpoint(inner, x, use_reentrant=True).sum().backward()
    assert ends.found == []


def test_one_that_torch_runs_in_a_thread_of_its_own_is_refused() -> None:
    ends = Ends()
    parameter = leaf(ends.ask)

    def nested(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return x * parameter
        output: torch.Tensor = checkpoint(nested, x, depth - 1, use_reentrant=True)
        return output

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(InvalidArgument, match="inside another"):
        nested(x, 70).sum().backward()


def test_threads_have_backwards_of_their_own() -> None:
    ends = Ends()
    meet = threading.Barrier(2)

    def wait(_: torch.Tensor) -> None:
        meet.wait(10)

    def run() -> None:
        leaf(ends.ask, wait).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.found[0] is not ends.found[1]
    assert ends.ended == [True, True]


def test_a_backward_that_has_ended_is_kept_by_nobody() -> None:
    found: list[weakref.ref[Backward]] = []

    def ask(_: torch.Tensor) -> None:
        backward = running_backward("job")
        assert backward is not None
        backward.tell_end(partial(_ignore, backward))
        found.append(weakref.ref(backward))

    leaf(ask).sum().backward()
    assert found[0]() is None


def _ignore(*_: object) -> None:
    pass
