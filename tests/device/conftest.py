"""One simulation for all tests, begun anew for each."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits of sums depend on the number of threads, and kernels run on threads of every kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def nothing_imported_is_garbage() -> None:
    """Tests collect garbage, hundreds of times, to end leases."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    torch.accelerator.set_device_index(0)
    SIM.seed(0)
    SIM.host_waits()
    yield
    torch.accelerator.set_device_index(0)
    SIM.seed(0)
