"""A model that `offload` brings to a device: what it needs there, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memd_client.base.sizes import format_size, parse_size
from memd_client.device.budget import DeviceBudget
from memd_client.device.device_leases import DeviceLeases
from memd_client.device.space import aligned
from memd_client.errors import CapacityError, InvalidArgument, NotYet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job

    # The parameters that a call of a module itself uses.
    OwnParameters = Callable[[nn.Module], Sequence[torch.Tensor]]


@dataclass(slots=True)
class ModelOnDevice:
    """Device memory that was taken for a model before anything of the model has changed."""

    _device: torch.device
    _leases: DeviceLeases
    # Module, name and the memory of each buffer.
    _buffers: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)

    @staticmethod
    def take(
        module: nn.Module,
        device: torch.device,
        device_bytes: int | str | None,
        own_parameters: OwnParameters,
        job: Job,
    ) -> ModelOnDevice:
        """Takes memory for the parameters, at most `device_bytes`, and for all buffers.

        Raises:
            InvalidArgument, CapacityError: the budget, or the device, is too small. Nothing has
                changed.
        """
        needed_bytes, largest = _needed(module, own_parameters)
        least_bytes = aligned(needed_bytes * 5 // 4)
        all_bytes = sum(map(_size_of, set(module.parameters())))
        wanted_bytes = None
        if device_bytes is not None:
            wanted_bytes = parse_size(device_bytes, name="device_bytes")
        if wanted_bytes is not None and wanted_bytes < least_bytes:
            raise InvalidArgument(
                f"job {job.name!r}: device_bytes is below what module {largest!r} needs on "
                f"{device}, with those around it and 25 % more; pass {least_bytes} or more, or "
                f"split the module: {format_size(wanted_bytes)} < {format_size(least_bytes)}"
            )
        # With more than all of them beside the largest module nothing has to give way.
        budget = DeviceBudget(
            device,
            least_bytes=least_bytes,
            most_bytes=all_bytes + least_bytes,
            chosen_bytes=None if wanted_bytes is None else aligned(wanted_bytes),
        )
        try:
            leases = DeviceLeases(
                job.unordered_leases,
                device,
                job=job.name,
                budget=budget,
                needed_bytes=needed_bytes,
            )
            return ModelOnDevice(device, leases, _buffers_on(module, device))
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"job {job.name!r}: {device} has no room for {format_size(budget.size_bytes)} of "
                "parameters and the buffers; pass less device_bytes, or free memory there (at "
                f"least {format_size(least_bytes)} is needed): {error}"
            ) from error

    @property
    def device(self) -> torch.device:
        return self._device

    def use(self, shards: Sequence[Shard], job: Job) -> None:
        """From now on these parameters and the buffers are there."""
        self._leases.add(shards)
        job.unordered_leases.devices.use(self._leases, self._leases, shards)
        with torch.no_grad():
            for module, name, there in self._buffers:
                buffer = module._buffers[name]
                if buffer is not None:
                    there.copy_(buffer)
                    module._buffers[name] = there
        self._buffers.clear()


def usable_device(device: torch.device | str) -> torch.device | None:
    """The accelerator that `device` names, with its index; None for the CPU.

    Raises:
        InvalidArgument: it is not there.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(
            f'device is "cpu" or an accelerator of this machine, such as "cuda": {device!r}'
        ) from error
    if wanted.type == "cpu":
        return None
    if not torch.accelerator.is_available():
        raise InvalidArgument(f"device {str(wanted)!r} is not there: torch finds no accelerator")
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != wanted.type:
        raise InvalidArgument(
            f"device {str(wanted)!r} is not there: torch finds {str(found)!r} on this machine"
        )
    count = torch.accelerator.device_count()
    given: int | None = wanted.index  # torch's stub has no None
    index = torch.accelerator.current_device_index() if given is None else given
    if index >= count:
        raise InvalidArgument(
            f"device {str(wanted)!r} is not there: torch finds {count}, of which the last is "
            f"{wanted.type}:{count - 1}"
        )
    if wanted.type == "mps":
        raise NotYet("devices without streams come in a later version: device='mps'")
    return torch.device(wanted.type, index)


def _size_of(parameter: torch.Tensor) -> int:
    return aligned(parameter.numel() * parameter.element_size())


def _needed(module: nn.Module, own_parameters: OwnParameters) -> tuple[int, str]:
    """The most that a module needs, with those around it, which have theirs in place meanwhile; and
    the module's name."""
    own = {
        name: [*own_parameters(child), *_in_evaluation(child, own_parameters)]
        for name, child in module.named_modules()
    }
    most, largest = 0, type(module).__name__
    for name in own:
        used = {id(each): each for each in own[name]}
        around = name
        while around:
            around = around.rpartition(".")[0]
            used.update((id(each), each) for each in own[around])
        size_bytes = sum(map(_size_of, used.values()))
        if size_bytes > most:
            most, largest = size_bytes, name or largest
    return most, largest


def _in_evaluation(module: nn.Module, own_parameters: OwnParameters) -> Sequence[torch.Tensor]:
    """A module may use more then."""
    was_training, module.training = module.training, False
    try:
        return own_parameters(module)
    finally:
        module.training = was_training


def _buffers_on(
    module: nn.Module, device: torch.device
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    made: dict[int, torch.Tensor] = {}
    found = []
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device=device)
            found.append((child, name, made[id(buffer)]))
    return found
