"""`memd bench device` on the simulated device, whose speeds mean nothing here."""

from __future__ import annotations

import torch

from memd.bench.device import device_figures, find_device
from tests.daemons import BUILD


def test_each_way_stands_beside_pinned_memory_and_nothing_races() -> None:
    BUILD.mkdir(exist_ok=True)
    device = find_device()
    assert device == torch.device("sim", 0)
    figures = device_figures(BUILD, device, size=64 << 20, rounds=2, matrix_size=8)
    assert [figure.name for figure in figures] == [
        "arena to device",
        "device to arena",
        "both at once",
        "both at once, beside compute",
        "arena to device, unregistered",
        "device to arena, unregistered",
        "registering a GiB",
    ]
    for figure in figures[:-1]:
        assert len(figure.runs) == len(figure.limit_runs) == 2
        assert min(figure.runs) > 0
    assert list(figures[-1].runs) == [0.0, 0.0], "there is nothing to register"
    assert not list(BUILD.glob("memd-bench-*"))
