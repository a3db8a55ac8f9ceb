import io
from dataclasses import replace

import pytest
from rich.console import Console

from memd.demo.report import StepProgress, Usage, comparison_lines, summarise, summary_table
from memd.demo.sizes import largest_model
from memd.demo.train import StepRecord
from memd.demo.twin import Comparison

BEFORE = Usage(
    host_bytes=2**28,
    host_bytes_used=2**27,
    nvme_bytes=2**30,
    nvme_bytes_used=2**29,
    read_bytes=1000,
    written_bytes=5000,
    commit_read_seconds=0.0,
    commit_update_seconds=0.0,
    commit_write_seconds=0.0,
    commit_sync_seconds=0.0,
)
AFTER = replace(
    BEFORE, read_bytes=1000 + 3 * 2**20, written_bytes=5000 + 6 * 2**20, commit_read_seconds=1.5
)


def record(step: int, *, loss: float, forward_seconds: float = 0.2) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        gradient_norm=1.0,
        forward_seconds=forward_seconds,
        backward_seconds=0.4,
        clip_seconds=0.1,
        update_seconds=0.3,
        forward_wait_seconds=0.05,
        backward_wait_seconds=0.05,
    )


RECORDS = [record(0, loss=5.5), record(1, loss=4.0, forward_seconds=9.0), record(2, loss=3.0)]


def test_the_summary_counts_only_the_steps_and_takes_medians() -> None:
    largest = largest_model(
        disk_bytes_free=2**40,
        memory_bytes_available=2**34,
        gradient_element_bytes=4,
        trainer_bytes=lambda count: 4 * count,
    )
    summary = summarise(
        RECORDS,
        before=BEFORE,
        after=AFTER,
        parameter_count=10**6,
        trainer_bytes_peak=2**27,
        daemon_bytes_peak=2**25,
        largest=largest,
    )
    assert (summary.loss_first, summary.loss_last) == (5.5, 3.0)
    assert summary.seconds_per_step == pytest.approx(1.0)
    assert summary.read_bytes_per_step == 2**20
    assert summary.written_bytes_per_step == 2 * 2**20
    assert summary.commit_read_seconds == 0.5
    text = io.StringIO()
    Console(file=text, width=200).print(summary_table(summary))
    for words in ("5.5000 → 3.0000", "1 MiB read", "2 MiB written", "about 2.0B parameters"):
        assert words in text.getvalue()


def test_a_pipe_gets_a_few_plain_lines() -> None:
    text = io.StringIO()
    with StepProgress(Console(file=text, width=80), title="with memd", step_count=100) as progress:
        for step in range(100):
            progress(record(step, loss=5.0 - step / 50), BEFORE if step == 0 else AFTER)
    lines = text.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("with memd step 1/100 loss 5.000")
    assert lines[-1].startswith("with memd step 100/100 loss 3.020  1.00 s (40% stalled)")
    assert "\x1b" not in text.getvalue()


def test_a_terminal_gets_one_line_that_moves() -> None:
    text = io.StringIO()
    # Whatever terminal the tests run in: a dumb one is 80 columns wide to rich.
    terminal = {"TERM": "xterm-256color"}
    console = Console(file=text, width=200, force_terminal=True, _environ=terminal)
    with StepProgress(console, title="with memd", step_count=3) as progress:
        for each in RECORDS:
            progress(each, AFTER)
    assert "3/3" in text.getvalue()
    assert "loss 3.000" in text.getvalue()


def test_training_in_memory_shows_no_tiers() -> None:
    text = io.StringIO()
    with StepProgress(Console(file=text), title="in memory", step_count=1) as progress:
        progress(record(0, loss=5.5))
    assert text.getvalue() == "in memory step 1/1 loss 5.500  1.00 s\n"


def test_identical_bits_are_said_to_be_so() -> None:
    lines = comparison_lines(Comparison(step_count=30, element_count=10))
    assert lines[0] == "largest difference in loss: 0 (0 of 30 steps differ)"
    assert lines[-1].startswith("bit-identical to plain PyTorch")


def test_different_bits_are_named_and_long_lists_cut() -> None:
    comparison = Comparison(
        step_count=30,
        steps_differing=2,
        loss_difference_max=0.5,
        element_count=100,
        elements_differing=10,
        parameters_differing=[f"blocks.{index}.weight" for index in range(10)],
    )
    lines = comparison_lines(comparison)
    assert "0.5 (2 of 30 steps differ)" in lines[0]
    assert lines[2].endswith("blocks.7.weight and 2 more")
    assert lines[-1].startswith("NOT the bits of plain PyTorch")
