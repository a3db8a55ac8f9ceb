"""`memd demo` as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memd.demo.memory import PeakMemory
from memd.demo.plan import make_plan
from memd.demo.settings import DemoSettings

pytestmark = pytest.mark.nvme

# Threads of torch that wait by spinning make each other slow where tests run side by side.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def data() -> Path:
    """Below the build folder: the temporary folder may be tmpfs."""
    folder = Path(__file__).parents[2] / "build" / "tests" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def demo(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memd", "demo", "--data", str(data), "--sequence", "64"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ONE_THREAD,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--cache", "1/4"], id="a-quarter-cached", marks=pytest.mark.soak),
        pytest.param(["--cache", "1/8"], id="an-eighth-cached", marks=pytest.mark.soak),
        pytest.param(
            ["--params", "5M", "--host", "16MiB"], id="gradients-spill", marks=pytest.mark.soak
        ),
        pytest.param(["--dtype", "bf16"], id="bf16", marks=pytest.mark.soak),
        pytest.param(
            ["--dtype", "bf16", "--params", "5M", "--host", "14MiB"], id="bf16-gradients-spill"
        ),
    ],
)
def test_the_demo_has_the_bits_of_plain_pytorch(data: Path, arguments: list[str]) -> None:
    result = demo(data, "--params", "1M", "--steps", "4", "--verify", "--json", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    outcome = json.loads(result.stdout)
    summary, comparison = outcome["summary"], outcome["comparison"]
    assert comparison["elements_differing"] == 0
    assert comparison["steps_differing"] == 0
    assert comparison["element_count"] == summary["parameter_count"]
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["written_bytes_per_step"] >= 12 * summary["parameter_count"]
    assert not list(data.iterdir())


_TORCH_ALONE = """
import re, torch
with open("/proc/self/status") as status:
    print(1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]))
"""


def test_the_trainer_never_holds_the_model(data: Path) -> None:
    """Neither while it is built nor later. A model in its memory would be more than the bound."""
    settings = DemoSettings(
        parameter_count=30_000_000,
        step_count=1,
        dtype="fp32",
        batch=1,
        sequence=64,
        seed=0,
        cache_fraction=1 / 8,
        host_bytes=None,
        nvme_bytes=None,
        text=None,
        data=data,
        verify=False,
    )
    plan = make_plan(settings)
    bound_bytes = plan.trainer.total_bytes - plan.trainer.gap_bytes  # one sequence leaves no gaps
    assert plan.shape.parameter_count * 4 > bound_bytes
    alone = subprocess.run(
        [sys.executable, "-c", _TORCH_ALONE], capture_output=True, check=True, env=ONE_THREAD
    )
    command = [sys.executable, "-m", "memd", "demo", "--data", str(data), "--params", "30M"]
    command += ["--steps", "1", "--batch", "1", "--sequence", "64", "--cache", "1/8", "--json"]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ONE_THREAD
        ) as trainer,
        PeakMemory([trainer.pid], interval_s=0.002) as memory,
    ):
        told, errors = trainer.communicate(timeout=200)
    assert trainer.returncode == 0, errors.decode()
    peak_bytes = memory.peak_bytes[trainer.pid]
    assert peak_bytes - int(alone.stdout) <= bound_bytes
    # The summary says what was seen from outside, within what lies between two looks.
    said_bytes = json.loads(told)["summary"]["trainer_bytes_peak"]
    assert abs(said_bytes - peak_bytes) < 16 * 2**20


def test_a_pool_too_small_for_the_model_is_refused(data: Path) -> None:
    result = demo(data, "--params", "30M", "--steps", "1", "--host", "1MiB")
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert not list(data.iterdir())


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_neither_daemon_nor_volume(
    data: Path, signal_number: int
) -> None:
    command = [sys.executable, "-m", "memd", "demo", "--data", str(data), "--params", "1M"]
    process = subprocess.Popen(
        [*command, "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=ONE_THREAD,
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("with memd step 1/"):
                break
        assert list(data.iterdir())
        # As a terminal does it: to trainer and daemon at once.
        os.killpg(process.pid, signal_number)
        process.wait(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 10
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)
    assert not list(data.iterdir())


def _group_lives(group_id: int) -> bool:
    try:
        os.killpg(group_id, 0)
    except ProcessLookupError:
        return False
    return True
