"""A state into a folder that `torch.distributed.checkpoint` reads, an item at a time.

The folder has `.metadata`, which names a file of items. A save writes a new file beside those of an
earlier one, and replaces `.metadata` last: readers find the earlier checkpoint or the new one.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import secrets
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from memd_client.base.freed_memory import passing_bytes
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.checkpoints.checkpoint_files import os_error
from memd_client.checkpoints.checkpoint_folder import METADATA_NAME, CheckpointFolder
from memd_client.checkpoints.partial_name import remove_abandoned
from memd_client.checkpoints.snapshot_items import SnapshotItems
from memd_client.checkpoints.snapshot_tensor import SnapshotTensor, master_beside, staged
from memd_client.checkpoints.torch_archive import ArchiveStream, Passing
from memd_client.checkpoints.whole_file import WholeFile, sync_folder
from memd_client.connection.shard import MASTER, MOMENTS
from memd_client.errors import InvalidArgument, MemdError, NotYet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from memd_client.base.freed_memory import PassingBytes

_DATA_NAME = re.compile(r"__\d+_\d+(\.[0-9a-f]{12})?\.distcp")
# An item has as many beside its elements: torch's archive, whose records are aligned.
_ITEM_BYTES = 2 << 10


class Writer(CheckpointFolder, StorageWriter, AsyncStager):
    """The `storage_writer` of `dcp.save`; plain torch reads the folder. Parameters of an offloaded
    model, as `state_dict(keep_vars=True)` has them, and what `state_dict()` of memd's optimizers
    returns are read one after the other: at most one parameter, or the moments of one, is in this
    process. `state_dict()` of a model works too, and copies the whole model before the save begins;
    so does the model itself in the state.

    The folder has the fp32 values of a bfloat16 parameter as `master` beside `exp_avg`: `Reader`
    takes them, so that training goes on with the same bits, and plain torch asks for none.

    It is also the stager of `dcp.async_save`, which takes a snapshot of the job: the values are
    those of the call, nothing is copied, and training goes on. What is not in memd is copied. The
    snapshot counts as one state more against the job's disk quota until it is written, which is
    done below all other I/O. Then it is dropped; `close()` of the session waits for that. A process
    that is killed leaves it, as `async_save/...` in `memd snapshot list`; the next session drops
    it. Drop `optimizer.state_dict()` after the call: one that is kept reads its moments before the
    next step.

    The values are those after the last step, whose commit is waited for. Whoever reads the folder
    finds the earlier checkpoint there or the new one, whole; a folder without either has no
    `.metadata`. So the disk holds both until the save ends. After an error the folder is as it was.

    torch wraps what goes wrong into a `CheckpointException`; its `failures` have the `MemdError`:
    InvalidArgument for a path that cannot be written, a save by somebody else, moments that were
    read and that the optimizer has no more, or a call between `step()` and `commit()`;
    CapacityError for a full disk; DeviceError for a failed write; NotYet for several ranks.
    `dcp.async_save` raises what is in the way of a snapshot, as `Session.snapshot`; what goes wrong
    later is in its future.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Args:
            path: a folder, which is made.
        """
        super().__init__(path)
        self._save_id = secrets.token_hex(6)
        # A save has these open. torch calls nobody if it ends between `write_data` and `finish`.
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)
        self._data: WholeFile | None = None
        # Names of items that the plan does not have, and of those that have the same form.
        self._masters: dict[str, str] = {}
        self._thread: threading.Thread | None = None  # that saves, or has saved

    def storage_meta(self) -> StorageMeta:
        """The folder, and a name for this save."""
        return StorageMeta(checkpoint_id=os.fspath(self._path), save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            NotYet: each rank would write metadata of its own.
        """
        del is_coordinator, args
        self._refuse_second()
        # A Writer may save again, and torch does not always call `reset`.
        self._opened.close()
        self._data = None
        self._masters = {}
        self._save_id = secrets.token_hex(6)
        if not kwargs.get("use_collectives", True):
            raise NotYet("memd writes one .metadata; call dcp.save without use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is.

        Raises:
            NotYet: it has shards of parameters, as of `fully_shard`.
        """
        for item in plan.items:
            if item.type is WriteItemType.SHARD:
                raise NotYet(
                    f"the state has a shard of {item.index.fqn!r}, and a checkpoint of one process "
                    "would have no other in this version; save what "
                    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
                    "returns, or call save_safetensors()"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """
        Raises:
            NotYet: there is more than one rank.
        """
        if len(plans) > 1:
            raise NotYet(
                f"one process writes a checkpoint in this version, and {len(plans)} ranks call "
                "dcp.save; let one of them call it with no_dist=True"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items to a file that has no name yet."""
        defer_interrupts()
        results = Future[list[WriteResult]]()
        with self._ending_if_it_fails(), passing_bytes() as passing:
            self._lock_folder()
            remove_abandoned(self._path, _DATA_NAME.pattern)  # each save has another name
            size_bytes = sum((item.tensor_storage_size() or 0) + _ITEM_BYTES for item in plan.items)
            self._data = self._opened.enter_context(
                WholeFile(self._path / self._data_name, size_bytes)
            )
            results.set_result(self._write_items(self._data, plan.items, planner, passing))
            self._data.finish()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The checkpoint is there when it returns."""
        defer_interrupts()
        stored = {result.index: result.storage_data for each in results for result in each}
        self._add_masters(metadata)
        whole = replace(
            metadata,
            version=CURRENT_DCP_VERSION,
            storage_data=stored,
            storage_meta=self.storage_meta(),
        )
        text = pickle.dumps(whole)
        assert self._data is not None  # of `write_data`
        with self._ending_if_it_fails():
            file = self._opened.enter_context(WholeFile(self._path / METADATA_NAME, len(text)))
            file.write(text)
            file.finish()
            unnamed = self._opened.enter_context(ExitStack())
            unnamed.callback(_remove, self._path / self._data_name)
            self._data.place()
            sync_folder(self._path)
            file.place()
            unnamed.pop_all()
            sync_folder(self._path)
            self._remove_earlier()
        self._opened.close()
        self._data = None
        metadata.version, metadata.storage_data = whole.version, whole.storage_data
        metadata.storage_meta = whole.storage_meta

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For `async_save`: the state of now, which stays in memd where it is there.

        Raises:
            InvalidArgument: the state has tensors of several sessions, or moments that were read
                and that the optimizer has no more; a call between `step()` and `commit()`, or
                within `gather()`.
            CapacityError: the job's disk quota does not hold one state more.
        """
        defer_interrupts()
        return staged(state_dict)

    def synchronize_staging(self) -> None:
        """`stage` has returned."""

    def close(self) -> None:
        """Nothing is held between saves."""

    def _refuse_second(self) -> None:
        thread, other = threading.current_thread(), self._thread
        # One that has ended was in a save that failed.
        if (
            self._data is not None
            and other is not None
            and other is not thread
            and other.is_alive()
        ):
            raise InvalidArgument(
                f"this Writer is in another save, to {self._path}; wait for its future, or make a "
                "Writer for each save"
            )
        self._thread = thread

    @property
    def _data_name(self) -> str:
        return f"__0_0.{self._save_id}.distcp"

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._opened.close()
            if isinstance(error, OSError) and not isinstance(error, MemdError):
                raise os_error(error, self._path) from error
            raise

    def _lock_folder(self) -> None:
        """Until the save ends nobody else saves there. Folders that were made go if they stay
        empty."""
        missing = [each for each in (self._path, *self._path.parents) if not each.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._opened.callback(_remove_if_empty, folder)
            sync_folder(folder.parent)
        lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._opened.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidArgument(
                f"another dcp.save writes to {self._path}; wait for it, or take another folder"
            ) from error

    def _write_items(
        self,
        file: WholeFile,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        passing: PassingBytes,
    ) -> list[WriteResult]:
        results = []
        begin = 0
        tensors = Passing("dcp.save()", with_masters=True)
        in_snapshot: list[tuple[MetadataIndex, SnapshotTensor]] = []
        for index, data in self._with_masters(items, planner):
            safe_point()
            if isinstance(data, SnapshotTensor):
                in_snapshot.append((index, data))
                continue
            stream = ArchiveStream(file)
            if isinstance(data, torch.Tensor):
                torch.save(tensors.ordinary(data), cast("IO[bytes]", stream))
            else:
                stream.write(data.getbuffer())
            # Nothing refers to a lease when the next one begins.
            del data
            size_bytes = stream.finish()
            passing.passed(size_bytes)
            stored = _StorageInfo(self._data_name, begin, size_bytes)
            results.append(WriteResult(index, size_bytes, stored))
            begin += size_bytes
        return results + self._write_snapshot(file, in_snapshot, begin)

    def _with_masters(
        self, items: Sequence[WriteItem], planner: SavePlanner
    ) -> Iterator[tuple[MetadataIndex, Any]]:
        """The data of the items, and behind the first moment of a bfloat16 parameter its fp32
        values, under the name that `Reader` looks for."""
        names = {item.index.fqn for item in items}
        for item in items:
            data = planner.resolve_data(item)
            master = master_beside(data)
            yield item.index, data
            del data
            state, _, moment = item.index.fqn.rpartition(".")
            name = f"{state}.{MASTER}"
            if master is not None and moment == MOMENTS[0] and name not in names:
                self._masters[name] = item.index.fqn
                yield replace(item.index, fqn=name), master

    def _add_masters(self, metadata: Metadata) -> None:
        """They have the form of a moment, and a place beside it."""
        forms, paths = metadata.state_dict_metadata, metadata.planner_data
        for name, moment in self._masters.items():
            forms[name] = forms[moment]
            if isinstance(paths, dict) and moment in paths:
                paths[name] = (*paths[moment][:-1], MASTER)

    def _write_snapshot(
        self, file: WholeFile, tensors: Sequence[tuple[MetadataIndex, SnapshotTensor]], begin: int
    ) -> list[WriteResult]:
        if not tensors:
            return []
        items = SnapshotItems(file, [tensor for _, tensor in tensors], begin=begin)
        tensors[0][1].snapshot.read(items)
        items.finish()
        return [
            WriteResult(
                index,
                stored.size_bytes,
                _StorageInfo(self._data_name, stored.begin, stored.size_bytes),
            )
            for (index, _), stored in zip(tensors, items.items, strict=True)
        ]

    def _remove_earlier(self) -> None:
        """Files of items that `.metadata` names no more, or of a process that was killed."""
        for found in self._path.iterdir():
            if _DATA_NAME.fullmatch(found.name) and found.name != self._data_name:
                _remove(found)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
