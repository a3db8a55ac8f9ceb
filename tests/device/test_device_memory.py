"""Memory of the simulated device is given, kept and refused as torch's allocator for CUDA does."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from torch import Tensor

# Such a request has a segment of its own: smaller ones share segments of 5120 bytes.
UNIT = 5120


@pytest.fixture(autouse=True)
def reserved_before() -> int:
    """By what other tests have left."""
    gc.collect()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved()


def taken(units: int, stream: torch.Stream) -> Tensor:
    with stream:
        return torch.empty(units * UNIT, dtype=torch.uint8, device="sim")


def streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device="sim"), torch.Stream(device="sim")


def reserved_units(before: int) -> int:
    return (torch.accelerator.memory_reserved() - before) // UNIT


def test_freed_memory_is_used_again_on_its_stream_only(reserved_before: int) -> None:
    one, other = streams()
    address = taken(4, one).data_ptr()
    kept = taken(4, other)
    assert kept.data_ptr() != address
    assert reserved_units(reserved_before) == 8
    assert taken(4, one).data_ptr() == address
    assert reserved_units(reserved_before) == 8


def test_a_block_is_split_and_merges_again(reserved_before: int) -> None:
    one, _ = streams()
    address = taken(4, one).data_ptr()
    first, second = taken(1, one), taken(3, one)
    assert [first.data_ptr(), second.data_ptr()] == [address, address + UNIT]
    assert reserved_units(reserved_before) == 4
    del first
    del second
    assert taken(4, one).data_ptr() == address


def test_a_segment_of_which_a_part_is_in_use_stays_reserved(reserved_before: int) -> None:
    one, other = streams()
    before = torch.accelerator.memory_allocated()
    taken(10, one)
    part = taken(1, one)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() - before == UNIT
    assert reserved_units(reserved_before) == 10
    with SIM.limit(torch.accelerator.memory_reserved() + UNIT):
        taken(1, other)
        with pytest.raises(torch.OutOfMemoryError, match="10240 bytes wanted"):
            taken(2, other)
        del part
        assert taken(2, other).nbytes == 2 * UNIT


def test_cached_segments_of_all_streams_make_room(reserved_before: int) -> None:
    one, other = streams()
    with SIM.limit(torch.accelerator.memory_reserved() + 5 * UNIT):
        taken(4, one)
        freed = torch.accelerator.memory_stats()["num_device_free"]
        kept = taken(5, other)
        assert torch.accelerator.memory_stats()["num_device_free"] == freed + 1
    assert reserved_units(reserved_before) == 5
    del kept


def test_small_requests_share_segments_that_no_other_splits(reserved_before: int) -> None:
    one, _ = streams()
    taken(10, one)
    with one:
        kept = [torch.empty(128, device="sim") for _ in range(10)]
    assert reserved_units(reserved_before) == 11
    torch.accelerator.empty_cache()
    assert reserved_units(reserved_before) == 1
    assert len({each.data_ptr() for each in kept}) == 10


def test_memory_that_went_back_to_the_driver_is_not_there() -> None:
    one, _ = streams()
    memory = taken(1, one)
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, memory.nbytes
    )
    kept = torch.empty(0, dtype=torch.uint8, device="sim")
    kept.set_(storage, 0, (UNIT,), (1,))
    del memory
    torch.accelerator.empty_cache()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kept.fill_(1)
