"""A checkpoint from safetensors files into a model, a tensor at a time, all of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, NamedTuple

import torch

from memd_client.buffers import ModuleBuffers
from memd_client.checkpoint_files import CheckpointFiles, listed
from memd_client.dynamo import untraced
from memd_client.errors import InvalidArgument, MemdError, retold
from memd_client.interrupts import defer_interrupts, safe_point
from memd_client.job_store import JobStore
from memd_client.model_tensors import model_tensors, refuse_copies
from memd_client.overlaps import overlaps_itself
from memd_client.staged_values import StagedValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memd_client.checkpoint_files import Paths, StoredBytes
    from memd_client.job import Job
    from memd_client.model_tensors import ModelTensor
    from memd_client.session import Session
    from memd_client.shard import Shard
    from memd_client.staged_values import StagedValue, Taking

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
    from the moment at which all are in memd, the new ones, and so has the model. No step is
    counted. Moments and update counts of optimizers stay as they are; `optimizer.reset_state()`
    forgets them. Gradients stay too. An element of a bfloat16 parameter whose bits do not change
    keeps its exact value.

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
        CapacityError: the job's disk quota does not hold the new values beside the old ones, as it
            has to until all are there. Nothing has changed.
        MemdError: nothing has changed; or the message says that the new values may count and are
            not all in place. Then the next session of the job puts them there, and no step or
            commit is made before. So does a KeyboardInterrupt, with a note that says so.
    """
    defer_interrupts()
    job = session.transaction.job
    job.settle_for("load_safetensors()")
    with CheckpointFiles(paths) as files:
        sources, keys = _matched(model_tensors(model), files, strict=strict, convert=convert)
        refuse_copies(model, [source.target for source in sources])
        _refuse_unwritable([source.target for source in sources])
        places = _Places(session, [source.target for source in sources])
        stored = [source for source in sources if source.target.size_bytes]
        store = JobStore(
            job=job.name,
            session_id=job.session_id,
            control=job.control,
            shards=job.shards,
            leases=job.leases,
        )
        staged = StagedValues(store, job.steps)

        def take(value: StagedValue, shard: Shard | None, data: torch.Tensor) -> None:
            places.take(value, shard, data, staged)

        with staged.turn(take):
            staged.refuse_company()
            values = staged.stage(
                [(places.shard_id(source.target), source.target.stored_bytes) for source in stored],
                lambda index, data: stored[index].read(data),
            )
            places.expect(values, [source.target for source in stored])
            staged.refuse_company()  # who came meanwhile; who comes later waits for the turn
            _put_in_place(values, take, staged, session)
    return keys


