"""A distributed checkpoint into a job, an item at a time, and into what else the state has."""

from __future__ import annotations

import errno
import io
import math
import os
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.base.mapped_files import read_once
from memd_client.checkpoints.archived_tensor import PackedArchiveError, find_tensor, refuse_packed
from memd_client.checkpoints.checkpoint_files import listed, os_error, os_errors
from memd_client.checkpoints.checkpoint_folder import METADATA_NAME, CheckpointFolder
from memd_client.checkpoints.checkpoint_metadata import METADATA_BYTES_MAX, damaged, parse_metadata
from memd_client.connection.shard import MAXIMUM
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters.loaded_places import replace_all
from memd_client.parameters.model_tensors import ModelTensor
from memd_client.transaction.loaded_moments import LoadedMoments, update_count_of
from memd_client.transaction.moments import MomentTensor
from memd_client.transaction.transaction import transaction_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from memd_client.checkpoints.archived_tensor import ArchivedTensor
    from memd_client.transaction.loaded_moments import MomentBytes
    from memd_client.transaction.moments import MomentSet
    from memd_client.transaction.transaction import Transaction

_READ_BYTES = 8 << 20


class Reader(CheckpointFolder, StorageReader):
    """The `storage_reader` of `dcp.load`, for what plain torch or `Writer` has saved. Parameters of
    an offloaded model, as `state_dict(keep_vars=True)` has them, and moments that `state_dict()` of
    memd's optimizers lists get their values in memd, together with all other tensors of the state,
    all or none. `optimizer.load_state_dict()` of the state then takes the settings of groups, and
    moves no moments.

    A checkpoint may come from anyone: nothing that it names is called, and values that are no
    tensors are plain data.

    A `.metadata` that is missing, damaged or hostile is an InvalidArgument. torch wraps what goes
    wrong later into a `CheckpointException`, whose `failures` have it: InvalidArgument for files
    that are truncated or damaged, for another dtype or shape, for parameters in use, or a call
    between `step()` and `commit()`; CapacityError if the job's disk quota does not hold the new
    values beside the old ones. Nothing has changed then, except as of `load_safetensors`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Args:
            path: a folder with `.metadata`.

        Raises:
            InvalidArgument: that is missing, damaged or hostile.
        """
        super().__init__(path)
        # Each load reads it again. Here, torch wraps no error.
        self._metadata = self._parsed()

    def read_metadata(self) -> Metadata:
        """
        Raises:
            InvalidArgument: it is missing, damaged or hostile.
        """
        self._metadata = self._parsed()
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of the plan."""
        defer_interrupts()
        if not isinstance(planner, DefaultLoadPlanner):
            raise InvalidArgument(
                "memd has to know which tensor of the state gets which values, and the planner is "
                f"no DefaultLoadPlanner: {type(planner).__name__}"
            )
        files = _Files(self._path, self._metadata)
        tensors, others = _grouped(plan.items, planner, files)
        values = [each for each in tensors if not isinstance(each.target, MomentTensor)]
        wholes = _by_parameter(each for each in tensors if isinstance(each.target, MomentTensor))
        # If the session is over, they stay in the files.
        passing = {whole: found for whole, found in wholes.items() if not whole.session_moments}
        for loading in (each for found in passing.values() for each in found.values()):
            loading.read()  # to know that it can be read
        plain = [(item, files.plain_data(item)) for item in others]
        moments = _loaded_moments(wholes, values)
        transaction = _transaction_of([each.target for each in tensors])
        if transaction is not None:
            transaction.job.settle_for("dcp.load()")
        _replace(values, moments, transaction)
        for whole, found in passing.items():
            whole.replace(_FileMoments(found))
        for item, data in plain:
            planner.load_bytes(item, data)
        done = Future[None]()
        done.set_result(None)
        return done

    def _parsed(self) -> Metadata:
        path = self._path / METADATA_NAME
        try:
            with path.open("rb") as file:
                text = file.read(METADATA_BYTES_MAX + 1)
        except OSError as error:
            raise os_error(error, path) from error
        if len(text) > METADATA_BYTES_MAX:
            raise InvalidArgument(f"{path} is larger than a metadata may be")
        return parse_metadata(text, path)


class _Files:
    """The files of a checkpoint, each open from its first item on: a file that is replaced
    meanwhile stays as it was."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._open: dict[str, tuple[int, int]] = {}  # file and size by name
        opened = self._opened = ExitStack()
        weakref.finalize(self, opened.close)

    @property
    def folder(self) -> Path:
        return self._folder

    def form(self, item: ReadItem) -> TensorStorageMetadata:
        """The whole tensor that the item is a part of."""
        found = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(found, TensorStorageMetadata):
            raise damaged(self._folder, f"{item.storage_index.fqn!r} is no tensor")
        return found

    def check(self, item: ReadItem) -> None:
        """
        Raises:
            InvalidArgument: its bytes are not all there.
        """
        self._view(item.storage_index)

    def tensor(self, item: ReadItem) -> torch.Tensor:
        """The part of a stored tensor that the item names, in this process."""
        return self._part(item, self._load(item.storage_index))

    def run(self, item: ReadItem) -> _Run | None:
        """The same part, if its elements lie one after the other in the file."""
        view = self._view(item.storage_index)
        found = self._find(view, item.storage_index)
        if found is None:
            return None
        begin = found.run_begin(self._part(item, found.form))
        return _Run(view, begin, math.prod(item.lengths)) if begin is not None else None

    def _part(self, item: ReadItem, stored: Any) -> torch.Tensor:
        """The same of `stored`, which has the item's name, is checked, and may have no bytes."""
        form = self.form(item)
        begin, lengths = item.storage_offsets, item.lengths
        if not isinstance(stored, torch.Tensor) or stored.dtype != form.properties.dtype:
            raise damaged(self._folder, f"{item.storage_index.fqn!r} is not what .metadata says")
        if len(stored.shape) != len(lengths) or any(
            first + length > size
            for first, length, size in zip(begin, lengths, stored.shape, strict=True)
        ):
            raise damaged(
                self._folder, f"{item.storage_index.fqn!r} is smaller than .metadata says"
            )
        return narrow_tensor_by_index(stored, begin, lengths)

    def plain_data(self, item: ReadItem) -> io.BytesIO:
        """A value that is no tensor, as `torch.save` writes it: the planner calls what such bytes
        name, so these are of this process."""
        data = io.BytesIO()
        torch.save(self._load(item.storage_index), data)
        data.seek(0)
        return data

    def _find(self, view: _Slice, index: MetadataIndex) -> ArchivedTensor | None:
        safe_point()
        with self._errors(index):
            return find_tensor(view, view.size_bytes)

    def _load(self, index: MetadataIndex) -> Any:
        safe_point()
        view = self._view(index)
        with self._errors(index):
            refuse_packed(view)
            view.seek(0)
            return torch.load(cast("IO[bytes]", view), map_location="cpu", weights_only=True)

    @contextmanager
    def _errors(self, index: MetadataIndex) -> Iterator[None]:
        """Inside, an archive is read that anyone may have made."""
        try:
            yield
        except MemdError:
            raise
        except PackedArchiveError as error:
            raise damaged(self._folder, f"{index.fqn!r} is compressed") from error
        except OSError as error:
            raise os_error(error, self._folder) from error
        except Exception as error:
            raise damaged(
                self._folder,
                f"{index.fqn!r} cannot be read as a tensor or plain data: {error}",
            ) from error

    def _view(self, index: MetadataIndex) -> _Slice:
        info: _StorageInfo | None = (self._metadata.storage_data or {}).get(index)
        if info is None:
            raise damaged(self._folder, f".metadata does not say where {index.fqn!r} is")
        path = self._folder / info.relative_path
        if path.name not in self._open:
            try:
                # A pipe would block.
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise os_error(error, path) from error
            self._opened.callback(os.close, file)
            self._open[path.name] = file, os.fstat(file).st_size
        file, size_bytes = self._open[path.name]
        if info.offset + info.length > size_bytes:
            raise InvalidArgument(
                f"{path} is truncated: {index.fqn!r} ends at byte {info.offset + info.length}, and "
                f"the file at {size_bytes}"
            )
        return _Slice(file, info.offset, info.length)


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: int, begin: int, size_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin
        self._size_bytes = size_bytes
        self._at = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError("it would begin before its beginning")
        self._at = origin + offset
        return self._at

    def readinto(self, into: Any) -> int:
        """Fills `into`, unless the part ends before."""
        rest = memoryview(into).cast("B")
        rest = rest[: max(self._size_bytes - self._at, 0)]
        whole = len(rest)
        while rest:
            safe_point()
            count = os.preadv(self._file, [rest[:_READ_BYTES]], self._begin + self._at)
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            rest = rest[count:]
            self._at += count
        return whole

    def fill(self, begin: int, into: memoryview) -> None:
        """Reads all of `into`, bytes of a tensor that nobody reads again soon."""
        if begin < 0 or begin + len(into) > self._size_bytes:
            raise OSError(errno.EIO, "the file ends before the tensor")
        done = 0
        while done < len(into):
            safe_point()
            part = into[done : done + _READ_BYTES]
            count = read_once(self._file, self._begin + begin + done, part)
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            done += count


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements that lie one after the other in a file."""

    view: _Slice
    begin: int  # of the first, in bytes
    count: int


@dataclass(frozen=True, slots=True)
class _Loading:
    """A tensor of the state, and the parts of the checkpoint that fill it."""

    target: torch.Tensor
    files: _Files
    items: list[ReadItem] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.items[0].dest_index.fqn

    def check(self) -> None:
        """
        Raises:
            InvalidArgument: the parts are not the tensor; the job would get bytes of nobody.
        """
        form = self.files.form(self.items[0])
        found, wanted = (form.properties.dtype, form.size), (self.target.dtype, self.target.shape)
        if found != wanted:
            raise InvalidArgument(
                f"{self.name!r} is {found[0]} {list(found[1])} in the checkpoint and {wanted[0]} "
                f"{list(wanted[1])} in the state (memd does not convert it)"
            )
        count = sum(math.prod(item.lengths) for item in self.items)
        if count != self.target.numel():
            raise InvalidArgument(
                f"the checkpoint has {count} of {self.target.numel()} elements of {self.name!r}"
            )
        for item in self.items:
            self.files.check(item)

    def read(self) -> torch.Tensor:
        """All of it, in this process."""
        if len(self.items) == 1:
            return self.files.tensor(self.items[0]).contiguous()
        whole = torch.empty(self.target.shape, dtype=self.target.dtype)
        self.fill(whole)
        return whole

    def fill(self, into: torch.Tensor) -> None:
        """Into a tensor of its form."""
        if len(self.items) > 1:
            into.zero_()  # parts that overlap would leave a hole
        for item in self.items:
            part = narrow_tensor_by_index(into, item.dest_offsets, item.lengths)
            part.copy_(self.files.tensor(item))

    def runs(self) -> list[_Run] | None:
        """All elements in row-major order; None: those of the files lie in another one."""
        form = torch.empty(self.target.shape, dtype=self.target.dtype, device="meta")
        found: list[tuple[int, _Run]] = []
        for item in self.items:
            part = narrow_tensor_by_index(form, item.dest_offsets, item.lengths)
            run = self.files.run(item) if part.is_contiguous() else None
            if run is None:
                return None
            found.append((int(part.storage_offset()), run))
        found.sort(key=lambda each: each[0])
        end = 0
        for first, run in found:
            if first != end:
                return None
            end += run.count
        return [run for _, run in found] if end == form.numel() else None

    def read_runs(self, runs: Sequence[_Run], first: int, into: torch.Tensor) -> None:
        """Reads the elements from number `first` on into a one-dimensional tensor of them."""
        size = into.dtype.itemsize
        begin, end, run_begin = first, first + into.numel(), 0
        for run in runs:
            run_end = run_begin + run.count
            if begin < min(end, run_end):
                count = min(end, run_end) - begin
                data = into[begin - first : begin - first + count].view(torch.uint8).numpy().data
                with os_errors(self.files.folder):
                    run.view.fill(run.begin + (begin - run_begin) * size, data)
                begin += count
            run_begin = run_end


class _LoadingBytes:
    """The elements of one tensor, read where they go. `MomentBytes`."""

    def __init__(self, loading: _Loading) -> None:
        self._loading = loading
        self._runs = loading.runs()
        self._whole: torch.Tensor | None = None  # if the files have them in another order

    @property
    def loading(self) -> _Loading:
        return self._loading

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`, in the tensor's dtype."""
        if self._runs is not None:
            self._loading.read_runs(self._runs, element_first, into)
            return
        if self._whole is None:
            self._whole = self._loading.read().view(-1)
        into.copy_(self._whole[element_first : element_first + into.numel()])


