"""The state of an optimizer in safetensors files, streamed: those that `memd snapshot export`
writes beside the weights, and a file of one's own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memd_client.base.dynamo import untraced
from memd_client.base.freed_memory import passing_bytes
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.checkpoints.checkpoint_files import CheckpointFiles, listed, os_errors
from memd_client.checkpoints.safetensors_header import encode_header
from memd_client.checkpoints.snapshot_tensor import master_beside
from memd_client.checkpoints.torch_archive import Passing
from memd_client.checkpoints.whole_file import WholeFile, sync_folder
from memd_client.connection.shard import MASTER, MAXIMUM, MOMENTS
from memd_client.errors import InvalidArgument, NotYet
from memd_client.parameters.loaded_places import replace_all
from memd_client.parameters.parameter import streamed
from memd_client.parameters.tiles import entries_of, tiling_of
from memd_client.transaction.adam_settings import refuse_older_daemon
from memd_client.transaction.loaded_moments import (
    FittingMaster,
    LoadedMoments,
    moment_reads,
    update_count_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memd_client.base.file_reads import FileRun
    from memd_client.checkpoints.checkpoint_files import Paths, StoredBytes
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.optimizer import Adam
    from memd_client.transaction.loaded_moments import MomentBytes
    from memd_client.transaction.transaction import Transaction

_STEP = "step"
_NEEDED = (_STEP, *(name for name in MOMENTS if name != MAXIMUM))
_METADATA = {"format": "pt"}


@untraced
def load_optimizer_safetensors(
    optimizer: Adam, paths: Paths, *, strict: bool = True, masters: bool = True
) -> None:
    """Replaces the moments of memd's `optimizer`, and its numbers of updates, by those of
    safetensors files: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step` and, with amsgrad,
    `NAME.max_exp_avg_sq`, where NAME is a parameter's in its model. `NAME.master` has the fp32
    values of a bfloat16 parameter, from which its training goes on: load the weights before.
    `memd snapshot export` writes these as `optimizer.safetensors`. Settings of groups stay.

    It is one transaction, as `optimizer.load_state_dict()`: all of it or nothing, durable when it
    returns. The moments of one parameter are in this process at a time.

    Args:
        paths: a file, an index such as `optimizer.safetensors.index.json`, or a list of files.
        strict: the files have a state of exactly the optimizer's parameters. False: others are left
            out, on either side.
        masters: False leaves out fp32 values: training goes on from the bfloat16 values.

    Raises:
        InvalidArgument: a file is missing, truncated, damaged or hostile; names, shapes or dtypes
            differ, and the message lists them; maxima without `amsgrad`, or the other way round;
            fp32 values of other bfloat16 values than a parameter has; a parameter that is not in
            memd; other sessions have the job; a call between `step()` and `commit()`. Nothing has
            changed.
        NotYet: the daemon is older than fp32 values in files. Nothing has changed.
        CapacityError: the job's disk quota does not hold the new moments beside the old ones.
            Nothing has changed.
        MemdError: as of `load_state_dict()`.
    """
    defer_interrupts()
    parameters = _parameters(optimizer)
    transaction = _transaction(parameters)
    transaction.job.settle_for("load_optimizer_safetensors()")
    with CheckpointFiles(paths) as files:
        states = _states(files, masters=masters)
        _refuse_others(parameters, states, files, strict=strict)
        leases = transaction.job.store.leases
        assert leases is not None  # of a job that trains
        loaded = [
            _loaded(each.shard, states[each.shard.name], leases)
            for each in parameters
            if each.shard.name in states
        ]
        if any(each.has_maximum for each in loaded):
            refuse_older_daemon("amsgrad", transaction.job)
        if any(each.has_master for each in loaded) and not transaction.job.store.can_take_masters:
            raise NotYet(
                f"job {transaction.job.name!r}: the daemon is older than this client and takes no "
                f"fp32 values of bfloat16 parameters, which {files} has; update it, or pass "
                "masters=False to go on from the bfloat16 values"
            )
        files.expect(
            _FileMoment(states[each.shard.name][name]).run(first, count)
            for each, name, first, count in moment_reads(loaded)
        )
        replace_all(
            [],
            _nothing,
            moments=loaded,
            transaction=transaction,
            what="load_optimizer_safetensors()",
        )


@untraced
def save_optimizer_safetensors(
    optimizer: Adam,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    masters: bool = True,
) -> None:
    """Writes the moments of memd's `optimizer`, its numbers of updates, and the fp32 values of
    bfloat16 parameters to one safetensors file, as `load_optimizer_safetensors` takes them. With
    the weights of the same step, training goes on from it with the same bits. They are read from
    memd a parameter at a time. Parameters without an update have none. Others see the old file or
    the new one, whole.

    Args:
        path: its folder exists.
        metadata: strings for the header; {"format": "pt"} unless given.
        masters: False leaves out fp32 values: training from the file goes on from the bfloat16
            values.

    Raises:
        InvalidArgument: the path cannot be written; a name that such files do not have; a parameter
            that is not in memd; a call between `step()` and `commit()`, or, with fp32 values,
            within `gather(write=True)`.
        NotYet: the daemon is older than fp32 values in files.
        CapacityError: the disk is full; the message has the bytes needed.
        DeviceError: a write failed. After any error what was there before is as it was.
    """
    defer_interrupts()
    parameters = _parameters(optimizer)
    job = _transaction(parameters).job
    job.settle_for("save_optimizer_safetensors()")
    if masters and not job.store.can_give_masters:
        _refuse_masters(parameters, job.name)
    tensors = dict(_named_states(optimizer, parameters, masters=masters))
    place = Path(os.path.realpath(path))
    prefix, header = encode_header(
        ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()),
        _METADATA if metadata is None else metadata,
    )
    with passing_bytes() as passing, ExitStack() as opened, os_errors(place):
        file = opened.enter_context(WholeFile(place, header.file_bytes))
        file.write(prefix)
        held = Passing("save_optimizer_safetensors()", with_masters=masters)
        for stored in header.tensors:
            safe_point()
            value = held.ordinary(tensors[stored.name]).contiguous().view(-1)
            file.write(value.view(torch.uint8).numpy().data)
            passing.passed(value.nbytes)
            del value
        file.finish()
        file.place()
        sync_folder(place.parent)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One of the optimizer's, and whether its group has amsgrad."""

    shard: Shard
    transaction: Transaction
    amsgrad: bool


def _parameters(optimizer: Adam) -> list[_Parameter]:
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            tiling, entry = tiling_of(parameter), streamed(parameter)
            entries = entries_of(parameter)
            if not entries:
                raise InvalidArgument(
                    f"parameter {place} of group {number} is not in memd, and has no name; offload "
                    "its model, or use load_state_dict()"
                )
            assert tiling is not None or entry is not None
            shard = tiling.shard if tiling is not None else entries[0].shard
            found.append(_Parameter(shard, entries[0].transaction, bool(group["amsgrad"])))
    return found


def _transaction(parameters: Sequence[_Parameter]) -> Transaction:
    transactions = list(dict.fromkeys(each.transaction for each in parameters))
    if len(transactions) != 1:
        raise InvalidArgument(
            f"the optimizer's parameters are of {len(transactions)} sessions, and files are loaded "
            "into one"
        )
    return transactions[0]


def _states(files: CheckpointFiles, *, masters: bool) -> dict[str, dict[str, StoredBytes]]:
    """By the names of parameters, and by their own."""
    states: dict[str, dict[str, StoredBytes]] = {}
    for name, stored in files.tensors.items():
        parameter, _, each = name.rpartition(".")
        state = states.setdefault(parameter, {})
        if masters or each != MASTER:
            state[each] = stored
    return states


def _refuse_others(
    parameters: Sequence[_Parameter],
    states: Mapping[str, Mapping[str, StoredBytes]],
    files: CheckpointFiles,
    *,
    strict: bool,
) -> None:
    """Before a byte changes."""
    names = {each.shard.name for each in parameters}
    wrong = [
        difference
        for each in parameters
        if each.shard.name in states
        for difference in _differences(each, states[each.shard.name])
    ]
    texts = [listed(wrong)] if wrong else []
    missing = [repr(name) for name in names if name not in states]
    unexpected = [repr(name) for name in states if name not in names]
    if strict and missing:
        texts.append(f"missing there: {listed(sorted(missing))}")
    if strict and unexpected:
        texts.append(f"not in the optimizer: {listed(sorted(unexpected))}")
    if texts:
        raise InvalidArgument(f"{files} does not fit the optimizer; {'; '.join(texts)}")


def _differences(parameter: _Parameter, state: Mapping[str, StoredBytes]) -> Iterator[str]:
    name, shape = parameter.shard.name, parameter.shard.shape
    lacking = [each for each in _NEEDED if each not in state]
    if lacking:
        yield f"{name!r} has no {' and no '.join(lacking)} there"
    for each in sorted(state.keys() - {*_NEEDED, MAXIMUM, MASTER}):
        yield f"{f'{name}.{each}'!r} is nothing that Adam has"
    if MASTER in state and parameter.shard.dtype != torch.bfloat16:
        yield (
            f"{f'{name}.{MASTER}'!r} has the fp32 values of a bfloat16 parameter, and that of the "
            "job is float32; pass masters=False to leave them out"
        )
    for each in (*MOMENTS, MASTER):
        if each not in state:
            continue
        tensor = state[each].tensor
        if tensor.dtype != torch.float32 or tensor.shape != shape:
            yield (
                f"{tensor.name!r} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)} there and float32 {list(shape)} in the job"
            )
    if _STEP in state and state[_STEP].tensor.shape.numel() != 1:
        yield f"{f'{name}.step'!r} has {state[_STEP].tensor.shape.numel()} numbers"
    if (MAXIMUM in state) != parameter.amsgrad and not lacking:
        has = "has" if MAXIMUM in state else "has no"
        yield f"{name!r} {has} maximum there, and its group has amsgrad={parameter.amsgrad}"


def _loaded(shard: Shard, state: Mapping[str, StoredBytes], leases: Leases) -> LoadedMoments:
    step = _tensor(state[_STEP])
    return LoadedMoments(
        shard=shard,
        update_count=update_count_of(step.view(()), name=shard.name),
        has_maximum=MAXIMUM in state,
        has_master=MASTER in state,
        read=partial(_in_files, state, shard, leases),
    )


@dataclass(frozen=True, slots=True)
class _FileMoment:
    """A moment, or fp32 values, in a file. `MomentBytes`."""

    stored: StoredBytes

    def run(self, element_first: int, element_count: int) -> FileRun:
        """The bytes that a read of so many elements reads."""
        size = self.stored.tensor.dtype.itemsize
        return self.stored.run(element_first * size, element_count * size)

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`."""
        begin = element_first * self.stored.tensor.dtype.itemsize
        self.stored.read(begin, into.view(torch.uint8).numpy().data)


def _in_files(
    state: Mapping[str, StoredBytes], shard: Shard, leases: Leases
) -> dict[str, MomentBytes]:
    found: dict[str, MomentBytes] = {name: _FileMoment(each) for name, each in state.items()}
    if MASTER in found:
        advice = "load the weights that belong to them first, or pass masters=False"
        found[MASTER] = FittingMaster(found[MASTER], shard, leases, advice=advice)
    return found


def _tensor(stored: StoredBytes) -> torch.Tensor:
    tensor = torch.empty(stored.tensor.shape, dtype=stored.tensor.dtype)
    if tensor.numel():
        stored.read(0, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _named_states(
    optimizer: Adam, parameters: Sequence[_Parameter], *, masters: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Without their bytes, but the number of updates."""
    states = optimizer.state_dict()["state"]
    for index, each in enumerate(parameters):
        for name, value in states.get(index, {}).items():
            tensor = torch.as_tensor(int(value)) if name == _STEP else value
            yield f"{each.shard.name}.{name}", tensor
            if masters and (master := master_beside(tensor)) is not None:
                yield f"{each.shard.name}.{MASTER}", master


def _refuse_masters(parameters: Sequence[_Parameter], job: str) -> None:
    """If the daemon gives none."""
    for each in parameters:
        if each.shard.dtype == torch.bfloat16:
            raise NotYet(
                f"job {job!r}: the daemon is older than this client and gives no fp32 values of "
                f"bfloat16 parameters, such as {each.shard.name!r}; update it, or pass "
                "masters=False, and training from the file goes on from the bfloat16 values"
            )


def _nothing(index: int, into: torch.Tensor) -> None:
    raise AssertionError((index, into.shape))  # there are no values
