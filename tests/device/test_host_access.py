"""Walls between the host and a device."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SIZE = 1024
READ_A_BYTE = """
import ctypes
import torch
import tests.device.simulation
ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 1)
"""


def test_a_host_that_reads_device_memory_dies() -> None:
    child = subprocess.run(
        [sys.executable, "-c", READ_A_BYTE], cwd=ROOT, capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGSEGV, child.stderr.decode()


def test_numpy_has_no_device_memory() -> None:
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        torch.ones(4, device="sim").numpy()


def test_an_operator_takes_no_host_tensor_but_numbers() -> None:
    there = torch.ones(4, device="sim")
    with pytest.raises(RuntimeError, match="must be on the same device: one is on cpu"):
        there + torch.ones(4)
    assert (there + torch.tensor(1.0)).tolist() == [2.0] * 4


@pytest.mark.parametrize("seed", range(20))
def test_a_pageable_copy_takes_the_values_of_its_call(seed: int) -> None:
    SIM.seed(seed)
    host = torch.ones(SIZE)
    there = host.to("sim", non_blocking=True)
    host.fill_(7)
    back = torch.zeros(SIZE)
    back.copy_(there, non_blocking=True)
    assert back.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("seed", range(20))
def test_a_blocking_copy_is_over_when_it_returns(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(torch.ones(SIZE, device="sim"))
    SIM.host_touches(host, writes=True)
    assert host.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("seed", range(20))
def test_a_strided_copy_from_pinned_memory_is_a_read_of_the_host(seed: int) -> None:
    """torch gathers it on the host first."""
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(torch.ones(SIZE, device="sim"), non_blocking=True)
    with pytest.raises(RuntimeError, match=r"race: the host"):
        host[::2].to("sim")
    torch.accelerator.synchronize()
    assert host[::2].to("sim").tolist() == [1.0] * (SIZE // 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_strided_copy_to_pinned_memory_is_a_write_of_the_host(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    there = host.to("sim", non_blocking=True)
    with pytest.raises(RuntimeError, match="race: the host"):
        host[::2].copy_(there[::2])
    torch.accelerator.synchronize()
    host[::2].copy_(there[::2] + 1)
    assert host.tolist() == [1.0, 0.0] * (SIZE // 2)


def test_pinned_memory_stays_until_its_copies_are_over() -> None:
    for seed in range(20):
        SIM.seed(seed)
        there = torch.ones(SIZE).pin_memory().to("sim", non_blocking=True)
        other = torch.full((SIZE,), 7.0).pin_memory()
        assert there.tolist() == [1.0] * SIZE
        del other


def test_registered_memory_is_pinned_where_it_lies() -> None:
    host = torch.zeros(SIZE)
    assert not host.is_pinned()
    SIM.pin(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    assert host[SIZE - 1 :].is_pinned()
    with pytest.raises(RuntimeError, match="a part of these 4 bytes is registered already"):
        SIM.pin(host.data_ptr() + 8, 4)
    SIM.unpin(host.data_ptr())
    assert not host.is_pinned()
    with pytest.raises(RuntimeError, match="no registered range begins at this address"):
        SIM.unpin(host.data_ptr())


@pytest.fixture
def in_two_ranges() -> Iterator[torch.Tensor]:
    """Memory that is registered in two pieces."""
    host = torch.zeros(2 * SIZE)
    halves = host.split(SIZE)
    for half in halves:
        SIM.pin(half.data_ptr(), half.nbytes)
    yield host
    torch.accelerator.synchronize()
    for half in halves:
        SIM.unpin(half.data_ptr())


def test_a_copy_across_two_registered_ranges_is_refused(in_two_ranges: torch.Tensor) -> None:
    there = torch.ones(2 * SIZE, device="sim")
    for copy in (partial(in_two_ranges.copy_, there), partial(there.copy_, in_two_ranges)):
        with pytest.raises(
            RuntimeError, match="crosses the end of a registered range: it begins 0"
        ):
            copy()
    for half, other in zip(in_two_ranges.split(SIZE), there.split(SIZE), strict=True):
        half.copy_(other)
    assert in_two_ranges.tolist() == [1.0] * (2 * SIZE)


@pytest.mark.parametrize("half", [0, 1])
def test_the_host_touches_each_range_that_its_bytes_meet(
    in_two_ranges: torch.Tensor, half: int
) -> None:
    copied = in_two_ranges.split(SIZE)[half]
    there = copied.to("sim", non_blocking=True)
    SIM.host_touches(in_two_ranges, writes=False)
    with pytest.raises(RuntimeError, match=r"race: the host .* writes bytes that copy to device"):
        SIM.host_touches(in_two_ranges, writes=True)
    assert there.tolist() == [0.0] * SIZE
