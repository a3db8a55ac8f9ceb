"""Models under torch.compile, and the plain ones that they have the numbers of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import memd_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session

# dynamo asks intermediate tensors for their gradients, and hides torch's warning from logs only.
ASKS_FOR_GRADIENTS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    """Two levels of children, one without parameters, and a parameter that it detaches."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x * self.scale.detach() + self.mlp(self.norm(x)) * self.scale
        return output


class Model(nn.Module):
    """Tied parameters, and some of its own, of which a view is used."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[:LENGTH]
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(index)).square().mean()
    return loss


def whole(model: Model, **options: Any) -> nn.Module:
    compiled: Any = torch.compile(model, **options)
    assert isinstance(compiled, nn.Module)
    return compiled


def whole_in_place(model: Model, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def blocks(model: Model, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**options)
    return model


def wrapped_blocks(model: Model, **options: Any) -> nn.Module:
    for i, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, **options)
        model.blocks[i] = compiled
    return model


COMPILE: dict[str, Callable[..., nn.Module]] = {
    "whole": whole,
    "whole in place": whole_in_place,
    "blocks": blocks,
    "wrapped blocks": wrapped_blocks,
}


def end_graphs_as_memd(model: nn.Module) -> None:
    """Hooks that do nothing, where memd has its own: a graph ends at each."""
    nothing = torch.compiler.disable(lambda *_: None)
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_forward_pre_hook(nothing)
            module.register_forward_hook(nothing)


class Trained(NamedTuple):
    losses: list[torch.Tensor]
    evaluated: list[torch.Tensor]
    state: list[torch.Tensor]
    graph_count: int


def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session | None) -> Trained:
    """Five steps and two evaluations, of which only the first of each may compile. Leases end with
    each call."""
    torch._dynamo.utils.counters.clear()
    losses, evaluated = [], []
    for step in compiling_first(range(5)):
        loss = loss_of(model, step)
        assert_no_leases(session)
        loss.backward()
        assert_no_leases(session)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    for step in compiling_first(range(2)):
        with torch.no_grad():
            evaluated.append(loss_of(model, 50 + step))
        assert_no_leases(session)
    state = [value.clone() for value in model.state_dict().values()]
    graph_count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Trained(losses, evaluated, state, graph_count)


def compiling_first(steps: range) -> Iterator[int]:
    """Whatever would be compiled after the first is an error."""
    try:
        for step in steps:
            yield step
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


def assert_no_leases(session: Session | None) -> None:
    if session is not None:
        assert session.statistics().leases_held == 0


def train_plain(how: str, **options: Any) -> Trained:
    """The plain model, compiled in the same way if `options` are given."""
    torch._dynamo.reset()
    model = build()
    if options and how.startswith("whole"):
        end_graphs_as_memd(model)
    compiled = COMPILE[how](model, **options) if options else model
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2, fused=True)
    return train(compiled, optimizer, None)


def train_offloaded(how: str, when: str, session: Session, **options: Any) -> Trained:
    """`when` the model is compiled: "before" or "after" it is offloaded."""
    torch._dynamo.reset()
    model = build()
    if when == "before":
        compiled = memd_client.offload(COMPILE[how](model, **options), session)
    else:
        compiled = COMPILE[how](memd_client.offload(model, session), **options)
    optimizer = memd_client.AdamW(compiled.parameters(), lr=1e-2)
    return train(compiled, optimizer, session)


def assert_same(trained: Trained, expected: Trained) -> None:
    for found, wanted in zip(trained[:3], expected[:3], strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
