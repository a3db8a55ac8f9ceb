"""The `.metadata` of a distributed checkpoint, which may come from anyone.

It is a pickle, and a pickle may call whatever it names. So names are looked up in a list, which has
the classes that torch writes there and nothing that acts.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

METADATA_BYTES_MAX = 1 << 30
_RECORDS = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata, _StorageInfo),
)
_BUILD = pickle.BUILD[0]
# With it, what is about to be built can be looked at.
_InPython: Any = pickle._Unpickler


def parse_metadata(text: bytes, path: Path) -> Metadata:
    """The metadata `text` of the file `path`.

    Raises:
        InvalidArgument: it names something else than the classes of a metadata, and nothing was
            called; it is damaged; it has something that torch does not write there.
    """
    try:
        metadata = _Unpickler(io.BytesIO(text), path).load()
    except InvalidArgument:
        raise
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    _check(metadata, path)
    found: Metadata = metadata
    return found


def damaged(path: Path, what: str) -> InvalidArgument:
    """The error of a checkpoint that has something else than torch writes there."""
    return InvalidArgument(f"{path} is damaged or hostile: {what}")


class _Unpickler(_InPython):  # type: ignore[misc] # pickle's stub does not know the class
    dispatch: ClassVar[dict[int, Any]] = {**_InPython.dispatch}

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Called for each name."""
        allowed: Any = _ALLOWED.get((module, name))
        if allowed is None and module == "torch":
            found = vars(torch).get(name)
            allowed = found if isinstance(found, torch.dtype) else None
        if allowed is None:
            raise damaged(
                self._path, f"it names {module}.{name}, which no metadata has; nothing was called"
            )
        return allowed

    def persistent_load(self, pid: object) -> Any:
        """Called for what a pickle leaves outside."""
        raise damaged(self._path, f"it refers to {pid!r}, outside of it")

    def load_build(self) -> None:
        """Sets the fields of a record. A class would be changed for everybody."""
        if not isinstance(self.stack[-2], _RECORDS):
            raise damaged(self._path, f"it sets fields of {self.stack[-2]!r}")
        super().load_build()

    dispatch[_BUILD] = load_build


def _posix_path(*parts: str) -> str:
    """A text in place of the folder that it was saved to."""
    return "/".join(map(str, parts))


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"tensors of layout {name}, and memd reads dense ones")
    return torch.strided


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{(each.__module__, each.__name__): each for each in (*_RECORDS, _MEM_FORMAT_ENCODING)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _posix_path,
    ("pathlib._local", "PosixPath"): _posix_path,
}


def _check(metadata: object, path: Path) -> None:
    """Every field that a load looks at."""
    if not isinstance(metadata, Metadata):
        raise damaged(path, f"it is a {type(metadata).__name__}, and no metadata")
    tensors: Any = metadata.state_dict_metadata
    stored: Any = metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise damaged(path, "it has no list of items")
    for name, item in tensors.items():
        is_tensor = isinstance(item, TensorStorageMetadata)
        if not isinstance(name, str) or not (is_tensor or isinstance(item, BytesStorageMetadata)):
            raise damaged(path, f"item {name!r:.80} is a {type(item).__name__}")
        if is_tensor and not _is_tensor(item):
            raise damaged(path, f"tensor {name!r} has a form that is none")
    for index, info in stored.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise damaged(path, f"{index!r:.80} is stored in a {type(info).__name__}")
        _check_place(index, info, path)
    if metadata.storage_meta is not None and not isinstance(metadata.storage_meta, StorageMeta):
        raise damaged(path, "its storage_meta is none")


def _is_tensor(item: Any) -> bool:
    return bool(
        isinstance(item.properties, TensorProperties)
        and isinstance(getattr(item.properties, "dtype", None), torch.dtype)
        and _is_size(item.size)
        and isinstance(item.chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and _is_size(chunk.offsets)
            and _is_size(chunk.sizes)
            and len(chunk.offsets) == len(chunk.sizes) == len(item.size)
            for chunk in item.chunks
        )
    )


def _is_size(value: object) -> bool:
    return isinstance(value, torch.Size) and all(type(each) is int and each >= 0 for each in value)


def _check_place(index: MetadataIndex, info: _StorageInfo, path: Path) -> None:
    name = getattr(info, "relative_path", None)
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise damaged(path, f"{index.fqn!r} is stored in {name!r}, which is no file of its folder")
    counts = (getattr(info, "offset", None), getattr(info, "length", None))
    if not all(type(each) is int and each >= 0 for each in counts):
        raise damaged(path, f"{index.fqn!r} has an offset or a length that is no count")
    if info.transform_descriptors:
        raise InvalidArgument(
            f"{path}: {index.fqn!r} was transformed by {info.transform_descriptors!r:.80} when it "
            "was saved, and memd reads what was not; save it without extensions"
        )
