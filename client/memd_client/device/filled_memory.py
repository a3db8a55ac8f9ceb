"""Memory of a device that memd fills on the stream of one use, and that others may use."""

from __future__ import annotations

import torch


def filling_stream(tensor: torch.Tensor) -> torch.Stream | None:
    """The stream on which `tensor` is filled now; None in host memory, which has none."""
    return None if tensor.is_cpu else torch.accelerator.current_stream(tensor.device)


def join_stream(tensor: torch.Tensor, filled_on: torch.Stream) -> None:
    """The current stream will use `tensor`, and its memory may be freed when that is queued."""
    user = torch.accelerator.current_stream(tensor.device)
    if user != filled_on:
        user.wait_stream(filled_on)
        tensor.record_stream(user)
