"""One run of the demo: the plain twin where it is asked for, then memd, then what that took."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

import memd_client
from memd.client import DaemonClient
from memd.demo.folder import FolderError, volume_folder
from memd.demo.memory import PeakMemory, available_bytes
from memd.demo.model import GPT, build_model, parameter_groups, shape_for
from memd.demo.plan import DemoError, Plan, check_memory, make_plan, trainer_of
from memd.demo.quantities import format_count
from memd.demo.report import (
    StepProgress,
    Summary,
    Usage,
    comparison_lines,
    summarise,
    summary_table,
)
from memd.demo.settings import DemoSettings
from memd.demo.sizes import largest_model
from memd.demo.train import BETAS, LEARNING_RATE, WEIGHT_DECAY, StepRecord, train
from memd.demo.twin import Comparison, Reference, nothing, read_parameters, train_in_memory
from memd.demo.usage import read_usage
from memd.refusal import Refused
from memd.sizes import format_size
from memd_client.base.address import EmbeddedAddress, parse_address
from memd_client.base.freed_memory import return_freed_memory
from memd_client.connection.embedded import EmbeddedDaemon, embedded_daemon


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    records: list[StepRecord]
    before: Usage  # after the model was built, before the first step
    after: Usage
    trainer_bytes_peak: int  # while the model was built, too
    daemon_bytes_peak: int
    comparison: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    summary: Summary
    comparison: Comparison | None


@contextmanager
def private_daemon(address: str) -> Iterator[EmbeddedDaemon]:
    """The daemon that `connect(address)` finds. It would live as long as this process; here it ends
    with the block, so that its folder can be removed."""
    embedded = parse_address(address)
    if not isinstance(embedded, EmbeddedAddress):
        raise ValueError(f"not the address of an embedded daemon: {address}")
    daemon = embedded_daemon(embedded)
    try:
        yield daemon
    finally:
        daemon.stop()


def build_in_memd(plan: Plan, session: memd_client.Session) -> GPT:
    """The plan's model, of which this process never has more than a module."""
    with memd_client.init(session, tier="nvme"):
        return build_model(plan.shape, dtype=plan.dtype, seed=plan.seed)


def train_with_memd(
    plan: Plan,
    folder: Path,
    *,
    observe: Callable[[StepRecord, Usage], None],
    reference: Reference | None = None,
    ready: Callable[[], None] = nothing,
) -> Trained:
    """The same, with parameters and states in a private daemon whose volume lies in `folder`."""
    address = f"embedded:{quote(str(folder))}?host={plan.host_bytes}B&nvme={plan.nvme_bytes}B"
    records: list[StepRecord] = []
    comparison = None
    with (
        private_daemon(address) as daemon,
        memd_client.connect(address, job="demo") as session,
        DaemonClient(daemon.address.attach_socket) as meter,
        PeakMemory([os.getpid(), session.daemon_process_id]) as memory,
    ):
        model = build_in_memd(plan, session)
        optimizer = memd_client.AdamW(
            parameter_groups(model, weight_decay=WEIGHT_DECAY),
            lr=LEARNING_RATE,
            betas=BETAS,
            session=session,
            tier="nvme",
        )

        def observe_both(record: StepRecord) -> None:
            records.append(record)
            observe(record, read_usage(meter, session))

        ready()
        before = read_usage(meter, session)
        losses = train(
            model,
            optimizer,
            plan.batches,
            step_count=plan.step_count,
            observe=observe_both,
            lease_wait_seconds=lambda: session.statistics().lease_wait_seconds,
            finish_step=lambda: session.commit(wait=True),
        )
        after = read_usage(meter, session)
        if reference is not None:
            comparison = Comparison()
            comparison.add_losses(losses, reference.losses)
            for name, parameter, expected in read_parameters(reference.parameters, model):
                with memd_client.gather([parameter]):
                    comparison.add_parameter(name, parameter.detach(), expected)
    trainer_bytes_peak, daemon_bytes_peak = memory.peak_bytes.values()
    return Trained(
        records=records,
        before=before,
        after=after,
        trainer_bytes_peak=trainer_bytes_peak,
        daemon_bytes_peak=daemon_bytes_peak,
        comparison=comparison,
    )


