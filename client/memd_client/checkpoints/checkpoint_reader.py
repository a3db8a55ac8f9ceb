"""A distributed checkpoint into a job, an item at a time, and into what else the state has."""

from __future__ import annotations

import errno
import io
import math
import os
import weakref
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from memd_client.base.file_reads import FileReads, FileRun
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.checkpoints.archived_tensor import PackedArchiveError, find_tensor, refuse_packed
from memd_client.checkpoints.checkpoint_files import listed, os_error, os_errors
from memd_client.checkpoints.checkpoint_folder import METADATA_NAME, CheckpointFolder
from memd_client.checkpoints.checkpoint_metadata import METADATA_BYTES_MAX, damaged, parse_metadata
from memd_client.connection.shard import MASTER, MAXIMUM
from memd_client.errors import InvalidArgument, MemdError
from memd_client.parameters.loaded_places import replace_all
from memd_client.parameters.model_tensors import ModelTensor
from memd_client.transaction.loaded_moments import (
    FittingMaster,
    LoadedMoments,
    moment_reads,
    update_count_of,
)
from memd_client.transaction.moments import MomentTensor
from memd_client.transaction.transaction import transaction_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from memd_client.checkpoints.archived_tensor import ArchivedTensor
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.transaction.loaded_moments import MomentBytes
    from memd_client.transaction.moments import MomentSet
    from memd_client.transaction.transaction import Transaction

_READ_BYTES = 8 << 20
# An archive says in so many bytes at its beginning and at its end where its tensor is.
_END_BYTES = 4 << 10
# The ends of so many archives are fetched before they are looked at.
_ARCHIVES_AHEAD = 16


class Reader(CheckpointFolder, StorageReader):
    """The `storage_reader` of `dcp.load`, for what plain torch or `Writer` has saved. Parameters of
    an offloaded model, as `state_dict(keep_vars=True)` has them, and moments that `state_dict()` of
    memd's optimizers lists get their values in memd, together with all other tensors of the state,
    all or none. `optimizer.load_state_dict()` of the state then takes the settings of groups, and
    moves no moments. If the fp32 values of a bfloat16 parameter are there, as `Writer` and `memd
    snapshot export` write them, and the state has the parameter and its moments, training goes on
    from them.

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
        transaction = _transaction_of([each.target for each in tensors])
        if transaction is not None:
            _add_masters(wholes, values, files)
        moments = _loaded_moments(wholes, values, transaction)
        if transaction is not None:
            transaction.job.settle_for("dcp.load()")
        with closing(files.reads) as reads:
            _replace(values, moments, wholes, transaction, reads)
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
        self._reads = FileReads()
        self._open: dict[str, tuple[int, int]] = {}  # file and size by name
        opened = self._opened = ExitStack()
        weakref.finalize(self, opened.close)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def reads(self) -> FileReads:
        """The reads of elements, which lie one after the other."""
        return self._reads

    def form(self, item: ReadItem) -> TensorStorageMetadata:
        """The whole tensor that the item is a part of."""
        found = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(found, TensorStorageMetadata):
            raise damaged(self._folder, f"{item.storage_index.fqn!r} is no tensor")
        return found

    def items(self, name: str) -> list[ReadItem]:
        """The items that are the tensor of this name; empty if there is none."""
        found = self._metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return []
        whole = ChunkStorageMetadata(torch.Size([0] * len(found.size)), found.size)
        return create_read_items_for_chunk_list(name, found, [whole])

    def check(self, item: ReadItem) -> None:
        """
        Raises:
            InvalidArgument: its bytes are not all there.
        """
        self._view(item.storage_index)

    def fetch_ends(self, item: ReadItem) -> None:
        """Before `run` or `tensor`: the system begins to fetch what says where the elements are."""
        view = self._view(item.storage_index)
        for begin in (0, max(0, view.size_bytes - _END_BYTES)):
            run = view.run(begin, min(_END_BYTES, view.size_bytes))
            os.posix_fadvise(run.file, run.begin, run.size_bytes, os.POSIX_FADV_WILLNEED)

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
        if begin is None:
            return None
        return _Run(view, begin, math.prod(item.lengths), found.form.dtype.itemsize)

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
        return _Slice(file, info.offset, info.length, self._reads)


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: int, begin: int, size_bytes: int, reads: FileReads) -> None:
        super().__init__()
        self._reads = reads
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

    def run(self, begin: int, size_bytes: int) -> FileRun:
        """So many bytes from `begin` on."""
        return FileRun(self._file, self._begin + begin, size_bytes)

    def fill(self, begin: int, into: memoryview) -> None:
        """Reads all of `into`, bytes of a tensor that nobody reads again soon."""
        if begin < 0 or begin + len(into) > self._size_bytes:
            raise OSError(errno.EIO, "the file ends before the tensor")
        done = 0
        while done < len(into):
            safe_point()
            count = self._reads.read(self._file, self._begin + begin + done, into[done:])
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            done += count


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements that lie one after the other in a file."""

    view: _Slice
    begin: int  # of the first, in bytes
    count: int
    element_bytes: int

    def part(self, first: int, count: int) -> _Run:
        """So many elements from number `first` on."""
        begin = self.begin + first * self.element_bytes
        return _Run(self.view, begin, count, self.element_bytes)

    @property
    def in_file(self) -> FileRun:
        return self.view.run(self.begin, self.count * self.element_bytes)


