"""One training program of the matrix, written once: `Plain` and `WithMemd` differ in what a user
changes, which is the session, `offload`, the optimizer's class and `commit`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

import memd_client
from memd.demo.twin import round_to_half
from tests.numerics.conformance.models import MODELS, Model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session

STEPS = 5
SEED = 7
ACCUMULATED = 4
LEARNING_RATE = 3e-3
# Below the norm of every model's gradients, so that each step clips.
NORM_MAX = 0.05
# The GradScaler skips this step: its loss is infinite.
INFINITE_STEP = 2
SCALE = 2.0**10

PRECISIONS = ("fp32", "bf16", "fp16 autocast")
COMPILERS = {"compiled": "aot_eager", "inductor": "inductor"}
INDUCTOR_MODELS = ("MLP", "tied GPT", "convolution")  # it takes seconds for each
EARLY = "step_in_backward"
VARIANTS = (
    "plain",
    "accumulation",
    "clipping",
    "reentrant checkpoints",
    "checkpoints",
    "half frozen",
    "scheduler",
    "evaluation",
    EARLY,
    f"{EARLY}, accumulation",
    f"{EARLY}, clipping",
    *COMPILERS,
)


@dataclass(frozen=True, slots=True)
class Program:
    model: str
    precision: str
    variant: str

    @property
    def steps_in_backward(self) -> bool:
        return self.variant.startswith(EARLY)

    @property
    def accumulates(self) -> bool:
        return self.variant.endswith("accumulation")

    @property
    def clips(self) -> bool:
        return self.variant.endswith("clipping")

    @property
    def autocasts(self) -> bool:
        """With a GradScaler."""
        return self.precision == "fp16 autocast"

    @property
    def is_refused(self) -> bool:
        """memd says that it does not train so, in one sentence: these change every gradient after
        its update has begun. A refusal of any other program is a failure."""
        return self.steps_in_backward and (self.accumulates or self.autocasts)

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, {self.variant}"


def programs() -> list[Program]:
    """All there are."""
    return [
        Program(model, precision, variant)
        for model in MODELS
        for precision in PRECISIONS
        for variant in VARIANTS
        if variant != "inductor" or model in INDUCTOR_MODELS
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    figures: list[float]  # losses, norms and losses of evaluations, in order
    state: dict[str, Tensor]  # every parameter and buffer
    skipped_steps: int


class Side(Protocol):
    """The calls that differ between plain PyTorch and memd."""

    def offload(self, model: Model) -> Model: ...

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer: ...

    def track(self, **objects: Any) -> None: ...

    def commit(self) -> None: ...


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW over fp32 masters of bf16 parameters, which become their masters rounded
    with ties away from zero."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        super().__init__(
            [{**group, "params": [*map(self._master_of, group["params"])]} for group in groups],
            fused=True,
        )

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().float())
        self._masters.append((parameter, master))
        return master

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure here
        for parameter, master in self._masters:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        for parameter, master in self._masters:
            if parameter.grad is not None:
                parameter.copy_(round_to_half(master))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, _ in self._masters:
            parameter.grad = None


class Plain:
    def offload(self, model: Model) -> Model:
        return model

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if groups[0]["params"][0].dtype == torch.bfloat16:
            return MasterAdamW(groups)
        return torch.optim.AdamW(groups, fused=True)

    def track(self, **objects: Any) -> None:
        pass

    def commit(self) -> None:
        pass


class WithMemd:
    def __init__(self, session: Session, *, step_in_backward: bool) -> None:
        self._session = session
        self._step_in_backward = step_in_backward
        self._tracks = False

    def offload(self, model: Model) -> Model:
        return memd_client.offload(model, self._session, tier="nvme")

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return memd_client.AdamW(
            groups, session=self._session, step_in_backward=self._step_in_backward
        )

    def track(self, **objects: Any) -> None:
        self._session.track(**objects)
        self._session.resume()
        self._tracks = True

    def commit(self) -> None:
        # Without tracked objects step() closes the step, and commit() would wait for it.
        if self._tracks:
            self._session.commit()


def built(program: Program) -> Model:
    """The model as it is before training, its parameters in the precision's dtype."""
    torch.manual_seed(SEED)
    model = MODELS[program.model]()
    return model.bfloat16() if program.precision == "bf16" else model


