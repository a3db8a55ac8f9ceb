"""The same training in memory with torch's own optimizer, and the comparison with it."""

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memd.demo.model import build_model, parameter_groups
from memd.demo.plan import Plan
from memd.demo.train import BETAS, LEARNING_RATE, WEIGHT_DECAY, StepRecord, train


def round_to_half(master: Tensor) -> Tensor:
    """bf16 of fp32, ties away from zero: the upper 16 bits of (bits + 0x8000)."""
    # Two's complement: the sign bit takes part in neither the sum's carry nor the shifted-out half.
    upper = (master.view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


class MemoryAdamW(torch.optim.AdamW):
    """torch's fused AdamW with everything in memory. bf16 parameters have an fp32 master that is
    updated with their gradient and published as its rounded half; fp32 parameters are their own."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._published: list[tuple[nn.Parameter, nn.Parameter]] = []  # parameter, master
        master_groups = [
            {**group, "params": [self._master_of(p) for p in group["params"]]} for group in groups
        ]
        super().__init__(
            master_groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32:
            master = parameter
        else:
            master = nn.Parameter(parameter.detach().float())
        self._published.append((parameter, master))
        return master

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        # As memd does it: vector_norm per gradient (foreach=False) and the norm of their stack,
        # in the order of the groups, on which the last bits depend.
        return nn.utils.clip_grad_norm_(
            [parameter for parameter, _ in self._published], max_norm, foreach=False
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure here
        separate = [pair for pair in self._published if pair[0] is not pair[1]]
        for parameter, master in separate:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
        super().step(closure)
        for parameter, master in separate:
            parameter.copy_(round_to_half(master))
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter, _ in self._published:
            parameter.grad = None


def memory_optimizer(model: nn.Module) -> MemoryAdamW:
    return MemoryAdamW(parameter_groups(model, weight_decay=WEIGHT_DECAY))


def write_parameters(path: Path, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Bytes of all parameters, one after the other in the order given."""
    with path.open("wb") as file:
        for _, parameter in parameters:
            file.write(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Bits decide; the largest differences are for people."""

    step_count: int = 0
    steps_differing: int = 0
    loss_difference_max: float = 0.0
    element_count: int = 0
    elements_differing: int = 0
    parameter_difference_max: float = 0.0
    parameters_differing: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return self.steps_differing == 0 and self.elements_differing == 0

    def add_losses(self, losses: list[float], expected: list[float]) -> None:
        if len(losses) != len(expected):
            raise ValueError(f"{len(losses)} losses can't be compared with {len(expected)}")
        for loss, expected_loss in zip(losses, expected, strict=True):
            self.step_count += 1
            self.steps_differing += struct.pack("<d", loss) != struct.pack("<d", expected_loss)
            self.loss_difference_max = _larger(self.loss_difference_max, abs(loss - expected_loss))

    def add_parameter(self, name: str, parameter: Tensor, expected: Tensor) -> None:
        bits = torch.int32 if parameter.dtype == torch.float32 else torch.int16
        differing = int((parameter.contiguous().view(bits) != expected.view(bits)).sum())
        self.element_count += parameter.numel()
        self.elements_differing += differing
        if differing:
            difference = (parameter.double() - expected.double()).abs().max().item()
            self.parameter_difference_max = _larger(self.parameter_difference_max, difference)
            self.parameters_differing.append(name)


def _larger(largest: float, difference: float) -> float:
    """NaN counts as the largest difference there is, and stays."""
    return largest if math.isnan(largest) or difference <= largest else difference


def read_parameters(path: Path, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Name, parameter of `model`, and what `write_parameters` wrote of its twin; one at a time."""
    with path.open("rb") as file:
        for name, parameter in model.named_parameters():
            data = bytearray(parameter.numel() * parameter.element_size())
            file.readinto(data)
            yield (
                name,
                parameter,
                torch.frombuffer(data, dtype=parameter.dtype).view(parameter.shape),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The twin's results, on disk rather than in the memory that is measured next."""

    losses: list[float]
    parameters: Path


def nothing() -> None:
    pass


def train_in_memory(
    plan: Plan,
    folder: Path,
    *,
    observe: Callable[[StepRecord], None],
    ready: Callable[[], None] = nothing,
) -> Reference:
    """Plain PyTorch, nothing of memd imported. `ready` is called before the first step."""
    model = build_model(plan.shape, dtype=plan.dtype, seed=plan.seed)
    optimizer = memory_optimizer(model)
    ready()
    losses = train(model, optimizer, plan.batches, step_count=plan.step_count, observe=observe)
    parameters = folder / "expected-parameters"
    write_parameters(parameters, model.named_parameters())
    return Reference(losses=losses, parameters=parameters)
