"""Models of words on a device: their losses, and the words that they add with a cache of keys and
values.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS, LENGTH, NEW_WORDS = 32, 48, 12, 3

# The keys and values of the words before, by layer.
Cache = dict[nn.Module, tuple[Tensor, Tensor]]


def words_of(x: Tensor) -> Tensor:
    return (x[:, :LENGTH].abs() * 17).long() % WORDS


class Attention(nn.Module):
    """One head. `memory` is what it looks at; a cache has what is before `x`."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.show = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        cache: Cache | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        before = cache.get(self) if cache is not None else None
        if before is not None and not is_causal:  # the memory does not change
            keys, values = before
        else:
            keys, values = self.show(memory).chunk(2, -1)
            if before is not None:
                keys, values = torch.cat((before[0], keys), 1), torch.cat((before[1], values), 1)
        if cache is not None:
            cache[self] = keys, values
        scores = self.ask(x) @ keys.transpose(1, 2) / WIDTH**0.5
        if is_causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device)
            offset = keys.shape[1] - x.shape[1] + 1
            scores = scores.masked_fill(later.triu(offset), float("-inf"))
        attended: Tensor = self.out(scores.softmax(-1) @ values)
        return attended


class Block(nn.Module):
    def __init__(self, *, has_memory: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_across = nn.LayerNorm(WIDTH) if has_memory else None
        self.across = Attention() if has_memory else None
        self.norm_up = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        cache: Cache | None = None,
        *,
        is_causal: bool = True,
    ) -> Tensor:
        shown = self.norm(x)
        x = x + self.attention(shown, shown, cache, is_causal=is_causal)
        if self.across is not None and self.norm_across is not None:
            x = x + self.across(self.norm_across(x), cast("Tensor", memory), cache)
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm_up(x))))
        return changed


class TiedGpt(nn.Module):
    """Its head is its embedding, and positions are a parameter of the model's own."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH + NEW_WORDS, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = words_of(x)
        logits = self.logits(words, 0, None)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    def logits(self, words: Tensor, first: int, cache: Cache | None) -> Tensor:
        """Those of `words`, which begin at place `first`."""
        hidden = self.embed(words) + self.positions[first : first + words.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, None, cache)
        logits: Tensor = self.head(hidden)
        return logits

    def generate(self, x: Tensor) -> Tensor:
        cache: Cache = {}
        words, new = words_of(x), list[Tensor]()
        first = 0
        for _ in range(NEW_WORDS):
            logits = self.logits(words, first, cache)
            first += words.shape[1]
            words = logits[:, -1:].argmax(-1)
            new += [words.float(), logits[:, -1:].amax(-1).float()]
        return torch.cat(new, 1)


class EncoderDecoder(nn.Module):
    """The decoder reads the words in the reverse order. Both have one embedding."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(blocks))
        self.decoder = nn.ModuleList(Block(has_memory=True) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        words = words_of(x)
        logits = self.logits(words.flip(1), self.encoded(words), None)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    def encoded(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.embed(words)
        for block in self.encoder:
            hidden = block(hidden, is_causal=False)
        return hidden

    def logits(self, words: Tensor, memory: Tensor, cache: Cache | None) -> Tensor:
        hidden = self.embed(words)
        for block in self.decoder:
            hidden = block(hidden, memory, cache)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def generate(self, x: Tensor) -> Tensor:
        cache: Cache = {}
        words, new = words_of(x), list[Tensor]()
        memory = self.encoded(words)
        words = words[:, :1]
        for _ in range(NEW_WORDS):
            logits = self.logits(words, memory, cache)
            words = logits[:, -1:].argmax(-1)
            new += [words.float(), logits[:, -1:].amax(-1).float()]
        return torch.cat(new, 1)
