"""A state of tensors, in memory or mapped from a file, into a model: all of it or nothing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import call_user, defer_interrupts, safe_point
from memd_client.base.mapped_files import MappedFiles
from memd_client.checkpoints.checkpoint_files import listed
from memd_client.errors import InvalidArgument
from memd_client.parameters.away import ParameterBytes
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.loaded_places import replace_all
from memd_client.parameters.model_tensors import model_tensors, refuse_copies
from memd_client.parameters.tiles import TileBytes, entries_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memd_client.base.mapped_files import FileBytes
    from memd_client.core.job import Job
    from memd_client.parameters.model_tensors import ModelTensor
    from memd_client.session import Session

# They copy tensors into parameters and buffers; torch's norms complete states of before 2018.
_COPYING = tuple(kind._load_from_state_dict for kind in (nn.Module, _NormBase, _InstanceNorm))


@untraced
def load_tensors(
    model: nn.Module,
    tensors: Mapping[str, Any],
    session: Session,
    *,
    what: str,
    strict: bool = True,
) -> None:
    """As `model.load_state_dict(tensors)`, one tensor at a time, and durable: a transaction as that
    of `load_safetensors`. If the model loads in a way of its own, it is asked to, and copies what
    it accepts: an error may come half-way.

    Args:
        what: the call, for messages.

    Raises:
        InvalidArgument: names or shapes differ, and the message lists them; or as of
            `load_safetensors`. Nothing has changed.
        CapacityError, MemdError: as of `load_safetensors`.
    """
    defer_interrupts()
    session.transaction.job.settle_for(what)
    if loads_in_its_own_way(model):
        call_user(model.load_state_dict, tensors, strict=strict)
        return
    pairs = _matched(model_tensors(model), tensors, what=what, strict=strict)
    refuse_copies(model, [target for target, _ in pairs])
    job = session.transaction.job
    pairs = [(target, _apart(value, job)) for target, value in pairs]
    targets = [target for target, _ in pairs]
    with closing(MappedFiles()) as files:

        @torch.no_grad()
        def fill(index: int, into: torch.Tensor) -> None:
            safe_point()
            target, value = pairs[index]
            source = _in_file(value, target, files)
            if source is None or not source.read(into.numpy().data):
                into.view(target.dtype).view(target.shape).copy_(value)

        files.expect(
            (source, target.size_bytes)
            for target, value in pairs
            if (source := _in_file(value, target, files)) is not None
        )
        replace_all(targets, fill, transaction=session.transaction, what=what)


def _in_file(value: torch.Tensor, target: ModelTensor, files: MappedFiles) -> FileBytes | None:
    """The bytes of the target, if a file has them."""
    return files.find(value) if _lies_as_wanted(value, target) else None


def _apart(value: torch.Tensor, job: Job) -> torch.Tensor:
    """One that is in `job` may be replaced before it is read: a copy of it."""
    return value.detach().clone() if _is_in(value, job) else value


def _is_in(value: torch.Tensor, job: Job) -> bool:
    if not isinstance(value, LazyTensor):
        return any(entry.job is job for entry in entries_of(value))
    source = value.source
    if isinstance(source, ParameterBytes):
        return source.entry.job is job
    if isinstance(source, TileBytes):
        return source.tiling.transaction.job is job
    return True  # it may be


def _lies_as_wanted(value: torch.Tensor, target: ModelTensor) -> bool:
    """Whether memory has the elements as the target will."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.is_cpu
        and value.dtype == target.dtype
        and value.is_contiguous()
        and value.numel() > 0
    )


def loads_in_its_own_way(model: nn.Module) -> bool:
    """Whether `model.load_state_dict()` may do more than copy tensors: by itself, by hooks, or by a
    module in it."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict not in _COPYING
        or type(module).set_extra_state is not nn.Module.set_extra_state
        for module in model.modules()
    )


def _matched(
    targets: list[ModelTensor], tensors: Mapping[str, Any], *, what: str, strict: bool
) -> list[tuple[ModelTensor, torch.Tensor]]:
    """The value of each target."""
    pairs: list[tuple[ModelTensor, torch.Tensor]] = []
    missing: list[str] = []
    wrong: list[str] = []
    unexpected = dict(tensors)
    for target in targets:
        found = [unexpected.pop(name) for name in target.names if name in unexpected]
        if not found:
            missing.append(target.name)
            continue
        value = found[-1]  # as load_state_dict(), which copies one after the other
        if not isinstance(value, torch.Tensor) or value.shape != target.shape:
            form = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            wrong.append(f"{target.name!r} is {form} there and {list(target.shape)} in the model")
            continue
        pairs.append((target, value))
    texts = [listed(wrong)] if wrong else []
    if strict and missing:
        texts.append(f"missing there: {listed([repr(name) for name in missing])}")
    if strict and unexpected:
        texts.append(f"not in the model: {listed([repr(name) for name in unexpected])}")
    if texts:
        raise InvalidArgument(f"{what}: the state does not fit the model; {'; '.join(texts)}")
    return pairs
