"""Several devices: each with memory, streams and engines of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.device.models import are_equal, train
from tests.device.simulation import SIM

SEEDS = range(20)
SIZE = 1024


class Halves(nn.Module):
    """A model on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self._second = second
        self.bottom = nn.Linear(16, 32).to(first)
        self.top = nn.Linear(32, 1).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.bottom(inputs)).to(self._second, non_blocking=True)
        loss: torch.Tensor = self.top(hidden).square().mean()
        return loss


def test_torch_knows_both_devices() -> None:
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="sim").device == torch.device("sim:1")
        assert torch.Stream(device="sim").device == torch.device("sim:1")
    assert torch.ones(1, device="sim").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match="there is no device sim:2"):
        torch.ones(1, device="sim:2")
    with pytest.raises(RuntimeError, match="there is no device sim:2"):
        torch.accelerator.set_device_index(2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_on_two_devices_has_the_bits_of_the_cpu(seed: int) -> None:
    def trained(first: str, second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = torch.randn(4, 16).to(first)
        return train(Halves(first, second), inputs)

    SIM.seed(seed)
    assert are_equal(trained("sim:0", "sim:1"), trained("cpu", "cpu"))


def test_an_operator_takes_tensors_of_one_device() -> None:
    one, other = (torch.ones(4, device=name) for name in ("sim:0", "sim:1"))
    with pytest.raises(RuntimeError, match="same device: they are on sim:0 and sim:1"):
        one + other


def test_a_kernel_runs_on_the_device_of_its_tensors_whichever_is_current() -> None:
    there = torch.ones(4, device="sim:1")
    with SIM.timeline() as timeline:
        there.mul_(2)
    assert [(entry.name, entry.device) for entry in timeline.entries()] == [("aten::mul_", 1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_for_one_device_orders_nothing_of_the_other(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(torch.full((SIZE,), 2.0, device="sim:1"), non_blocking=True)
    torch.accelerator.synchronize("sim:0")
    with pytest.raises(RuntimeError, match=r"race: the host"):
        SIM.host_touches(host, writes=False)
    torch.accelerator.synchronize("sim:1")
    SIM.host_touches(host, writes=False)
    assert host.tolist() == [2.0] * SIZE


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_of_one_device_orders_a_stream_of_the_other(seed: int) -> None:
    SIM.seed(seed)
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(torch.full((SIZE,), 2.0, device="sim:0"), non_blocking=True)
    arrived = torch.Event(device="sim:0")
    arrived.record()
    torch.accelerator.current_stream("sim:1").wait_event(arrived)
    assert host.to("sim:1", non_blocking=True).tolist() == [2.0] * SIZE


def test_each_device_counts_and_limits_its_own_memory() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(1)
    kept = torch.ones(1000, device="sim:1")
    assert torch.accelerator.memory_allocated(1) - before == 4096  # blocks are of 512 bytes
    with SIM.limit(torch.accelerator.memory_reserved(1), device=1):
        with pytest.raises(torch.OutOfMemoryError, match="10240 bytes wanted"):
            torch.ones(2560, device="sim:1")
        torch.ones(2560, device="sim:0")
    del kept
    assert torch.accelerator.memory_allocated(1) == before
