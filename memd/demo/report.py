"""The demo's words while it runs and when it has finished."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from memd.demo.quantities import format_count
from memd.sizes import format_size

if TYPE_CHECKING:
    from memd.demo.sizes import LargestModel
    from memd.demo.train import StepRecord
    from memd.demo.twin import Comparison

LINES_IN_PIPE = 10  # of progress, where nobody watches


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counters of the daemon and the session at one moment; bytes and seconds since the start."""

    host_bytes: int  # the pool
    host_bytes_used: int
    nvme_bytes: int
    nvme_bytes_used: int
    read_bytes: int  # all devices, fetches and commits
    written_bytes: int
    commit_read_seconds: float
    commit_update_seconds: float
    commit_write_seconds: float
    commit_sync_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    parameter_count: int
    step_count: int
    loss_first: float
    loss_last: float
    seconds_per_step: float  # medians, from here to update_seconds
    forward_seconds: float
    forward_wait_seconds: float
    backward_seconds: float
    backward_wait_seconds: float
    clip_seconds: float
    update_seconds: float
    commit_read_seconds: float  # means; summed over tiles, which overlap
    commit_update_seconds: float
    commit_write_seconds: float
    commit_sync_seconds: float
    read_bytes_per_step: float
    written_bytes_per_step: float
    host_bytes: int
    nvme_bytes: int
    trainer_bytes_peak: int
    daemon_bytes_peak: int
    largest_parameter_count: int
    largest_formula: str


def summarise(
    records: Sequence["StepRecord"],
    *,
    before: Usage,
    after: Usage,
    parameter_count: int,
    trainer_bytes_peak: int,
    daemon_bytes_peak: int,
    largest: "LargestModel",
) -> Summary:
    """`before` and `after` lie around the steps: writing the model down at first is left out."""

    def median(term: str) -> float:
        values: list[float] = [getattr(record, term) for record in records]
        return statistics.median(values)

    def per_step(term: str) -> float:
        difference: float = getattr(after, term) - getattr(before, term)
        return difference / len(records)

    return Summary(
        parameter_count=parameter_count,
        step_count=len(records),
        loss_first=records[0].loss,
        loss_last=records[-1].loss,
        seconds_per_step=median("seconds"),
        forward_seconds=median("forward_seconds"),
        forward_wait_seconds=median("forward_wait_seconds"),
        backward_seconds=median("backward_seconds"),
        backward_wait_seconds=median("backward_wait_seconds"),
        clip_seconds=median("clip_seconds"),
        update_seconds=median("update_seconds"),
        commit_read_seconds=per_step("commit_read_seconds"),
        commit_update_seconds=per_step("commit_update_seconds"),
        commit_write_seconds=per_step("commit_write_seconds"),
        commit_sync_seconds=per_step("commit_sync_seconds"),
        read_bytes_per_step=per_step("read_bytes"),
        written_bytes_per_step=per_step("written_bytes"),
        host_bytes=after.host_bytes,
        nvme_bytes=after.nvme_bytes,
        trainer_bytes_peak=trainer_bytes_peak,
        daemon_bytes_peak=daemon_bytes_peak,
        largest_parameter_count=largest.parameter_count,
        largest_formula=largest.formula,
    )


def summary_table(summary: Summary) -> Table:
    table = Table(title="Closing summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "loss": f"{summary.loss_first:.4f} → {summary.loss_last:.4f} in {summary.step_count} steps",
        "step": f"{summary.seconds_per_step:.3f} s (median)",
        "of it": (
            f"forward {summary.forward_seconds:.3f} s, backward {summary.backward_seconds:.3f} s, "
            f"clipping {summary.clip_seconds:.3f} s, update {summary.update_seconds:.3f} s"
        ),
        "waited": (
            f"for parameters {summary.forward_wait_seconds:.3f} s in forward and "
            f"{summary.backward_wait_seconds:.3f} s in backward; "
            f"for the commit {summary.update_seconds:.3f} s"
        ),
        "commit": (
            f"read {summary.commit_read_seconds:.3f} s, "
            f"update {summary.commit_update_seconds:.3f} s, "
            f"write {summary.commit_write_seconds:.3f} s, "
            f"make durable {summary.commit_sync_seconds:.3f} s; "
            "read, update and write overlap"
        ),
        "moved": (
            f"{format_size(round(summary.read_bytes_per_step))} read and "
            f"{format_size(round(summary.written_bytes_per_step))} written a step"
        ),
        "memory": (
            f"pool {format_size(summary.host_bytes)}; beside it the trainer "
            f"{format_size(summary.trainer_bytes_peak)} and the daemon "
            f"{format_size(summary.daemon_bytes_peak)} (peak RssAnon)"
        ),
        "disk": f"volume {format_size(summary.nvme_bytes)}",
        "largest model here": (
            f"about {format_count(summary.largest_parameter_count)} parameters: "
            f"{summary.largest_formula}"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def comparison_lines(comparison: "Comparison") -> list[str]:
    lines = [
        f"largest difference in loss: {comparison.loss_difference_max:g} "
        f"({comparison.steps_differing} of {comparison.step_count} steps differ)",
        f"largest difference in parameters: {comparison.parameter_difference_max:g} "
        f"({comparison.elements_differing} of {comparison.element_count} elements differ)",
    ]
    if comparison.parameters_differing:
        names = ", ".join(comparison.parameters_differing[:8])
        more = len(comparison.parameters_differing) - 8
        lines.append(f"in: {names}" + (f" and {more} more" if more > 0 else ""))
    verdict = "bit-identical to" if comparison.identical else "NOT the bits of"
    lines.append(f"{verdict} plain PyTorch with torch.optim.AdamW(fused=True)")
    return lines


class StepProgress:
    """A live line on a terminal; about LINES_IN_PIPE plain lines elsewhere."""

    def __init__(self, console: Console, *, title: str, step_count: int) -> None:
        self._console = console
        self._title = title
        self._step_count = step_count
        self._line_every = max(step_count // LINES_IN_PIPE, 1)
        self._previous: Usage | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=step_count, state="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, record: "StepRecord", usage: Usage | None = None) -> None:
        state = self._state(record, usage)
        self._previous = usage
        if self._console.is_terminal:
            self._progress.update(self._task, advance=1, state=state)
        elif (record.step + 1) % self._line_every == 0 or record.step == 0:
            self._console.print(
                f"{self._title} step {record.step + 1}/{self._step_count} {state}", soft_wrap=True
            )

    def _state(self, record: "StepRecord", usage: Usage | None) -> str:
        state = f"loss {record.loss:.3f}  {record.seconds:.2f} s"
        if usage is None:
            return state
        waited = record.forward_wait_seconds + record.backward_wait_seconds + record.update_seconds
        state += f" ({waited / record.seconds:.0%} stalled)"
        state += f"  host {format_size(usage.host_bytes_used)}"
        state += f"  nvme {format_size(usage.nvme_bytes_used)}"
        if self._previous is not None:
            read_bytes = usage.read_bytes - self._previous.read_bytes
            written_bytes = usage.written_bytes - self._previous.written_bytes
            state += f"  read {format_size(read_bytes)}  wrote {format_size(written_bytes)}"
        return state