class _FileMoments:
    """Moments of one parameter that are in files. Of a session that is over, they stay there until
    an optimizer takes them."""

    def __init__(self, loadings: dict[str, _Loading]) -> None:
        self._loadings = loadings

    def values(self) -> dict[str, torch.Tensor]:
        """By their names."""
        return {name: loading.read() for name, loading in self._loadings.items()}

    def in_files(self) -> dict[str, MomentBytes]:
        """By their names, to be read where they go."""
        return {name: _LoadingBytes(loading) for name, loading in self._loadings.items()}

    def look(self, whole: MomentSet) -> dict[str, torch.Tensor]:
        """As of `MomentSource`."""
        del whole
        return self.values()

    read = look


def _grouped(
    items: Iterable[ReadItem], planner: DefaultLoadPlanner, files: _Files
) -> tuple[list[_Loading], list[ReadItem]]:
    """The tensors, checked against the files, and what is none."""
    tensors: dict[str, _Loading] = {}
    others = []
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            files.check(item)
            others.append(item)
            continue
        name = item.dest_index.fqn
        if name not in tensors:
            tensors[name] = _Loading(planner.lookup_tensor(item.dest_index), files)
        tensors[name].items.append(item)
    wrong = []
    for each in tensors.values():
        try:
            each.check()
        except InvalidArgument as error:
            wrong.append(str(error))
    if wrong:
        raise InvalidArgument(f"the checkpoint does not fit the state: {listed(wrong)}")
    return list(tensors.values()), others


