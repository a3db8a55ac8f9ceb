"""Each thread of the host knows what it waited for, and what others handed it."""

from __future__ import annotations

import _thread
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SEEDS = range(20)
SIZE = 1024


class Download:
    """A copy to the host whose event another thread may wait for."""

    def __init__(self) -> None:
        self.host = torch.zeros(SIZE).pin_memory()
        self._there = torch.full((SIZE,), 2.0, device="sim")
        self._copied = torch.Event(device="sim")
        self.host.copy_(self._there, non_blocking=True)
        self._copied.record()

    def wait(self) -> None:
        self._copied.synchronize()

    def read(self) -> Tensor:
        SIM.host_touches(self.host, writes=False)
        return self.host.clone()


def run_unseen(work: Callable[[], object]) -> None:
    """Runs it in another thread and returns when it is over, without the simulation's knowledge."""
    over = _thread.allocate_lock()
    over.acquire()

    def run() -> None:
        try:
            work()
        finally:
            over.release()

    _thread.start_new_thread(run, ())
    over.acquire()


def then(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def by_join(download: Download) -> None:
    thread = threading.Thread(target=download.wait)
    thread.start()
    thread.join()


def by_future(download: Download) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(download.wait).result()


def by_queue(download: Download) -> None:
    done: queue.Queue[None] = queue.Queue()
    run_unseen(partial(then, download.wait, partial(done.put, None)))
    done.get()


def by_event(download: Download) -> None:
    done = threading.Event()
    run_unseen(partial(then, download.wait, done.set))
    assert done.wait(10)


def by_recursive_lock(download: Download) -> None:
    lock = threading.RLock()

    def wait() -> None:
        with lock, lock:
            download.wait()

    run_unseen(wait)
    with lock:
        pass


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_of_another_thread_excuses_nobody(seed: int) -> None:
    """The client's thread waited, by chance before this one reads."""
    SIM.seed(seed)
    download = Download()
    run_unseen(download.wait)
    with pytest.raises(RuntimeError, match=r"race: the host \(host thread \d+\) reads"):
        download.read()


@pytest.mark.parametrize("hand_over", [by_join, by_future, by_queue, by_event, by_recursive_lock])
def test_a_wait_counts_for_the_thread_that_was_told_of_it(
    hand_over: Callable[[Download], None],
) -> None:
    for seed in SEEDS:
        SIM.seed(seed)
        download = Download()
        hand_over(download)
        assert download.read().tolist() == [2.0] * SIZE


@pytest.mark.parametrize("seed", SEEDS)
def test_two_threads_that_use_the_same_host_bytes_race(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    run_unseen(lambda: SIM.host_touches(host, writes=True))
    SIM.host_touches(host[:0], writes=False)
    with pytest.raises(RuntimeError, match=r"race: the host .* that the host"):
        SIM.host_touches(host, writes=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_from_bytes_that_another_thread_writes_races(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    run_unseen(lambda: SIM.host_touches(host, writes=True))
    with pytest.raises(RuntimeError, match=r"race: copy to device .* that the host"):
        host.to("sim", non_blocking=True)


def test_two_threads_that_only_read_do_not_race() -> None:
    host = torch.zeros(SIZE).pin_memory()
    run_unseen(lambda: SIM.host_touches(host, writes=False))
    SIM.host_touches(host, writes=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_that_two_threads_queue_on_streams_of_their_own_race(seed: int) -> None:
    SIM.seed(seed)
    numbers = torch.ones(SIZE, device="sim")
    torch.accelerator.synchronize()
    caught: list[str] = []

    def change() -> None:
        side = torch.Stream(device="sim")
        try:
            with side:
                numbers.add_(1)
        except RuntimeError as error:
            caught.append(str(error))

    numbers.mul_(2)
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert caught[0].startswith("race: aten::add_ (stream 1")


class Hooked(torch.autograd.Function):
    """Calls a function in backward, on the thread on which torch runs it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()  # type: ignore[attr-defined]
        return gradients[0], None


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_acts_for_the_thread_that_called_it(seed: int) -> None:
    """Its waits count for the caller, and the caller's for it."""
    SIM.seed(seed)
    before, inside = Download(), Download()
    before.wait()
    threads: list[int] = []

    def hook() -> None:
        threads.append(threading.get_ident())
        before.read()
        inside.wait()

    x = torch.ones(8, device="sim", requires_grad=True)
    hooked: Tensor = Hooked.apply(x, hook)  # type: ignore[no-untyped-call]
    hooked.sum().backward()
    assert inside.read().tolist() == [2.0] * SIZE
    assert threads != [threading.get_ident()]