@dataclass(frozen=True, slots=True)
class _Loading:
    """A tensor of the state, and the parts of the checkpoint that fill it."""

    target: torch.Tensor
    files: _Files
    items: list[ReadItem] = field(default_factory=list)
    # Once they were looked for: the runs, or None.
    _known_runs: list[list[_Run] | None] = field(default_factory=list)

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

    def fetch_ends(self) -> None:
        """As of `_Files`."""
        for item in self.items:
            self.files.fetch_ends(item)

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
        if not self._known_runs:
            self._known_runs.append(self._find_runs())
        return self._known_runs[0]

    def part_runs(self, first: int, count: int) -> Iterator[_Run]:
        """So many elements from number `first` on; nothing if `runs` is None."""
        end, run_begin = first + count, 0
        for run in self.runs() or ():
            run_end = run_begin + run.count
            if first < min(end, run_end):
                part = run.part(first - run_begin, min(end, run_end) - first)
                yield part
                first += part.count
            run_begin = run_end

    def read_part(self, first: int, into: torch.Tensor) -> None:
        """Reads the elements from number `first` on into a one-dimensional tensor of them."""
        done = 0
        for run in self.part_runs(first, into.numel()):
            data = into[done : done + run.count].view(torch.uint8).numpy().data
            with os_errors(self.files.folder):
                run.view.fill(run.begin, data)
            done += run.count

    def _find_runs(self) -> list[_Run] | None:
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


class _LoadingBytes:
    """The elements of one tensor, read where they go. `MomentBytes`."""

    def __init__(self, loading: _Loading) -> None:
        self._loading = loading
        self._whole: torch.Tensor | None = None  # if the files have them in another order

    @property
    def loading(self) -> _Loading:
        return self._loading

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`, in the tensor's dtype."""
        if self._loading.runs() is not None:
            self._loading.read_part(element_first, into)
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
    wholes: Mapping[MomentSet, dict[str, _Loading]],
    transaction: Transaction | None,
    reads: FileReads,
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
    values_read = ((loading, first, part.shape.numel()) for part, loading, first in sources)
    moments_read = (
        (wholes[each.whole][name], first, count)
        for each, name, first, count in moment_reads(moments)
        if each.whole is not None
    )
    moments_found = (wholes[each.whole].values() for each in moments if each.whole is not None)
    tensors = chain((loading for _, loading in targets.values()), *moments_found)
    reads.expect(_upcoming(chain(values_read, moments_read), tensors))
    read: list[_LoadingBytes] = []  # at most one: the parts of a tensor come one after the other

    def fill(index: int, into: torch.Tensor) -> None:
        part, loading, first = sources[index]
        if not read or read[0].loading is not loading:
            read.clear()  # before the next holds anything
            read.append(_LoadingBytes(loading))
        read[0].read(first, into.view(part.dtype))
        if first + part.shape.numel() == loading.target.numel():
            read.clear()

    replace_all(
        [part for part, *_ in sources],
        fill,
        moments=moments,
        transaction=transaction,
        what="dcp.load()",
    )


def _upcoming(
    parts: Iterable[tuple[_Loading, int, int]], tensors: Iterable[_Loading]
) -> Iterator[FileRun]:
    """The bytes that reads of these parts take: so many elements of a tensor, from one on. Each is
    looked for when the one before it was taken. `tensors`: all that have parts, in about their
    order."""
    later = iter(tensors)
    seen: set[int] = set()
    for loading, first, count in parts:
        try:
            if id(loading) not in seen:
                _fetch_ends(islice(later, 1 if seen else _ARCHIVES_AHEAD))
                seen.add(id(loading))
            found = [run.in_file for run in loading.part_runs(first, count)]
        except MemdError:
            return  # the read says so
        yield from found


def _fetch_ends(loadings: Iterable[_Loading]) -> None:
    for each in loadings:
        each.fetch_ends()


def _add_masters(
    wholes: Mapping[MomentSet, dict[str, _Loading]], values: Iterable[_Loading], files: _Files
) -> None:
    """A checkpoint may have the fp32 values of bfloat16 parameters beside their moments, and no
    state has them. Only with its value does a parameter get them."""
    entries = (entry for each in values for entry in ModelTensor(each.target).entries)
    replaced = {entry.shard.shard_id for entry in entries}
    for whole, found in wholes.items():
        shard = whole.shard
        if whole.session_moments is None or shard.dtype != torch.bfloat16:
            continue
        if not replaced.issuperset(part.shard_id for part in shard.parts):
            continue
        items = files.items(f"{_state_name(found)}.{MASTER}")
        if items:
            found[MASTER] = _Loading(torch.empty(shard.shape, device="meta"), files, items)
            found[MASTER].check()


def _state_name(found: Mapping[str, _Loading]) -> str:
    """The name of a parameter's state: that of any moment, without its last part."""
    return next(iter(found.values())).name.rpartition(".")[0]


def _in_files(
    found: dict[str, _Loading], shard: Shard, leases: Leases | None
) -> dict[str, MomentBytes]:
    """By their names, to be read where they go."""
    moments: dict[str, MomentBytes] = {name: _LoadingBytes(each) for name, each in found.items()}
    if MASTER in moments:
        assert leases is not None  # of a job into which a load goes
        advice = "they are of another step than the values, or damaged"
        moments[MASTER] = FittingMaster(moments[MASTER], shard, leases, advice=advice)
    return moments


def _loaded_moments(
    wholes: Mapping[MomentSet, dict[str, _Loading]],
    values: Iterable[_Loading],
    transaction: Transaction | None,
) -> list[LoadedMoments]:
    """Those of sessions that are not over."""
    others = {each.name: each for each in values}
    _fetch_ends(each for each in others.values() if each.name.endswith(".step"))
    loaded = []
    for whole, found in wholes.items():
        if whole.session_moments is None:
            continue
        assert transaction is not None
        step = others.get(f"{_state_name(found)}.step")
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
                has_master=MASTER in found,
                read=partial(_in_files, found, whole.shard, transaction.job.store.leases),
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
