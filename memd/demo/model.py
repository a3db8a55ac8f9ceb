"""A byte-level GPT made of torch.nn alone, in sizes given by their number of parameters."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes
HEAD_WIDTH = 64
PARAMETER_COUNT_MIN = 100_000
PARAMETER_COUNT_MAX = 100_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    width: int
    depth: int
    sequence: int  # longest input, in bytes of text
    vocabulary: int = VOCABULARY

    @property
    def parameter_count(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.sequence + 2) * self.width + self.depth * block

    @property
    def module_elements_max(self) -> int:
        """Elements of the largest module that owns parameters: what must be resident at once."""
        return max(4 * self.width + 4, self.vocabulary, self.sequence) * self.width

    def activation_bytes(self, *, batch: int, element_bytes: int) -> int:
        """Memory that autograd saves in a forward of whole sequences, without parameters, and that
        backward holds at once beside it."""
        # A block saves the inputs of its norms (2), of its linears (1 + 1 + 1 + 4, of which that of
        # attention_out is what attention saves), of attention (3) and of gelu (4). Outside of the
        # blocks and in backward of one block it is as much again, once.
        width_count = 16 * (self.depth + 1)
        softmax_bytes = 4 * self.depth * (self.width // HEAD_WIDTH)  # fp32, one of each head
        logit_bytes = self.vocabulary * (2 * element_bytes + 2 * 4)  # with gradients; loss in fp32
        each_bytes = width_count * self.width * element_bytes + softmax_bytes + logit_bytes
        return batch * self.sequence * each_bytes


def shape_for(parameter_count: int, *, sequence: int) -> GPTShape:
    """The shape nearest to `parameter_count` among those neither thinner nor flatter than is usual
    (width / depth between 32 and 96). Numbers outside of the range built are a ValueError."""
    if not PARAMETER_COUNT_MIN <= parameter_count <= PARAMETER_COUNT_MAX:
        raise ValueError(
            f"a model of {parameter_count} parameters can't be built: "
            f"choose between {PARAMETER_COUNT_MIN} and {PARAMETER_COUNT_MAX}"
        )
    # The flattest shape has about width³ / 8 parameters: none of interest is wider than twice
    # the cube root.
    width_max = round(2 * parameter_count ** (1 / 3)) + HEAD_WIDTH
    shapes = (
        GPTShape(width=width, depth=depth, sequence=sequence)
        for width in range(HEAD_WIDTH, width_max + 1, HEAD_WIDTH)
        for depth in range(math.ceil(width / 96), width // 32 + 1)
    )
    return min(shapes, key=lambda shape: abs(shape.parameter_count - parameter_count))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_count = width // HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(
            batch, length, 3, self.head_count, HEAD_WIDTH
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class GPT(nn.Module):
    """`forward(inputs, targets)`: both (batch, length) of byte values, or what else the vocabulary
    counts, int64; returns the mean cross-entropy in nats, fp32. The output layer uses the
    embedding's weight."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(shape.depth)

    def _initialise(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the stream twice; this keeps its variance independent of depth.
                into_stream = name.endswith(("attention_out.weight", "feed_out.weight"))
                deviation = 0.02 / math.sqrt(2 * depth) if into_stream else 0.02
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x: Tensor = self.embedding(inputs) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(shape: GPTShape, *, dtype: torch.dtype, seed: int) -> GPT:
    """The same parameters for the same arguments, on every machine with the same torch."""
    torch.manual_seed(seed)
    return GPT(shape).to(dtype)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (biases and norms) don't."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
