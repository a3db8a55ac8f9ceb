"""One simulation for all tests, begun anew for each."""

from __future__ import annotations

import gc
import sys
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


_modules_frozen = 0


@pytest.fixture(autouse=True)
def nothing_imported_is_garbage() -> None:
    """Tests collect garbage, hundreds of times, to end leases. Torch imports much when it is first
    asked for it."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


@pytest.fixture(autouse=True)
def simulation(nothing_imported_is_garbage: None) -> Iterator[None]:
    del nothing_imported_is_garbage
    torch.accelerator.set_device_index(0)
    SIM.seed(0)
    SIM.host_waits()
    yield
    torch.accelerator.set_device_index(0)
    SIM.seed(0)
