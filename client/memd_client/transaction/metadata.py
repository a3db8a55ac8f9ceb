"""Questions about a tensor that its shape, dtype and device answer, without its bytes."""

from __future__ import annotations

from typing import Any

import torch

_FUNCTIONS: frozenset[Any] = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_signed,
        torch.Tensor.is_pinned,
        torch.Tensor.get_device,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.__hash__,
        torch.Tensor.__len__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
_ATTRIBUTES = frozenset(
    (
        *("shape", "dtype", "device", "layout", "names", "ndim", "itemsize", "nbytes", "name"),
        *("requires_grad", "is_leaf", "grad_fn", "_grad_fn", "output_nr", "retains_grad", "_base"),
        *("grad_dtype", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia"),
        *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla"),
        *("is_xpu", "_has_symbolic_sizes_strides", "_python_dispatch"),
    )
)


def attribute_of(func: Any) -> str:
    """The attribute that `func`, as `__torch_function__` gets it, reads or sets: `parameter.shape`
    arrives as the `__get__` of an attribute named shape. Empty if it is no such function."""
    if getattr(func, "__name__", "") in {"__get__", "__set__"}:
        return getattr(getattr(func, "__self__", None), "__name__", "")
    return ""


def asks_for_metadata(func: Any) -> bool:
    """Whether the answer of `func`, as `__torch_function__` gets it, depends on no bytes."""
    return func in _FUNCTIONS or (
        getattr(func, "__name__", "") == "__get__" and attribute_of(func) in _ATTRIBUTES
    )