def trained(model: Model) -> list[nn.Parameter]:
    """The parameters that the optimizer gets."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(program: Program, side: Side) -> Trained:
    return _Training(program, side).trained()


class _Training:
    def __init__(self, program: Program, side: Side) -> None:
        self._program = program
        self._side = side
        self._figures: list[Tensor | float] = []
        model = built(program)
        self._trained = trained(model)
        if program.variant == "half frozen":
            for parameter in self._trained[::2]:
                parameter.requires_grad_(False)
        if program.variant in COMPILERS:
            for number, block in enumerate(model.blocks):
                compiled: Any = torch.compile(block, backend=COMPILERS[program.variant])
                model.blocks[number] = compiled
        reentrance = {"reentrant checkpoints": True, "checkpoints": False}
        model.use_reentrant = reentrance.get(program.variant)
        self._model = side.offload(model)
        matrices = [parameter for parameter in self._trained if parameter.ndim > 1]
        others = [parameter for parameter in self._trained if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "lr": LEARNING_RATE, "weight_decay": 0.1},
            {"params": others, "lr": 2 * LEARNING_RATE, "weight_decay": 0.0},
        ]
        self._optimizer = side.optimizer([group for group in groups if group["params"]])
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if program.variant == "scheduler":
            # It changes the betas too.
            self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self._optimizer, max_lr=LEARNING_RATE, total_steps=STEPS + 1
            )
            side.track(scheduler=self._scheduler)
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=SCALE, growth_interval=1, enabled=program.autocasts
        )
        self._skipped_steps = 0

    def trained(self) -> Trained:
        for step in range(STEPS):
            self._backward(step)
            self._step()
            if self._program.variant == "evaluation":
                self._evaluate(step)
            if self._program.variant == "half frozen" and step == STEPS // 2:
                for parameter in self._trained:
                    parameter.requires_grad_(not parameter.requires_grad)
        return Trained(
            figures=[float(figure) for figure in self._figures],
            state={name: value.clone() for name, value in self._model.state_dict().items()},
            skipped_steps=self._skipped_steps,
        )

    def _backward(self, step: int) -> None:
        count = ACCUMULATED if self._program.accumulates else 1
        for part in range(count):
            with self._precision():
                loss = self._model.loss(ACCUMULATED * step + part)
            self._figures.append(loss.detach())
            if self._program.autocasts and step == INFINITE_STEP and part == count - 1:
                loss = loss * math.inf
            self._scaler.scale(loss / count).backward()

    def _step(self) -> None:
        if self._program.clips:
            self._scaler.unscale_(self._optimizer)
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), NORM_MAX)
            self._figures.append(norm)
        self._scaler.step(self._optimizer)
        scale = self._scaler.get_scale()
        self._scaler.update()
        self._skipped_steps += self._scaler.get_scale() < scale
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        self._side.commit()

    def _evaluate(self, step: int) -> None:
        self._model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad(), self._precision():
            self._figures.append(self._model.loss(-1 - step))
        self._model.train()

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.float16, enabled=self._program.autocasts):
            yield


def difference(found: Trained, expected: Trained) -> str:
    """The first thing of which the bits differ; empty if there is none."""
    figures = zip(found.figures, expected.figures, strict=True)
    for number, (figure, wanted) in enumerate(figures):
        if not _same(torch.tensor(figure), torch.tensor(wanted)):
            return f"figure {number} (losses, norms): {figure!r} instead of {wanted!r}"
    if found.state.keys() != expected.state.keys():
        return f"names: {sorted(found.state.keys() ^ expected.state.keys())}"
    for name, value in found.state.items():
        if not _same(value, expected.state[name]):
            count = int((value != expected.state[name]).sum())
            return f"{name}: {count} of {value.numel()} elements differ"
    if found.skipped_steps != expected.skipped_steps:
        return f"skipped steps: {found.skipped_steps} instead of {expected.skipped_steps}"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    """NaN equals NaN of the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = (one.contiguous().flatten(), other.contiguous().flatten())
    return torch.equal(*(value.view(torch.uint8) for value in raw))
