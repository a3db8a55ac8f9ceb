"""The archives of `torch.save`, written a tensor at a time.

`torch.save` keeps the bytes of all tensors until it has written the last. Here the bytes of a
tensor that is in memd are read when their turn comes, and nobody keeps them.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.serialization import DEFAULT_PROTOCOL, location_tag
from torch.storage import TypedStorage, UntypedStorage

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import call_user, defer_interrupts, safe_point
from memd_client.checkpoints.checkpoint_files import os_error
from memd_client.checkpoints.whole_file import WholeFile, sync_folder
from memd_client.errors import InvalidArgument
from memd_client.parameters.away import ParameterBytes
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.tiles import TileBytes, is_in_memd
from memd_client.transaction.moments import MomentTensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from memd_client.transaction.moments import MomentSet

_rebuild: Any = torch._utils._rebuild_tensor_v2
_rebuild_of_new_dtype: Any = torch._utils._rebuild_tensor_v3
_serialization: Any = torch.serialization
_storages: Any = torch.storage
_FileWriter: Any = torch._C.PyTorchFileWriter
# The bytes of a tensor begin at a multiple of it.
ALIGNMENT = 64
# An archive has as many beside the bytes of each tensor: names, and room to align them.
_RECORD_BYTES = 512


@untraced
def save_archive(state: Any, path: Path) -> None:
    """`torch.save(state, path)`: `torch.load` reads the same. Of tensors that are in memd at most
    one, or the moments of one parameter, is in this process. The file appears whole, once its bytes
    are on disk; what was there stays until then.

    Raises:
        InvalidArgument: the path cannot be written, or a call between `step()` and `commit()`.
        CapacityError: the disk is full.
        DeviceError: a write failed.
    """
    defer_interrupts()
    text = BytesIO()
    pickler = _Pickler(text)
    call_user(pickler.dump, state)
    records = pickler.storages
    size_bytes = len(text.getvalue()) + sum(
        each.nbytes() + _RECORD_BYTES for each in records.values()
    )
    with WholeFile(path, size_bytes) as file:
        _write(file, text.getvalue(), records)
        file.finish()
        file.place()
    sync_folder(path.parent)


@untraced
def load_archive(path: Path, *, weights_only: bool | None = True) -> Any:
    """`torch.load(path)`, whose tensors show the bytes of the file: those that nobody uses are
    not read, and the kernel may drop the others again. The file must not be written meanwhile; it
    may be replaced.

    Raises:
        InvalidArgument: it is no file of `torch.save`, or damaged.
    """
    try:
        with path.open("rb"):
            pass  # from here on errors are of what it contains
    except OSError as error:
        raise os_error(error, path) from error
    try:
        return call_user(torch.load, path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError:
        raise  # it names a class that is not plain data, and says what to do
    except Exception as error:
        raise InvalidArgument(
            f"{path} is truncated or damaged, or no file of torch.save: {error}"
        ) from error


def live_state(model: nn.Module) -> OrderedDict[str, Any]:
    """`model.state_dict()`, in which tensors that are in memd take no bytes: they show the value of
    each time that they are used."""
    shown: dict[int, Any] = {}  # by id of a tied parameter, whose bytes are saved once

    def show(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return shown.setdefault(id(value), value.detach())

    state = model.state_dict(keep_vars=True)
    return as_state(((name, show(value)) for name, value in state.items()), of=state)


def as_state(items: Iterable[tuple[str, Any]], *, of: object) -> OrderedDict[str, Any]:
    """`items` as a `state_dict()`, with the versions of modules that `of` has: a load asks for
    them."""
    state = OrderedDict(items)
    versions = getattr(of, "_metadata", None)
    if versions is not None:
        vars(state)["_metadata"] = versions
    return state


def tensor_pickle(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """`data.pkl` of an archive that has one dense tensor, in row-major order, as `data/0`."""
    text = BytesIO()
    _Pickler(text).dump(_Described(torch.empty(shape, dtype=dtype, device="meta")))
    return text.getvalue()


class ArchiveStream:
    """A file that torch writes an archive to. An error ends no writer of torch, which would raise
    another on its way: `finish` raises it."""

    def __init__(self, file: WholeFile) -> None:
        self._file = file
        self._size_bytes = 0
        self._error: BaseException | None = None

    def write(self, data: memoryview | bytes) -> int:
        """Appends."""
        if self._error is None:
            try:
                self._file.write(data)
            except BaseException as error:  # noqa: BLE001 # `finish` raises it
                self._error = _without_frames(error)
        count = memoryview(data).nbytes
        self._size_bytes += count
        return count

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def has_failed(self) -> bool:
        """`finish` will raise, and what is written is dropped."""
        return self._error is not None

    def finish(self) -> int:
        """The bytes that were written."""
        if self._error is not None:
            raise self._error
        return self._size_bytes


class Passing:
    """Tensors of a state as ordinary ones, of which one is held at a time, or the moments of one
    parameter."""

    def __init__(self, what: str, *, with_masters: bool = False) -> None:
        """
        Args:
            what: the call, for messages.
            with_masters: tensors that are `MASTER` may come, each with moments of its parameter.
        """
        self._what = what
        self._with_masters = with_masters
        self._whole: MomentSet | None = None
        self._moments: dict[str, torch.Tensor] = {}

    def ordinary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements on the CPU, in a storage of their own."""
        tensor = tensor.detach()
        if isinstance(tensor, MomentTensor):
            tensor = self._moment(tensor)
        if isinstance(tensor, LazyTensor):
            if isinstance(tensor.source, ParameterBytes):
                tensor.source.entry.job.settle_for(self._what)
            elif isinstance(tensor.source, TileBytes):
                tensor.source.tiling.transaction.job.settle_for(self._what)
            tensor = tensor.in_memory()
        tensor = tensor.cpu()
        # torch.save writes the whole storage.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def _moment(self, tensor: MomentTensor) -> torch.Tensor:
        if tensor.whole is not self._whole:
            self._moments = {}
            tensor.whole.refuse_outdated()
            whole = tensor.whole
            self._moments = (
                whole.passing_values_and_master() if self._with_masters else whole.passing_values()
            )
            self._whole = whole
        return self._moments[tensor.moment]


