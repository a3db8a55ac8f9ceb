"""Small models that are trained on a device with memd. Each returns the loss of a batch, and from
`generate` what it makes of one without gradients.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.device.sequence_models import EncoderDecoder, TiedGpt

if TYPE_CHECKING:
    from collections.abc import Callable


class Mlp(nn.Module):
    """Returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 96, 64, 96, 8)
        self.layers = nn.ModuleList(
            nn.Linear(first, second) for first, second in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.square().mean()


class Norms(nn.Module):
    """Batch norms, whose statistics are buffers, around convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :16].reshape(-1, 1, 4, 4)
        x = functional.relu(self.norm(self.first(x)))
        x = self.last(self.second(x)).mean((2, 3))
        loss: Tensor = self.head(x).square().mean()
        return loss


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.frozen(x) + self.up(self.down(x))
        return changed


class Lora(nn.Module):
    """Most of its bytes are frozen, and some of them bfloat16 in a frame of float32."""

    def __init__(self, layers: int = 3, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Halved(Mlp):
    """An Mlp in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


class Experts(nn.Module):
    """Each row goes to one of some experts. One that no row goes to has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(24, 24), nn.Linear(24, 8)
        self.gate = nn.Linear(24, 6, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        shares = self.gate(x).softmax(-1)
        share, chosen = shares.max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                weighted = expert(x[rows]) * share[rows].unsqueeze(-1)
                found = found.index_add(0, rows, weighted.to(found.dtype))
        loss: Tensor = self.outlet(found).square().mean()
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "gpt": TiedGpt,
    "norms": Norms,
    "lora": Lora,
    "bf16": Halved,
}
# The host waits for the choice of an expert, as without memd.
OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder-decoder": EncoderDecoder,
    "experts": Experts,
}


class Checkpointed(nn.Module):
    """A checkpoint: backward computes `module` again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return cast("Tensor", checkpoint(self.module, *arguments, use_reentrant=False, **named))


def build(
    model: str, *, dtype: torch.dtype | None = None, has_checkpoints: bool = False
) -> nn.Module:
    """
    Args:
        dtype: that of parameters, if not the model's own.
    """
    torch.manual_seed(0)
    built = (MODELS | OTHER_MODELS)[model]().to(dtype)
    if has_checkpoints:
        _add_checkpoints(built)
    return built


def _add_checkpoints(model: nn.Module) -> None:
    """Around each layer, or each element of a list of layers."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleList):
            for place, layer in enumerate(child):
                child[place] = Checkpointed(layer)
        else:
            setattr(model, name, Checkpointed(child))


def generate(model: nn.Module, x: Tensor) -> Tensor:
    """The words that the model adds, or a loss in evaluation."""
    model.eval()
    try:
        with torch.no_grad():
            own = getattr(model, "generate", None)
            made: Tensor = (own or model)(x)
            return made
    finally:
        model.train()
