"""A checkpoint from safetensors files into a model, a tensor at a time, all of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.checkpoints.checkpoint_files import CheckpointFiles, listed
from memd_client.errors import InvalidArgument
from memd_client.parameters.loaded_places import replace_all
from memd_client.parameters.model_tensors import model_tensors, refuse_copies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from memd_client.base.file_reads import FileRun
    from memd_client.checkpoints.checkpoint_files import Paths, StoredBytes
    from memd_client.parameters.model_tensors import ModelTensor
    from memd_client.session import Session

_PIECE_BYTES = 8 << 20


class LoadedKeys(NamedTuple):
    """As of torch's `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@untraced
def load_safetensors(
    model: nn.Module,
    paths: Paths,
    session: Session,
    *,
    strict: bool = True,
    convert: bool = False,
) -> LoadedKeys:
    """Replaces the parameters and persistent buffers of `model` by those of safetensors files, and
    makes them durable. They are read a tensor at a time, straight into the job's host memory.

    It is one transaction: after an error, or if anybody is killed, the job has the old values or,
    from the moment at which all are on disk, the new ones, and so has the model. Meanwhile nobody
    connects to the job, and what other threads put or write goes with a load that breaks off. No
    step is counted. Moments and update counts of optimizers stay as they are;
    `optimizer.reset_state()` forgets them. Gradients stay too. An element of a bfloat16 parameter
    whose bits do not change keeps its exact value.

    Args:
        model: offloaded to `session` or not. Its names are those of `state_dict()`; for a tied
            parameter any of them.
        paths: a file, an index such as `model.safetensors.index.json`, a folder with
            `model.safetensors` or that index, or a list of files.
        session: it has shared memory, and is the only one of its job.
        strict: the files have exactly the names of the model. False: others are left out, on either
            side.
        convert: floating-point tensors of another dtype become the model's, as with `to()`.

    Returns:
        The names that the files do not have, and those that the model does not have: both empty if
        `strict`.

    Raises:
        InvalidArgument: a file is missing, truncated, damaged or hostile; names, shapes or dtypes
            differ, and the message lists them; a parameter is in use or belongs to another job; a
            tensor of this process cannot be written, or is neither a parameter nor a buffer; a call
            between `step()` and `commit()`. Nothing has changed.
        NotYet: the daemon is older than this client. Nothing has changed.
        CapacityError: the job's disk quota does not hold the new values beside the old ones, as it
            has to until all are there. Nothing has changed.
        MemdError: nothing has changed; or the message says that this session may have some old
            values and some new ones. Then no step or commit is made in it, and the next one finds
            all old ones or all new ones. So does a KeyboardInterrupt, with a note that says so.
    """
    defer_interrupts()
    job = session.transaction.job
    job.settle_for("load_safetensors()")
    with CheckpointFiles(paths) as files:
        sources, keys = _matched(model_tensors(model), files, strict=strict, convert=convert)
        refuse_copies(model, [source.target for source in sources])
        sources = [part for source in sources for part in source.parts()]
        files.expect(source.run for source in sources)
        replace_all(
            [source.target for source in sources],
            lambda index, data: sources[index].read(data),
            transaction=session.transaction,
            what="load_safetensors()",
        )
    return keys


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the model, and the stored one that it gets."""

    target: ModelTensor
    stored: StoredBytes
    first_element: int = 0

    def parts(self) -> Iterator[_Source]:
        """One for each place of the target."""
        for part, first in zip(self.target.parts, self.target.part_firsts, strict=True):
            yield _Source(part, self.stored, first)

    @property
    def run(self) -> FileRun:
        """The bytes that `read` reads."""
        element_bytes = self.stored.tensor.dtype.itemsize
        count = self.target.size_bytes // self.target.dtype.itemsize
        return self.stored.run(self.first_element * element_bytes, count * element_bytes)

    def read(self, into: torch.Tensor) -> None:
        """Fills `into`, which has the bytes of the target."""
        safe_point()
        tensor = self.stored.tensor
        if tensor.dtype == self.target.dtype:
            self.stored.read(self.first_element * tensor.dtype.itemsize, into.numpy().data)
            return
        elements = into.view(self.target.dtype)
        count = _PIECE_BYTES // tensor.dtype.itemsize
        piece = torch.empty(min(count, elements.numel()), dtype=tensor.dtype)
        for first in range(0, elements.numel(), count):
            safe_point()
            part = piece[: elements.numel() - first]
            data = part.view(torch.uint8).numpy().data
            self.stored.read((self.first_element + first) * tensor.dtype.itemsize, data)
            elements[first : first + count].copy_(part)


def _matched(
    targets: Sequence[ModelTensor], files: CheckpointFiles, *, strict: bool, convert: bool
) -> tuple[list[_Source], LoadedKeys]:
    """The source of each target, and the names without a counterpart."""
    sources: list[_Source] = []
    missing: list[str] = []
    differences: list[str] = []
    unexpected = dict(files.tensors)
    for target in targets:
        stored = [unexpected.pop(name) for name in target.names if name in unexpected]
        if not stored:
            missing.append(target.name)
            continue
        differences += _differences(target, stored, convert=convert)
        sources.append(_Source(target, stored[0]))
    keys = LoadedKeys(missing, list(unexpected))
    wrong = [listed(differences)] if differences else []
    if strict and missing:
        wrong.append(f"missing there: {listed([repr(name) for name in missing])}")
    if strict and unexpected:
        wrong.append(f"not in the model: {listed([repr(name) for name in unexpected])}")
    if wrong:
        raise InvalidArgument(f"{files} does not fit the model; {'; '.join(wrong)}")
    # Last, since it reads the bytes.
    for source in sources:
        _refuse_untied(source.target, files)
    return sources, keys


def _differences(target: ModelTensor, stored: Sequence[StoredBytes], *, convert: bool) -> list[str]:
    wrong = []
    for each in stored:
        tensor = each.tensor
        can_convert = tensor.dtype.is_floating_point and target.dtype.is_floating_point
        if tensor.shape == target.shape and (
            tensor.dtype == target.dtype or (convert and can_convert)
        ):
            continue
        advice = ""
        if tensor.shape == target.shape:
            advice = " (convert=True converts it)" if can_convert else " (memd does not convert it)"
        wrong.append(
            f"{tensor.name!r} is {_form(tensor.dtype, tensor.shape)} there and "
            f"{_form(target.dtype, target.shape)} in the model{advice}"
        )
    return wrong


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _refuse_untied(target: ModelTensor, files: CheckpointFiles) -> None:
    """If the files have several names of a tied parameter, its bytes are the same under each."""
    first, *others = [files.tensors[name] for name in target.names if name in files.tensors]
    for other in others:
        if first.tensor.dtype != other.tensor.dtype or not _are_equal(first, other):
            raise InvalidArgument(
                f"{first.tensor.name!r} and {other.tensor.name!r} are one parameter in the model, "
                f"and differ in {other.file.path}; untie them in the model, or leave one out of "
                "the file"
            )


def _are_equal(one: StoredBytes, other: StoredBytes) -> bool:
    size_bytes = one.tensor.size_bytes
    for first in range(0, size_bytes, _PIECE_BYTES):
        safe_point()
        pieces = [bytearray(min(_PIECE_BYTES, size_bytes - first)) for _ in range(2)]
        for stored, piece in zip((one, other), pieces, strict=True):
            stored.read(first, memoryview(piece))
        if pieces[0] != pieces[1]:
            return False
    return True