@dataclass(frozen=True, slots=True)
class _InMemd:
    """Stands for the storage of a tensor that is in memd: its elements in row-major order."""

    tensor: torch.Tensor

    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Described:
    """Is pickled as the tensor, whose bytes nobody has here."""

    tensor: torch.Tensor


class _Pickler(pickle.Pickler):
    """As that of `torch.save`, and collects the storages by their names."""

    def __init__(self, text: BytesIO) -> None:
        super().__init__(text, DEFAULT_PROTOCOL)
        self._names: dict[int, str] = {}  # by id of a storage in C++
        self._storages: dict[str, UntypedStorage | _InMemd] = {}

    @property
    def storages(self) -> dict[str, UntypedStorage | _InMemd]:
        return self._storages

    def reducer_override(self, value: Any) -> Any:
        """A tensor that is in memd becomes an ordinary one with the same elements."""
        if isinstance(value, _Described):
            value = value.tensor
        elif not _is_in_memd(value):
            return NotImplemented
        shape = tuple(value.shape)
        strides = tuple(torch.empty(shape, device="meta").stride())
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (_InMemd(value), 0, shape, strides, False, hooks)
        if value.dtype in _storages._new_dtypes():
            return _rebuild_of_new_dtype, (*arguments, value.dtype)
        return _rebuild, arguments

    def persistent_id(self, value: Any) -> Any:
        """For a storage, as `torch.load` needs it to find the record."""
        if isinstance(value, _InMemd):
            dtype, name = value.tensor.dtype, str(len(self._storages))
            self._storages[name] = value
            kind = _storages._dtype_to_storage_type_map().get(dtype)
            if kind is None:
                return "storage", UntypedStorage, name, "cpu", value.nbytes()
            return "storage", getattr(torch, kind), name, "cpu", value.tensor.numel()
        if isinstance(value, TypedStorage):
            typed: Any = value
            name = self._name(typed._untyped_storage)
            kind = getattr(torch, typed._pickle_storage_type())
            return "storage", kind, name, location_tag(typed._untyped_storage), typed._size()
        if isinstance(value, UntypedStorage):
            return (
                *("storage", UntypedStorage, self._name(value), location_tag(value)),
                value.nbytes(),
            )
        return None

    def _name(self, storage: Any) -> str:
        name = self._names.setdefault(storage._cdata, str(len(self._storages)))
        self._storages[name] = storage
        return name


def _is_in_memd(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        isinstance(value, LazyTensor | MomentTensor) or is_in_memd(value)
    )


def _write(file: WholeFile, text: bytes, records: dict[str, UntypedStorage | _InMemd]) -> None:
    """The records of torch's format."""
    stream = ArchiveStream(file)
    alignment: int = _serialization._get_storage_alignment()
    writer: Any = _FileWriter(stream, _serialization.get_crc32_options(), alignment)
    with ExitStack() as ending:
        ending.callback(writer.write_end_of_file)
        for name, data in (
            ("data.pkl", text),
            (".format_version", b"1"),
            (".storage_alignment", str(alignment).encode()),
            ("byteorder", b"little"),
        ):
            writer.write_record(name, data, len(data))
        passing = Passing("saving it")
        for name, record in records.items():
            if stream.has_failed:
                break
            safe_point()
            if isinstance(record, _InMemd):
                # Nothing refers to a lease when the next one begins.
                storage = passing.ordinary(record.tensor).contiguous().untyped_storage()
            else:
                storage = record.cpu()
            writer.write_record(f"data/{name}", storage, storage.nbytes())
            del storage
    stream.finish()


def _without_frames(error: BaseException) -> BaseException:
    """Frames refer to those that called them: here to torch's, which have the tensor."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error
