"""tests/bench/bench_adam.py: peers in processes of their own, and what is made of their times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bench_adam
from bench_adam import Peer, PeerFailed, figures_of_case


def test_memd_stands_against_the_faster_peer_round_by_round() -> None:
    limited, _, torch_time, deepspeed_time, ratio = figures_of_case(
        "fp32",
        gigabytes=2.8,
        updates=[1.0, 2.0],
        traffic=[0.5, 2.0],
        passes={"torch": [3.0, 3.0], "deepspeed": [1.0, 4.0]},
    )
    assert limited.fraction == pytest.approx(0.75)
    assert (torch_time.value, deepspeed_time.value) == (3.0, 2.5)
    assert list(ratio.runs) == [1.0, 2.0]  # how many times as fast as DeepSpeed, here the faster


def test_a_peer_updates_once_for_each_pass() -> None:
    with Peer("torch", dtype="fp32", elements=1000, tensors=3, threads=1) as peer:
        peer.wait_until_ready()
        assert 0 < peer.pass_seconds() < 60
        assert 0 < peer.pass_seconds() < 60


def test_a_peer_that_ends_is_an_error_with_its_last_words() -> None:
    with (
        Peer("torch", dtype="fp32", elements=10, tensors=11, threads=1) as peer,
        pytest.raises(PeerFailed, match=r"(?s)torch ended with 2:.*10 elements make no 11 tensors"),
    ):
        peer.wait_until_ready()


def test_without_their_environment_peers_are_no_silent_absence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_adam, "PEERS_PYTHON", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["bench_adam.py"])
    with pytest.raises(SystemExit) as ended:
        bench_adam.main()
    assert ended.value.code == 2
    assert "run tests/bench/peers/set_up.sh first" in capsys.readouterr().err


@pytest.mark.more
def test_a_small_comparison_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(bench_adam.__file__)), "--elements", "100K", "--threads"]
    command += ["1", "--peers", "torch", "--rounds", "2", "--json", str(tmp_path / "out.json")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "fp32, 400 tensors, 1 thread: memd / the best of torch" in shown
    assert "bf16, 1 tensor, 1 thread: memd" in shown
    assert (tmp_path / "out.json").exists()
