"""tests/bench/device_training.py on the simulated device, whose speeds mean nothing here."""

from __future__ import annotations

import argparse

import pytest

import device_training


@pytest.mark.parametrize("contender", device_training.CONTENDERS)
def test_each_contender_is_timed_with_updates_and_without(
    contender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_training, "SEQUENCE", 32)
    monkeypatch.setattr(device_training, "WARM_COUNT", 1)
    monkeypatch.setattr(device_training, "MARGIN_BYTES", 128 << 20)
    arguments = argparse.Namespace(
        child=contender,
        parameter_count=200_000,
        dtype="fp32",
        tokens=[64],
        device_bytes=None,
        steps=2,
    )
    measured = device_training.train(arguments)
    assert measured["forward + backward, 64 tokens"] > 0
    assert measured["step, 64 tokens"] > 0
    if contender == "memd":
        assert measured["statistics"]["step_count"] >= 1  # the last may still be on its way
