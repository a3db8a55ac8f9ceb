"""The base of memd's classes of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch


class StoredParameter(nn.Parameter):
    """A parameter whose bytes are in memd, or leased from there. Nobody makes one: a parameter gets
    a class of these, and loses it."""

    def __new__(  # type: ignore[misc] # torch's stub has no type for it
        cls, data: torch.Tensor | None = None, requires_grad: bool = True
    ) -> nn.Parameter:
        """`type(parameter)(data)` makes an ordinary one, as it does of an `nn.Parameter`."""
        return nn.Parameter(data, requires_grad)  # type: ignore[arg-type] # its None is torch's too
