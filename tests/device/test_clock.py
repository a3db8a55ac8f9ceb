"""The simulated clock: what costs how much, what overlaps, and what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from tests.device.models import Transformer, train, words
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from torch import Tensor

    from tests.device.timeline import Entry

LAUNCH_NS = 5_000
MIB = 1 << 20


def kernel_ns(*, moved_bytes: int = 0, flop: int = 0) -> int:
    """5 µs, and what takes longer: bytes at 4 TB/s, or work at 400 TFLOP/s. Rounded up."""
    return LAUNCH_NS + max(-(-moved_bytes // 4_000), -(-flop // 400_000))


def copy_ns(moved_bytes: int, gigabytes_per_second: int = 50) -> int:
    return -(-moved_bytes // gigabytes_per_second)


def pinned(length_bytes: int) -> Tensor:
    return torch.ones(length_bytes // 4).pin_memory()


def on_device(*shape: int) -> Tensor:
    return torch.ones(shape, device="sim")


def recorded_event() -> torch.Event:
    event = torch.Event(device="sim", enable_timing=True)
    event.record()
    return event


def test_a_kernel_takes_its_launch_and_its_bytes() -> None:
    one, other = on_device(4 * MIB), on_device(4 * MIB)
    with SIM.timeline() as timeline:
        one + other
        one.add_(other)
        one[:0].neg()
    three, two, none = timeline.entries()
    assert three.duration_ns == kernel_ns(moved_bytes=3 * 16 * MIB)
    assert two.duration_ns == kernel_ns(moved_bytes=2 * 16 * MIB)
    assert none.duration_ns == LAUNCH_NS


def test_an_expanded_tensor_moves_once_and_a_lookup_only_what_it_finds() -> None:
    number, table = on_device(1).expand(MIB), on_device(MIB, 16)
    rows = torch.arange(64, device="sim")
    with SIM.timeline() as timeline:
        number.neg()
        functional.embedding(rows, table)
    expanded, lookup = timeline.entries()
    assert expanded.moved_bytes == 4 + 4 * MIB
    assert lookup.moved_bytes == 64 * 8 + 2 * 64 * 16 * 4


def test_a_product_takes_its_work() -> None:
    one, other, bias = on_device(512, 1024), on_device(1024, 2048), on_device(2048)
    many, more = on_device(2, 1024, 1024), on_device(2, 1024, 1024)
    with SIM.timeline() as timeline:
        one @ other
        torch.addmm(bias, one, other)
        many @ more
    plain, biased, batched = timeline.entries("compute")
    assert plain.duration_ns == kernel_ns(flop=2 * 512 * 1024 * 2048)
    assert biased.duration_ns == plain.duration_ns
    assert batched.duration_ns == kernel_ns(flop=2 * 2 * 1024**3)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_convolution_takes_its_work_and_its_backward_twice_that(is_transposed: bool) -> None:
    images = on_device(8, 64, 32, 32).requires_grad_()
    weight = on_device(64, 64, 3, 3).requires_grad_()
    convolve = functional.conv_transpose2d if is_transposed else functional.conv2d
    flop = 2 * 8 * 64 * 32 * 32 * 64 * 9
    with SIM.timeline() as timeline:
        convolve(images, weight, padding=1).sum().backward()
    found = {entry.name: entry for entry in timeline.entries()}
    assert found["aten::convolution"].duration_ns == kernel_ns(flop=flop)
    assert found["aten::convolution_backward"].duration_ns == kernel_ns(flop=2 * flop)


@pytest.mark.parametrize("speed", [50, 25])
def test_copies_go_each_way_at_the_links_speed(speed: int) -> None:
    host = pinned(16 * MIB)
    with SIM.copies_at(speed * 1e9), SIM.timeline() as timeline:
        there = host.to("sim", non_blocking=True)
        host.copy_(there, non_blocking=True)
    up, down = timeline.entries()
    assert (up.engine, down.engine) == ("copy_in", "copy_out")
    assert up.duration_ns == down.duration_ns == copy_ns(16 * MIB, speed)
    assert down.begin_ns == up.end_ns


def test_elapsed_time_is_that_of_the_stream() -> None:
    numbers = on_device(4 * MIB)
    begun = recorded_event()
    numbers.neg_()
    numbers.neg_()
    ended = recorded_event()
    ended.synchronize()
    assert begun.elapsed_time(ended) == pytest.approx(
        2 * kernel_ns(moved_bytes=16 * MIB) * 1e-6, abs=1e-9
    )
    assert ended.elapsed_time(begun) == -begun.elapsed_time(ended)


def test_elapsed_time_of_an_event_that_is_not_over_is_refused() -> None:
    refusals = 0
    for seed in range(50):
        SIM.seed(seed)
        begun = recorded_event()
        on_device(MIB)
        ended = recorded_event()
        try:
            begun.elapsed_time(ended)
        except RuntimeError as error:
            refusals += "Both events must be completed" in str(error)
        ended.synchronize()
        assert begun.elapsed_time(ended) > 0
    assert refusals


def test_a_side_stream_copies_while_kernels_run() -> None:
    host, numbers = pinned(MIB // 2), on_device(16 * MIB)
    side = torch.Stream(device="sim")
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        numbers.neg_()
        with side:
            there = host.to("sim", non_blocking=True)
        numbers.neg_()
    assert timeline.overlap_ns("compute", "copy_in") == copy_ns(there.nbytes)
    assert timeline.span_ns == timeline.busy_ns("compute")


def test_an_event_delays_the_stream_that_waits_for_it() -> None:
    host, numbers = pinned(16 * MIB), on_device(64)
    side, copied = torch.Stream(device="sim"), torch.Event(device="sim")
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        with side:
            there = host.to("sim", non_blocking=True)
            copied.record(side)
        numbers.neg_()
        torch.accelerator.current_stream().wait_event(copied)
        there.neg_()
    there.record_stream(torch.accelerator.current_stream())
    copy, early, late = timeline.entries()
    assert early.begin_ns == copy.begin_ns
    assert late.begin_ns == copy.end_ns


def test_an_engine_does_one_thing_at_a_time_and_fills_its_gaps() -> None:
    """A copy that an event holds back does not hold back one that another stream queues later."""
    hosts = [pinned(MIB // 2) for _ in range(3)]
    numbers, computed = on_device(16 * MIB), torch.Event(device="sim")
    held, free = torch.Stream(device="sim"), torch.Stream(device="sim")
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        numbers.neg_()
        computed.record()
        held.wait_event(computed)
        with held:
            kept = [hosts[0].to("sim", non_blocking=True)]
        with free:
            kept += [host.to("sim", non_blocking=True) for host in hosts[1:]]
    kernel, late, early, last = timeline.entries()
    assert late.begin_ns == kernel.end_ns
    assert early.begin_ns == kernel.begin_ns
    assert early.end_ns < late.begin_ns
    assert last.begin_ns == early.end_ns
    assert last.end_ns < late.begin_ns
    assert timeline.busy_ns("copy_in") == 3 * copy_ns(MIB // 2)


def test_copies_of_two_streams_share_an_engine_and_devices_do_not() -> None:
    host = pinned(16 * MIB)
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        kept = [host.to("sim", non_blocking=True)]
        with torch.Stream(device="sim"):
            kept.append(host.to("sim", non_blocking=True))
        kept.append(host.to("sim:1", non_blocking=True))
    first, second, other = timeline.entries()
    assert second.begin_ns == first.end_ns
    assert other.begin_ns <= first.begin_ns
    assert len(kept) == 3


def test_a_thread_that_waits_is_on_the_timeline_and_queues_later() -> None:
    host = pinned(16 * MIB)
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        there = host.to("sim", non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        torch.ones(1, device="sim:1")
    copy, wait, after = timeline.entries()
    assert (wait.engine, wait.device) == ("host", -1)
    assert wait.end_ns == copy.end_ns == after.begin_ns
    assert wait.duration_ns == copy_ns(there.nbytes)


def step_entries(seed: int) -> list[Entry]:
    SIM.seed(seed)
    torch.manual_seed(0)
    model = Transformer().to("sim")
    inputs = words().to("sim")
    torch.accelerator.synchronize()
    with SIM.timeline() as timeline:
        train(model, inputs, steps=1)
    entries = timeline.entries()
    assert timeline.busy_ns("compute") == sum(
        entry.duration_ns for entry in timeline.entries("compute")
    )
    assert timeline.busy_ns("compute", "copy_out", "copy_in") <= timeline.span_ns
    assert all(entry.end_ns > entry.begin_ns for entry in entries)
    return entries


def test_a_steps_timeline_does_not_depend_on_the_dice() -> None:
    def shape(entries: list[Entry]) -> list[tuple[str, str, int, int]]:
        begin = entries[0].begin_ns
        return [
            (entry.name, entry.engine, entry.begin_ns - begin, entry.duration_ns)
            for entry in entries
        ]

    expected = shape(step_entries(0))
    assert len(expected) > 100
    for seed in range(1, 5):
        assert shape(step_entries(seed)) == expected