def _transaction_of(targets: Sequence[torch.Tensor]) -> Transaction | None:
    """That of the session which has parameters, or moments of them, among them.

    Raises:
        InvalidArgument: there are several.
    """
    found: dict[Transaction, None] = {}
    for target in targets:
        transaction = None
        if isinstance(target, MomentTensor):
            moments = target.whole.session_moments
            transaction = transaction_of(moments) if moments is not None else None
        elif entries := ModelTensor(target).entries:
            transaction = entries[0].transaction
        if transaction is not None:
            found[transaction] = None
    if len(found) > 1:
        names = " and ".join(repr(each.job.name) for each in found)
        raise InvalidArgument(
            f"the state has tensors of several sessions, of jobs {names}; load into one at a time"
        )
    return next(iter(found), None)


@torch.no_grad()
def _replace(
    loadings: Sequence[_Loading],
    moments: Sequence[LoadedMoments],
    transaction: Transaction | None,
) -> None:
    if transaction is None:
        for loading, value in [(each, each.read()) for each in loadings]:
            loading.target.copy_(value)
        return
    targets: dict[int, tuple[ModelTensor, _Loading]] = {}
    for loading in loadings:  # a tied parameter is there under each of its names
        targets.setdefault(id(loading.target), (ModelTensor(loading.target), loading))
        targets[id(loading.target)][0].names.append(loading.name)
    sources = [
        (part, loading, first)
        for target, loading in targets.values()
        for part, first in zip(target.parts, target.part_firsts, strict=True)
    ]
    read: list[_LoadingBytes] = []  # at most one: the parts of a tensor come one after the other

    def fill(index: int, into: torch.Tensor) -> None:
        part, loading, first = sources[index]
        if not read or read[0].loading is not loading:
            read.clear()  # before the next holds anything
            read.append(_LoadingBytes(loading))
        into[part.size_bytes :].zero_()
        read[0].read(first, into[: part.size_bytes].view(part.dtype))
        if first + part.shape.numel() == loading.target.numel():
            read.clear()

    replace_all(
        [part for part, *_ in sources],
        fill,
        moments=moments,
        transaction=transaction,
        what="dcp.load()",
    )