def describe(plan: Plan, console: Console) -> None:
    shape, pool, volume = plan.shape, plan.pool, plan.volume
    state_bytes = volume.state_bytes
    console.print(
        f"GPT with {format_count(shape.parameter_count)} parameters ({shape.depth} blocks of width "
        f"{shape.width}), {str(plan.dtype).removeprefix('torch.')}; parameters and states "
        f"{format_size(state_bytes)}, gradients {format_size(pool.gradient_bytes)}"
    )
    if plan.host_bytes == pool.total_bytes:
        console.print(
            f"host pool {format_size(pool.total_bytes)} = gradients "
            f"{format_size(pool.gradient_bytes)} + cache {format_size(pool.cache_bytes)} "
            f"({pool.cache_bytes / state_bytes:.0%} of parameters and states) + two modules "
            f"{format_size(pool.module_bytes)} + tiles {format_size(pool.tile_bytes)} + "
            f"half-filled segments {format_size(pool.segment_bytes)}"
        )
    else:
        spilling = "; gradients will spill" if plan.gradients_spill else ""
        console.print(f"host pool {format_size(plan.host_bytes)} as asked for{spilling}")
    needs = plan.trainer
    console.print(
        f"trainer at most {format_size(needs.total_bytes)} beyond torch = largest module "
        f"{format_size(needs.module_bytes)} + its gradient {format_size(needs.gradient_bytes)} + "
        f"activations {format_size(needs.activation_bytes)} + gaps between them "
        f"{format_size(needs.gap_bytes)} + margin "
        f"{format_size(needs.margin_bytes)}"
    )


def run_demo(settings: DemoSettings, console: Console) -> Outcome:
    plan = make_plan(settings)
    check_memory(plan, verify=settings.verify)
    describe(plan, console)
    try:
        expected_bytes = plan.pool.gradient_bytes if settings.verify else 0  # as many parameters
        bytes_needed = plan.nvme_bytes + expected_bytes
        with volume_folder(settings.data, bytes_needed=bytes_needed) as folder:
            console.print(f"volume {format_size(plan.nvme_bytes)} in {folder}", soft_wrap=True)
            # Before the volume is there: what the estimate of the largest model may count on.
            disk_bytes_free = shutil.disk_usage(folder).free
            memory_bytes_available = available_bytes()
            reference = None
            if settings.verify:
                with StepProgress(
                    console, title="in memory", step_count=plan.step_count
                ) as progress:
                    reference = train_in_memory(plan, folder, observe=progress)
                # The graph's cycles, and what is free, would count as the trainer's memory below.
                gc.collect()
                return_freed_memory()
            with StepProgress(console, title="with memd", step_count=plan.step_count) as progress:
                trained = train_with_memd(plan, folder, observe=progress, reference=reference)
    except (FolderError, Refused, memd_client.MemdError) as error:
        raise DemoError(str(error)) from error
    summary = summarise(
        trained.records,
        before=trained.before,
        after=trained.after,
        parameter_count=plan.shape.parameter_count,
        trainer_bytes_peak=trained.trainer_bytes_peak,
        daemon_bytes_peak=trained.daemon_bytes_peak,
        largest=largest_model(
            disk_bytes_free=disk_bytes_free,
            memory_bytes_available=memory_bytes_available,
            gradient_element_bytes=settings.element_bytes,
            trainer_bytes=lambda count: (
                trainer_of(shape_for(count, sequence=settings.sequence), settings).total_bytes
            ),
        ),
    )
    console.print(summary_table(summary))
    if trained.comparison is not None:
        for line in comparison_lines(trained.comparison):
            console.print(line, soft_wrap=True)
    return Outcome(summary=summary, comparison=trained.comparison)
