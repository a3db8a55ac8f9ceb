"""tests/bench/peers: what a contestant's process shows, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench_train
from peers.compare import (
    BESIDE_POOL_BYTES,
    EQUAL_BYTES,
    RIVAL,
    compare_losses,
    contestants,
    figures,
    pool_bytes,
    run_record,
    volume_bytes,
)
from peers.train import SHAPES, batches
from peers.watching import (
    ContestantFailed,
    ProcessMemory,
    Watched,
    family,
    family_memory,
    memory_of_all,
    moved_bytes,
    process_memory,
    watch,
)


def a_run(step_s: float, losses: list[float], *, counters: dict[str, int] | None = None) -> Watched:
    """One warm step, all but the last one timed."""
    times = [10.0 + step_s * number for number in range(len(losses) + 1)]
    events: list[dict[str, Any]] = [{"event": "ready", "time": times[0], "threads": 2}]
    begun = dict.fromkeys(counters or {}, 0)
    for number, loss in enumerate(losses):
        if number == 1:
            events.append({"event": "mark", "name": "begin", "time": times[number], **begun})
        if number == len(losses) - 1:
            end = {"event": "mark", "name": "end", "time": times[number] + 1e-6}
            events.append({**end, **(counters or {})})
        events.append({"event": "step", "time": times[number + 1], "loss": loss})
    return Watched(
        events=events,
        memory=[(9.0, 500), (times[1], 300), (times[-1], 200)],
        moved={"begin": (1000, 0), "end": (1000 + 60 * (len(losses) - 2), 30)},
    )


def test_steps_between_the_marks_count_and_those_around_them_do_not() -> None:
    run = a_run(0.5, [4.0, 3.0, 2.0, 1.0], counters={"read_bytes": 100})
    assert run.step_seconds == pytest.approx([0.5, 0.5])
    assert run.losses == [4.0, 3.0, 2.0, 1.0]
    assert run.read_bytes_per_step == 60
    assert run.written_bytes_per_step == 15
    assert run.counted_per_step("read_bytes") == 50
    assert run.counted_per_step("written_bytes") is None


def test_memory_of_setting_up_is_told_apart_from_that_of_training() -> None:
    run = a_run(0.5, [4.0, 3.0, 2.0, 1.0])
    assert (run.memory_peak_of_all, run.memory_peak, run.memory_steady) == (500, 300, 200)


def test_figures_stand_beside_those_of_the_same_round() -> None:
    losses = [4.0, 3.0, 2.0, 1.0]
    runs = {
        "plain": [a_run(1.0, losses), a_run(2.0, losses)],
        RIVAL: [a_run(3.0, losses), a_run(6.0, losses)],
        "memd": [a_run(1.5, losses), a_run(3.0, losses)],
    }
    found = {figure.name: figure for figure in figures(runs, 10)}
    assert found[f"{RIVAL} / memd: step"].runs == pytest.approx([2.0, 2.0])
    assert found["plain / memd: step, mean"].value == pytest.approx(2 / 3)
    assert found["memd: memory, steady"].value == 200
    assert not found[f"{RIVAL} / memd: step"].less_is_better
    assert found[f"memd / {RIVAL}: memory, steady"].runs == [1.0, 1.0]
    # 60 bytes were read and 15 written in a step.
    assert found["memd: written a step, for a parameter"].runs == [1.5, 1.5]
    assert found[f"memd / {RIVAL}: read a step"].runs == [1.0, 1.0]
    assert found[f"memd / {RIVAL}: read a step"].less_is_better
    assert run_record(runs["memd"][0])["step_seconds"] == pytest.approx([1.5, 1.5])


def test_a_bit_of_loss_is_a_difference_in_fp32_and_the_rival_may_round() -> None:
    runs = {
        "plain": [a_run(1.0, [4.0, 3.0, 2.0])],
        RIVAL: [a_run(1.0, [4.0, 3.5, 2.0])],
        "memd": [a_run(1.0, [4.0, 3.0, 2.0])],
        "memd-quarter": [a_run(1.0, [4.0, 3.0, 2.0]), a_run(1.0, [4.0, 3.0, 2.0000000000000004])],
    }
    compared = compare_losses(runs, "fp32")
    assert compared["must_equal"] == ["plain", "memd", "memd-quarter"]
    assert compared["differing"] == ["memd-quarter"]
    assert compared["difference_max_from_plain"][RIVAL] == 0.5
    assert compare_losses(runs, "bf16")["must_equal"] == ["memd", "memd-quarter"]


def test_memd_gets_what_the_rival_takes_in_all_and_a_quarter_of_the_state() -> None:
    listed = {each.name: each for each in contestants("60m", "fp32")}
    assert listed["memd"].pool_bytes + BESIDE_POOL_BYTES == EQUAL_BYTES["60m", "fp32"]
    assert listed["memd"].durability == "every:10"
    quarter = pool_bytes("60m", "fp32", cache_fraction=0.25)
    assert listed["memd-quarter"].pool_bytes == quarter
    # 4 of gradients and 3 of cache for each parameter, and what does not grow with them.
    assert 7 * SHAPES["60m"].parameter_count < quarter < 9 * SHAPES["60m"].parameter_count
    assert listed["memd-quarter-in-backward"].step_in_backward
    assert "memd-small-pool" not in listed
    small = {each.name: each for each in contestants("311m", "bf16")}["memd-small-pool"]
    assert small.pool_bytes == 1.5 * 2**30


def test_memory_stands_against_what_is_allowed() -> None:
    runs = {"memd": [a_run(1.0, [4.0, 3.0, 2.0])], "plain": [a_run(1.0, [4.0, 3.0, 2.0])]}
    found = {figure.name: figure for figure in figures(runs, 10, {"memd": 150, "plain": 0})}
    assert found["memd: memory, steady"].fraction == 0.75
    assert found["plain: memory, steady"].fraction is None
    allowed = {each.name: each.allowed_bytes for each in contestants("311m", "bf16")}
    assert allowed["memd-small-pool"] == 2.5 * 2**30
    assert allowed["memd"] == EQUAL_BYTES["311m", "bf16"]


def test_huge_pages_count_once_beside_what_the_kernel_calls_proportional() -> None:
    rollup = """55b0-7ffc ---p 00000000 00:00 0                  [rollup]
