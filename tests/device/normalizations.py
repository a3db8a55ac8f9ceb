"""Meta kernels of normalizations, whose statistics have the shape and dtype of the CPU's.

torch's own promise a GPU's: float32 for bfloat16, and some where batch norm in evaluation has none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def install() -> None:
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("native_layer_norm", _layer_norm, allow_override=True)
    library.impl("native_batch_norm", _batch_norm, allow_override=True)
    _INSTALLED.append(library)


_INSTALLED: list[torch.library.Library] = []  # a library that is freed takes its kernels along


def _layer_norm(
    x: Tensor, normalized: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    del eps
    kept = x.shape[: x.dim() - len(normalized)]
    shape = (*kept, *(1 for _ in normalized))
    mean = x.new_empty(shape, dtype=_dtype(x, weight, bias))
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, mean.clone()


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    is_training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del momentum, eps
    dtype = _dtype(x, weight, bias, running_mean, running_var)
    mean = x.new_empty(x.shape[1] if is_training else 0, dtype=dtype)
    return torch.empty_like(x), mean, mean.clone()


def _dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """That of the statistics: parameters of another dtype than `x` are float32."""
    dtypes = {each.dtype for each in parameters if each is not None}
    return dtypes.pop() if len(dtypes) == 1 else x.dtype
