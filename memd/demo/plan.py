"""Everything that is decided before the first byte is moved."""

from dataclasses import dataclass

import torch

from memd.demo import sizes
from memd.demo.memory import available_bytes
from memd.demo.model import GPTShape, shape_for
from memd.demo.settings import DemoSettings
from memd.demo.text import Batches, read_standard_library, read_text
from memd.sizes import format_size


class DemoError(Exception):
    """The demo can't run; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    shape: GPTShape
    dtype: torch.dtype
    seed: int
    step_count: int
    batches: Batches
    pool: sizes.HostPool
    trainer: sizes.Trainer
    volume: sizes.Volume
    host_bytes: int  # the pool's total, or what was asked for
    nvme_bytes: int

    @property
    def gradients_spill(self) -> bool:
        return self.host_bytes < self.pool.total_bytes - self.pool.cache_bytes


def make_plan(settings: DemoSettings) -> Plan:
    shape = shape_for(settings.parameter_count, sequence=settings.sequence)
    text = read_text(settings.text) if settings.text else read_standard_library()
    pool = sizes.host_pool(
        shape.parameter_count,
        gradient_element_bytes=settings.element_bytes,
        cache_fraction=settings.cache_fraction,
        module_elements_max=shape.module_elements_max,
    )
    volume = sizes.volume(shape.parameter_count, gradient_element_bytes=settings.element_bytes)
    return Plan(
        shape=shape,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[settings.dtype],
        seed=settings.seed,
        step_count=settings.step_count,
        batches=Batches(text, batch=settings.batch, sequence=settings.sequence, seed=settings.seed),
        pool=pool,
        trainer=trainer_of(shape, settings),
        volume=volume,
        host_bytes=settings.host_bytes or pool.total_bytes,
        nvme_bytes=settings.nvme_bytes or volume.total_bytes,
    )


def trainer_of(shape: GPTShape, settings: DemoSettings) -> sizes.Trainer:
    return sizes.trainer(
        module_elements_max=shape.module_elements_max,
        element_bytes=settings.element_bytes,
        activation_bytes=shape.activation_bytes(
            batch=settings.batch, element_bytes=settings.element_bytes
        ),
    )


def check_memory(plan: Plan, *, verify: bool) -> None:
    """Refuses what would end in the kernel's out-of-memory killer."""
    parameter_count = plan.shape.parameter_count
    needs = {
        "the host pool, activations and the largest module": (
            plan.host_bytes + plan.trainer.total_bytes
        )
    }
    if verify:
        # Parameters, gradients, moments; in bf16 fp32 masters and their gradients too.
        each_bytes = 16 if plan.dtype == torch.float32 else 20
        needs["--verify, which trains in memory,"] = (
            parameter_count * each_bytes + plan.trainer.activation_bytes
        )
    for reason, needed_bytes in needs.items():
        if needed_bytes > available_bytes():
            raise DemoError(
                f"{reason} would take {format_size(needed_bytes)} of the "
                f"{format_size(available_bytes())} of memory available: "
                "choose a smaller model with --params"
            )
