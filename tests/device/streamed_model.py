"""A model whose parameters are on the device only while somebody uses them: hooks, side streams,
and gradients that leave during backward. Six waits make it right; each can be left out.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.device.simulation import SIM

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITS = (
    "copy over before its lease ends",
    "copy before use",
    "use before the parameter's memory is free",
    "gradient before its copy",
    "copy before the gradient's memory is free",
    "copy before the host reads",
)


@dataclass(slots=True)
class Lease:
    """Pinned memory that parameters pass through in turn."""

    host: Tensor
    copied: torch.Event | None = None


class StreamedModel:
    """Keeps the values of a model's parameters on the host; `forgotten` is one of its waits."""

    def __init__(self, model: nn.Module, forgotten: str = "") -> None:
        self._forgotten = forgotten
        self._copies_in, self._copies_out = (torch.Stream(device="sim") for _ in range(2))
        self._values: dict[Tensor, Tensor] = {}
        self._owners: dict[int, Tensor] = {}  # address of what is on the device → its parameter
        self._gradients: dict[Tensor, tuple[Tensor, torch.Event]] = {}
        self._saving: dict[nn.Module, saved_tensors_hooks] = {}
        for module in model.modules():
            self._take_over(module)
        largest = max(value.numel() for value in self._values.values())
        self._leases = [Lease(torch.empty(largest).pin_memory()) for _ in range(2)]

    @property
    def resident_count(self) -> int:
        return len(self._owners)

    def gradients(self) -> Iterator[Tensor]:
        """Those of the last backward, in the order of the parameters, on the host."""
        for host, copied in (self._gradients[parameter] for parameter in self._values):
            if self._forgotten != "copy before the host reads":
                copied.synchronize()
            SIM.host_touches(host, writes=False)
            yield host

    def _take_over(self, module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            away = nn.Parameter(_hole(parameter))
            self._values[away] = parameter.detach().clone()
            away.register_post_accumulate_grad_hook(self._take_gradient)
            setattr(module, name, away)
        module.register_forward_pre_hook(self._enter)
        # A use that races raises. What torch calls for what autograd saves must not stay then.
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        saving = saved_tensors_hooks(self._pack, self._unpack)
        saving.__enter__()
        self._saving[module] = saving
        for parameter in module.parameters(recurse=False):
            parameter.data = self._bring(parameter)

    def _leave(self, module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = _hole(parameter)
        self._saving.pop(module).__exit__(None, None, None)

    def _bring(self, parameter: Tensor) -> Tensor:
        """The parameter's values on the device, for the current stream."""
        lease = self._next_lease()
        values = self._values[parameter]
        host = lease.host[: values.numel()].view(values.shape).copy_(values)
        user, lease.copied = torch.accelerator.current_stream(), torch.Event(device="sim")
        with self._copies_in:
            there = host.to("sim", non_blocking=True)
            lease.copied.record(self._copies_in)
        if self._forgotten != "copy before use":
            user.wait_event(lease.copied)
        if self._forgotten != "use before the parameter's memory is free":
            there.record_stream(user)
        storage = there.untyped_storage()
        self._owners[storage.data_ptr()] = parameter
        weakref.finalize(storage, self._owners.pop, storage.data_ptr(), None)
        return there

    def _next_lease(self) -> Lease:
        lease = self._leases.pop(0)
        self._leases.append(lease)
        if lease.copied is not None and self._forgotten != "copy over before its lease ends":
            lease.copied.synchronize()
        SIM.host_touches(lease.host, writes=True)
        return lease

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        parameter = self._owners.get(tensor.untyped_storage().data_ptr())
        if parameter is None:
            return (tensor.detach(),)
        return parameter, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: tuple[Any, ...]) -> Tensor:
        saved, *geometry = packed
        return self._bring(saved).as_strided(*geometry) if geometry else saved

    def _take_gradient(self, parameter: Tensor) -> None:
        """Starts the gradient's way to the host."""
        gradient = parameter.grad
        assert gradient is not None
        computed, copied = torch.Event(device="sim"), torch.Event(device="sim")
        computed.record()
        host = torch.empty(parameter.shape).pin_memory()
        if self._forgotten != "gradient before its copy":
            self._copies_out.wait_event(computed)
        with self._copies_out:
            host.copy_(gradient, non_blocking=True)
            copied.record(self._copies_out)
        if self._forgotten != "copy before the gradient's memory is free":
            gradient.record_stream(self._copies_out)
        parameter.grad = None
        self._gradients[parameter] = host, copied


def _hole(like: Tensor) -> Tensor:
    return torch.full((1,), float("nan"), device="sim").expand(like.shape)
