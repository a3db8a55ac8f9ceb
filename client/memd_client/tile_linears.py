"""Linear layers that compute in tiles: ranges of the rows of their weight, one after the other."""

from __future__ import annotations

import math
from itertools import repeat
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from memd_client.base.dynamo import untraced
from memd_client.base.sizes import format_size, parse_size
from memd_client.errors import InvalidArgument
from memd_client.parameters.gathered_tiles import GatheredTiles
from memd_client.parameters.tiles import is_in_memd, tiling_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def tile_linears(model: ModuleT, *, bytes_max: int | str) -> ModuleT:
    """From now on each `nn.Linear` of `model` whose weight is larger than `bytes_max` computes in
    tiles: ranges of its output features, whose rows of the weight take at most `bytes_max`. Returns
    the model.

    Call it before `offload`, or inside `init`: memd then has each tile as a shard of its own, which
    is leased, updated and streamed alone. The parameter stays one: in `named_parameters()`,
    `state_dict()`, `p.grad`, the optimizer's groups and state, checkpoints, and the norm that
    clipping takes. An operation on the whole parameter, or on its gradient, gets a copy of all of
    it in this process. `optimizer.clip_grad_norm_()` does so with one gradient at a time.

    The numbers are those of `torch.cat([linear(x, w, b) for w, b in tiles], -1)`, with memd and
    without it. They are not those of the layer as a whole: the gradient of its input is a sum over
    tiles, each rounded to the input's dtype.

    Args:
        model: not offloaded. Its code does not change.
        bytes_max: an int, or such as "64MiB". A tile is at least one row.

    Raises:
        InvalidArgument: a row is larger than `bytes_max`; a layer is offloaded already, or computes
            in a way of its own, as `nn.MultiheadAttention` does with its `out_proj`. No layer has
            changed.
    """
    limit_bytes = parse_size(bytes_max, name="bytes_max")
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and _is_above(layer, limit_bytes)
    ]
    for name, layer in layers:
        _refuse(name or type(layer).__name__, layer, limit_bytes)
    for _, layer in layers:
        layer.__class__ = TiledLinear
        assert isinstance(layer, TiledLinear)
        layer.compute_in_tiles(limit_bytes)
    return model


class TiledLinear(nn.Linear):
    """An `nn.Linear` that computes its output features a tile at a time: see `tile_linears`."""

    _tile_bytes_max: int

    def compute_in_tiles(self, bytes_max: int) -> None:
        """From now on, of at most `bytes_max`. Before `offload`."""
        self._tile_bytes_max = bytes_max

    @property
    def tile_heights(self) -> list[int]:
        """The rows of the weight in each tile: as few tiles as there may be, of equal height."""
        return _heights(self.weight, self._tile_bytes_max)

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of `nn.Linear`."""
        tiling = tiling_of(self.weight)
        weights: Sequence[torch.Tensor]
        if tiling is None:
            tile_heights = self.tile_heights
        else:
            tile_heights = [end - first for first, end in tiling.rows()]
        # Inside gather() the whole has the value, and what was changed of it.
        if tiling is None or isinstance(self.weight, GatheredTiles):
            weights = self.weight.split(tile_heights)
        else:
            weights = tiling.tiles
        bias: torch.Tensor | None = self.bias
        biases = repeat(None) if bias is None else bias.split(tile_heights)
        outputs = [
            functional.linear(input, weight, bias)
            for weight, bias in zip(weights, biases, strict=False)
        ]
        return torch.cat(outputs, dim=-1)

    def extra_repr(self) -> str:
        """As of `nn.Linear`, with the size of its tiles."""
        return f"{super().extra_repr()}, tiles of at most {format_size(self._tile_bytes_max)}"


def _heights(weight: torch.Tensor, bytes_max: int) -> list[int]:
    """The rows of each tile of `weight`."""
    row_count = weight.shape[0]
    rows_max = max(bytes_max // _row_bytes(weight), 1)
    tile_count = math.ceil(row_count / rows_max)
    height, larger_count = divmod(row_count, tile_count)
    return [height + (index < larger_count) for index in range(tile_count)]


def _row_bytes(weight: torch.Tensor) -> int:
    return weight.shape[1] * weight.dtype.itemsize


def _is_above(layer: nn.Linear, limit_bytes: int) -> bool:
    weight = layer.weight
    return (
        not is_lazy(weight)
        and weight.dtype.is_floating_point
        and weight.shape.numel() * weight.dtype.itemsize > limit_bytes
    )


def _refuse(name: str, layer: nn.Linear, limit_bytes: int) -> None:
    if is_in_memd(layer.weight):
        raise InvalidArgument(
            f"{name!r} is offloaded already, as one piece or in tiles; call tile_linears() before "
            "offload(), or inside init()"
        )
    if type(layer) not in (nn.Linear, TiledLinear):
        raise InvalidArgument(
            f"{name!r} is a {type(layer).__name__}, which computes in a way of its own and cannot "
            "be tiled from outside; make it an nn.Linear, or raise bytes_max above its "
            f"{format_size(layer.weight.nbytes)}"
        )
    if _row_bytes(layer.weight) > limit_bytes:
        raise InvalidArgument(
            f"a tile is at least one row of the weight, and bytes_max is less than a row of "
            f"{name!r}: {format_size(limit_bytes)} < {format_size(_row_bytes(layer.weight))}"
        )