def _loaded_moments(
    wholes: Mapping[MomentSet, dict[str, _Loading]], values: Iterable[_Loading]
) -> list[LoadedMoments]:
    """Those of sessions that are not over."""
    others = {each.name: each for each in values}
    loaded = []
    for whole, found in wholes.items():
        if whole.session_moments is None:
            continue
        first = next(iter(found.values()))
        step = others.get(f"{first.name.rpartition('.')[0]}.step")
        if step is None:
            raise InvalidArgument(
                f"the state has moments of parameter {whole.shard.name!r}, and no tensor 'step' "
                "beside them; give dcp.load what optimizer.state_dict() has returned"
            )
        loaded.append(
            LoadedMoments(
                shard=whole.shard,
                update_count=update_count_of(step.read(), name=whole.shard.name),
                has_maximum=MAXIMUM in found,
                read=_FileMoments(found).in_files,
                whole=whole,
            )
        )
    return loaded


def _by_parameter(loadings: Iterable[_Loading]) -> dict[MomentSet, dict[str, _Loading]]:
    wholes: dict[MomentSet, dict[str, _Loading]] = {}
    for loading in loadings:
        target = cast("MomentTensor", loading.target)
        wholes.setdefault(target.whole, {})[target.moment] = loading
    for whole, found in wholes.items():
        if found.keys() != set(whole.names):
            raise InvalidArgument(
                f"the checkpoint has {sorted(found)} of parameter {whole.shard.name!r}, and the "
                f"state has {sorted(whole.names)}"
            )
    return wholes