def _put_in_place(
    values: Sequence[StagedValue], take: Taking, staged: StagedValues, session: Session
) -> None:
    """The values count, and go where they belong. If that breaks off, the next session may put them
    over what this one would train, so it makes no step any more."""
    count = False
    try:
        staged.commit(values)
        count = True
        staged.settle(take)
    except BaseException as error:
        clear_frames(error.__traceback__)  # a lease of the plan ends
        if not count and not staged.may_count():
            raise
        unfinished = _Unfinished(session.job)
        session.transaction.watch(unfinished)
        if isinstance(error, MemdError):
            raise retold(error, f"{unfinished}: {error}") from error
        if isinstance(error, Exception):
            raise MemdError(f"{unfinished}: {error!r}") from error
        error.add_note(str(unfinished))
        raise


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the model, and the stored one that it gets."""

    target: ModelTensor
    stored: StoredBytes

    def read(self, into: torch.Tensor) -> None:
        """Fills `into`, which has the bytes of the target and maybe one more."""
        safe_point()
        wanted, tensor = self.target, self.stored.tensor
        whole = into[: wanted.size_bytes]
        into[wanted.size_bytes :].zero_()
        if tensor.dtype == wanted.dtype:
            self.stored.read(0, whole.numpy().data)
            return
        elements = whole.view(wanted.dtype)
        count = _PIECE_BYTES // tensor.dtype.itemsize
        piece = torch.empty(min(count, elements.numel()), dtype=tensor.dtype)
        for first in range(0, elements.numel(), count):
            safe_point()
            part = piece[: elements.numel() - first]
            data = part.view(torch.uint8).numpy().data
            self.stored.read(first * tensor.dtype.itemsize, data)
            elements[first : first + count].copy_(part)


class _Places:
    """The places of the values of one load: shards of the job, and tensors of this process."""

    def __init__(self, session: Session, targets: Sequence[ModelTensor]) -> None:
        """
        Raises:
            InvalidArgument, MemdError: a parameter belongs to another job, or is in use.
        """
        self._job: Job = session.transaction.job
        living = {id(each.parameter): each for each in self._job.shards.parameters}
        buffers = [
            each for each in session.transaction.contributors if isinstance(each, ModuleBuffers)
        ]
        self._shards: dict[int, Shard] = {}  # by id of the tensor, which `targets` refer to
        self._by_shard: dict[int, ModelTensor] = {}
        self._by_name: dict[str, ModelTensor] = {}  # of the staged value
        for target in targets:
            shard = self._shard_of(target, buffers)
            known = living.get(id(target.tensor))
            if shard is None and known is not None:
                shard = known.shard
            if shard is not None:
                self._shards[id(target.tensor)] = shard
                self._by_shard[shard.shard_id] = target

    def shard_id(self, target: ModelTensor) -> int | None:
        shard = self._shards.get(id(target.tensor))
        return shard.shard_id if shard is not None else None

    def expect(self, values: Sequence[StagedValue], targets: Sequence[ModelTensor]) -> None:
        """Tensors of this process alone are found by the staged value that is theirs."""
        self._by_name = {value.name: target for value, target in zip(values, targets, strict=True)}

    def take(
        self, value: StagedValue, shard: Shard | None, data: torch.Tensor, staged: StagedValues
    ) -> None:
        """Puts `data` in its place. Another load may have staged it, in another process."""
        if shard is None:
            target = self._by_name.get(value.name)
        else:
            target = self._by_shard.get(shard.shard_id)
        entry = target.entry if target is not None else None
        if shard is not None and entry is None:
            staged.overwrite(shard, data)
        if target is None:
            return
        new = data[: target.size_bytes].view(target.dtype).view(target.shape)
        if entry is not None:
            entry.residency.write(new)
        else:
            with torch.no_grad():
                target.tensor.copy_(new)

    def _shard_of(self, target: ModelTensor, buffers: Sequence[ModuleBuffers]) -> Shard | None:
        entry = target.entry
        if entry is None:
            found = (each.shard_of(target.tensor) for each in buffers)
            return next(filter(None, found), None)
        if entry.job is not self._job:
            raise InvalidArgument(
                f"parameter {entry.shard.name!r} belongs to job {entry.job.name!r} and another "
                f"session; load with the session that it was offloaded to, not job "
                f"{self._job.name!r}"
            )
        entry.residency.refuse_if_in_use("load_safetensors()")
        return entry.shard


class _Unfinished:
    """A load whose values may count, and are not all in place in this process."""

    def __init__(self, job: str) -> None:
        self._job = job

    def __str__(self) -> str:
        return (
            f"job {self._job!r}: a load broke off when its values were in memd, and not all in "
            "place; close this session and connect again, which finishes or forgets them"
        )

    def refuse_replaced(self) -> None:
        """Before a step, which would use some old values and some new ones."""
        raise MemdError(str(self))


def _refuse_unwritable(targets: Sequence[ModelTensor]) -> None:
    """Before anything is staged: torch would refuse the copy when the values count already."""
    for target in targets:
        tensor = target.tensor
        if target.entry is not None:
            continue
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidArgument(
                f"{target.name!r} was made in torch.inference_mode() and cannot be written outside "
                "of it; give the model a clone()"
            )
        if overlaps_itself(tensor):
            raise InvalidArgument(
                f"elements of {target.name!r} share memory, as those of expand() do, so it cannot "
                "be written; give the model a clone()"
            )


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
