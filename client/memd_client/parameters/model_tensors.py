"""The tensors of a model under the names that `state_dict()` gives them, without their bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.errors import InvalidArgument, NotResident, NotYet
from memd_client.parameters.parameter import streamed
from memd_client.parameters.tiles import entries_of, is_in_memd, tiling_of
from memd_client.parameters.unnamed import unnamed
from memd_client.parameters.whole_values import WholeValue, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from torch import nn

    from memd_client.parameters.parameter import StreamedParameter

# As DTensor is. torch's type for it would make mypy take the rest for unreachable.
_is_made_of_others: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass


@dataclass(slots=True)
class ModelTensor:
    """A parameter or buffer; offloaded or not."""

    tensor: torch.Tensor
    # As state_dict() orders them. A tied parameter has several.
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in a file: the first."""
        return self.names[0]

    @property
    def entry(self) -> StreamedParameter | None:
        """If it is offloaded as one shard."""
        return streamed(self.tensor)

    @property
    def whole(self) -> WholeValue | None:
        """If `tensor` is a shard of it."""
        return whole_of(self.tensor)

    @property
    def entries(self) -> list[StreamedParameter]:
        """If it is offloaded, as one shard or as several."""
        return entries_of(self.tensor)

    @property
    def parts(self) -> list[ModelTensor]:
        """The parts that are in one place each: itself, or its tiles, one below the other."""
        tiling = tiling_of(self.tensor)
        return [self] if tiling is None else [ModelTensor(t, self.names) for t in tiling.tiles]

    @property
    def part_firsts(self) -> list[int]:
        """The number of the first element of each part, in row-major order."""
        counts = [part.shape.numel() for part in self.parts]
        return [0, *itertools.accumulate(counts)][: len(counts)]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.dtype.itemsize


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """All of `model.state_dict()`, each tensor once.

    Raises:
        InvalidArgument, NotResident: the state has something that is no dense tensor with bytes.
    """
    found: dict[Hashable, ModelTensor] = {}
    # With keep_vars it has the parameters themselves: no byte moves.
    for name, tensor in model.state_dict(keep_vars=True).items():
        _refuse(name, tensor)
        found.setdefault(_identity(tensor), ModelTensor(tensor)).names.append(name)
    return list(found.values())


def refuse_copies(model: nn.Module, tensors: Iterable[ModelTensor]) -> None:
    """Before `tensors` of the state of `model` get values. What only shares the bytes of a
    parameter or buffer is replaced by it.

    Raises:
        InvalidArgument: one is neither: the model would not see its new values.
    """
    own = {
        _identity(each): each
        for each in itertools.chain(model.parameters(), model.buffers())
        if each.layout is torch.strided
    }
    known = {id(each) for each in own.values()}
    for tensor in tensors:
        if tensor.whole is not None:
            raise NotYet(
                f"{tensor.name!r} is in shards of fully_shard(), which a load does not reach in "
                "this version; load the model before fully_shard(), or the job's values win"
            )
        if not tensor.size_bytes or id(tensor.tensor) in known:
            continue
        found = own.get(_identity(tensor.tensor))
        if found is None:
            raise InvalidArgument(
                f"{tensor.name!r} in state_dict() is neither a parameter nor a buffer of the "
                "model, but a copy, such as get_extra_state() and state_dict hooks give, so a "
                "load would not reach the model; leave it out of the files, pass strict=False, "
                "and give it to the model yourself"
            )
        tensor.tensor = found


def _refuse(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(
            f"state_dict() has {name!r}, a {type(tensor).__name__}; safetensors files hold tensors "
            "alone, so keep it elsewhere, such as in session.track()"
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"safetensors files hold dense tensors: {name!r} is {tensor.layout}")
    if tensor.device.type == "meta":
        raise NotResident(f"{name!r} has no bytes: it is on device meta")
    if _is_made_of_others(tensor) and whole_of(tensor) is None:
        raise InvalidArgument(
            f"{name!r} is a {type(tensor.data).__name__}, of which this process may have a part, "
            "and no optimizer of memd has it whole; give the model's parameters to one first"
        )


def _identity(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors of the same memory in the same form, as those of tied parameters."""
    if _is_made_of_others(tensor):
        return id(tensor)  # it has no memory of its own
    # Memory of those that come and go has several, one after the other.
    if is_in_memd(tensor) or unnamed(tensor) is not None or not tensor.numel():
        return id(tensor)
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