Rss:             9000 kB
Pss:             1000 kB
Shared_Hugetlb:   600 kB
Private_Hugetlb:  300 kB
"""
    daemon = process_memory(rollup)
    assert daemon == ProcessMemory(
        proportional=1000 << 10, huge_private=300 << 10, huge_shared=600 << 10
    )
    trainer = ProcessMemory(proportional=500 << 10, huge_private=0, huge_shared=600 << 10)
    assert memory_of_all([daemon, trainer]) == (1000 + 300 + 500 + 600) << 10
    with pytest.raises(ProcessLookupError):
        process_memory("")


def test_a_contestant_keeps_to_its_processors() -> None:
    source = """
import os, subprocess, sys
from peers.train import keep_to_processors
keep_to_processors(1)
subprocess.run([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"])
keep_to_processors(2)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(bench_train.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, env=environ
    )
    assert done.stdout == "1\n"
    assert done.returncode == 1
    assert "--threads 2: there are 1 processors" in done.stderr


def test_the_shapes_have_the_parameters_of_their_names() -> None:
    assert SHAPES["60m"].parameter_count == pytest.approx(60e6, rel=0.01)
    assert SHAPES["311m"].parameter_count == pytest.approx(311e6, rel=0.01)
    assert volume_bytes("60m", "fp32") > 36 * SHAPES["60m"].parameter_count


def test_all_contestants_see_the_same_tokens() -> None:
    first, second = (batches(SHAPES["tiny"], batch=2, sequence=8) for _ in range(2))
    for (inputs, targets), (same, _) in zip(first, second, strict=True):
        assert inputs.equal(same)
        assert inputs[:, 1:].equal(targets[:, :-1])


def program(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def run(source: str, *, timeout_s: float = 60) -> Watched:
    return watch(
        program(source), environment={"GREETING": "yes"}, timeout_s=timeout_s, observe=print
    )


def test_a_process_is_watched_with_its_children() -> None:
    source = """
import json, os, subprocess, sys, time
def tell(event, **values):
    print(json.dumps({"event": event, "time": time.monotonic(), **values}), flush=True)
tell("ready", threads=os.environ["GREETING"])
child = subprocess.Popen([sys.executable, "-c",
    "kept = bytearray(b'1') * (64 << 20); print('made', flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
tell("mark", name="begin")
tell("step", loss=1.0)
tell("mark", name="end")
time.sleep(0.3)
child.communicate(b"end")
tell("done")
"""
    watched = run(source)
    assert watched.only("ready")["threads"] == "yes"
    assert watched.memory_steady > 64 << 20
    assert len(watched.step_seconds) == 1
    assert watched.read_bytes_per_step >= 0
    assert set(watched.moved) == {"begin", "end"}


def test_what_a_failing_contestant_said_last_is_told() -> None:
    with pytest.raises(ContestantFailed, match=r"exit status 1:\n(.|\n)*ValueError: no such state"):
        run("raise ValueError('no such state')")


def test_a_contestant_that_ends_early_has_failed() -> None:
    with pytest.raises(ContestantFailed, match="exit status 0"):
        run("pass")


def test_a_contestant_that_hangs_is_ended() -> None:
    with pytest.raises(ContestantFailed, match="exit status -9"):
        run("import time; time.sleep(600)", timeout_s=0.5)


def test_a_process_counts_its_own_memory_and_bytes() -> None:
    assert os.getpid() in set(family(os.getpid()))
    rollup = Path("/proc/self/smaps_rollup").read_text()
    assert family_memory(os.getpid()) >= process_memory(rollup).proportional // 2 > 1 << 20
    assert min(moved_bytes(os.getpid())) >= 0
