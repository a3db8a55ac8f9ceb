"""A model into safetensors files, a tensor at a time; others see whole files only."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memd_client.base.dynamo import untraced
from memd_client.base.freed_memory import passing_bytes
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.base.sizes import parse_size
from memd_client.checkpoints.checkpoint_files import INDEX_NAME, WEIGHTS_NAME, os_errors
from memd_client.checkpoints.safetensors_header import encode_header
from memd_client.checkpoints.whole_file import WholeFile, sync_folder
from memd_client.errors import InvalidArgument
from memd_client.parameters.away import ParameterBytes
from memd_client.parameters.model_tensors import model_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from memd_client.checkpoints.safetensors_header import Header
    from memd_client.parameters.model_tensors import ModelTensor

_SUFFIX = ".safetensors"
_SHARD_BYTES = 50_000_000_000  # of transformers' save_pretrained
_PIECE_ELEMENTS = 1 << 20
_METADATA = {"format": "pt"}  # transformers loads no file without it


@untraced
def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | str | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the parameters and persistent buffers of `model`, as `state_dict()` has them now, to
    safetensors files. They are read from memd a tensor at a time. The values are those after the
    last step, whose commit is waited for.

    A path that ends in `.safetensors`, whatever it links to, is one file, with the bytes that
    `safetensors.torch` writes. Any other path is a folder, which is made; it gets
    `model.safetensors` or, beyond `max_shard_bytes`, shards and `model.safetensors.index.json`, as
    of transformers' `save_pretrained`. A tied parameter is written once, under its first name.

    Files are written under other names, and have their own once all are on disk. Whoever reads sees
    the old files or the new ones, whole; while shards of the same names are replaced, no index.
    Files of an earlier save that the new index does not name are removed last.

    Args:
        model: offloaded or not.
        path: its folder exists.
        max_shard_bytes: of the tensors in one file, as an int or such as "5GiB"; 50 GB unless
            given. A larger tensor has a file of its own.
        dtype: floating-point tensors are converted to it, as with `to()`.
        metadata: strings for the header; {"format": "pt"} unless given.

    Raises:
        InvalidArgument: the state has something that is no dense tensor, or of a dtype or name that
            such files do not have; metadata that is no strings; the path cannot be written; a call
            between `step()` and `commit()`; a shard of `fully_shard()` that the program has changed
            since the last step.
        CapacityError: the disk is full; the message has the bytes needed.
        DeviceError: a write failed. After any error what was there before is as it was; but if
            shards of the same names are replaced and it comes once their index is gone, there is no
            index, and some shards may be new: save again.
    """
    defer_interrupts()
    tensors = model_tensors(model)
    jobs = {entry.job for tensor in tensors for entry in tensor.entries}
    for job in jobs | {tensor.whole.job for tensor in tensors if tensor.whole is not None}:
        job.settle_for("save_safetensors()")
    for tensor in tensors:
        if tensor.whole is not None:
            tensor.whole.check()
    given = Path(path)
    place = Path(os.path.realpath(given))  # as open() would, through a link
    metadata = _METADATA if metadata is None else metadata
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgument(f"floating-point tensors cannot be saved as {dtype}")
    # A link may lead to a file of any name, as in the cache of the hub.
    is_file = given.name.endswith(_SUFFIX)
    if is_file:
        if max_shard_bytes is not None:
            raise InvalidArgument(f"max_shard_bytes is for a folder, and {given} is one file")
        files = {place.name: tensors}
        folder = place.parent
    else:
        shard_bytes = _SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
        files = _split(tensors, dtype, parse_size(shard_bytes, name="max_shard_bytes"))
        folder = place
    headers = {name: _header(held, dtype, metadata) for name, held in files.items()}
    if not is_file:
        with os_errors(folder):
            folder.mkdir(exist_ok=True)
    index = _index(model, files, dtype) if len(files) > 1 else b""
    with passing_bytes(), ExitStack() as opened:
        written = [
            opened.enter_context(_written(folder / name, held, headers[name]))
            for name, held in files.items()
        ]
        if index:
            written.append(opened.enter_context(_written_index(folder / INDEX_NAME, index)))
        with os_errors(folder):
            if not is_file:
                _retract(folder, files)
            for file in written:
                file.place()
            sync_folder(folder)
            if not is_file:
                _remove_others(folder, files)


def _stored_dtype(tensor: ModelTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _stored_bytes(tensor: ModelTensor, dtype: torch.dtype | None) -> int:
    return tensor.shape.numel() * _stored_dtype(tensor, dtype).itemsize


def _split(
    tensors: Sequence[ModelTensor], dtype: torch.dtype | None, shard_bytes: int
) -> dict[str, list[ModelTensor]]:
    """The tensors of each file, by its name. The rule is that of huggingface_hub, so that others
    find the same files."""
    shards: list[list[ModelTensor]] = []
    open_shard: list[ModelTensor] = []
    open_bytes = 0
    for tensor in tensors:
        size_bytes = _stored_bytes(tensor, dtype)
        if size_bytes > shard_bytes:
            shards.append([tensor])
            continue
        if open_bytes + size_bytes > shard_bytes:
            shards.append(open_shard)
            open_shard, open_bytes = [], 0
        open_shard.append(tensor)
        open_bytes += size_bytes
    if open_shard or not shards:
        shards.append(open_shard)
    if len(shards) == 1:
        return {WEIGHTS_NAME: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}{_SUFFIX}": shard
        for number, shard in enumerate(shards, 1)
    }


def _index(
    model: nn.Module, files: Mapping[str, Sequence[ModelTensor]], dtype: torch.dtype | None
) -> bytes:
    index = {
        "metadata": {
            "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "total_size": sum(
                _stored_bytes(tensor, dtype) for held in files.values() for tensor in held
            ),
        },
        "weight_map": {tensor.name: name for name, held in files.items() for tensor in held},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _header(
    tensors: Sequence[ModelTensor], dtype: torch.dtype | None, metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    return encode_header(
        [(tensor.name, _stored_dtype(tensor, dtype), tensor.shape) for tensor in tensors], metadata
    )


def _written(
    path: Path, tensors: Sequence[ModelTensor], encoded: tuple[bytes, Header]
) -> WholeFile:
    """A file that has its bytes, and not yet its name."""
    prefix, header = encoded
    with ExitStack() as failed:
        file = failed.enter_context(WholeFile(path, header.file_bytes))
        file.write(prefix)
        _write_tensors(file, tensors, header)
        file.finish()
        failed.pop_all()
    return file


def _written_index(path: Path, index: bytes) -> WholeFile:
    with ExitStack() as failed:
        file = failed.enter_context(WholeFile(path, len(index)))
        file.write(index)
        file.finish()
        failed.pop_all()
    return file


def _write_tensors(file: WholeFile, tensors: Sequence[ModelTensor], header: Header) -> None:
    by_name = {tensor.name: tensor for tensor in tensors}
    for stored in header.tensors:
        safe_point()
        tensor = by_name[stored.name]
        if not stored.size_bytes:
            continue
        for part in tensor.parts:
            if part.whole is not None:
                _write_value(file, part.whole.read(), stored.dtype)
            elif part.entry is None:
                _write_value(file, part.tensor.detach(), stored.dtype)
            else:
                with ParameterBytes(part.tensor).using(writes=False) as value:
                    _write_value(file, value, stored.dtype)
                    del value  # it would keep the lease until the next one is there


@torch.no_grad()
def _write_value(file: WholeFile, value: torch.Tensor, dtype: torch.dtype) -> None:
    flat = value.contiguous().view(-1)
    if dtype == value.dtype and value.device.type == "cpu":
        file.write(flat.view(torch.uint8).numpy().data)
        return
    for first in range(0, flat.numel(), _PIECE_ELEMENTS):
        piece = flat[first : first + _PIECE_ELEMENTS].to(dtype=dtype, device="cpu")
        file.write(piece.view(torch.uint8).numpy().data)


def _retract(folder: Path, files: Mapping[str, object]) -> None:
    """If shards of an index are about to be replaced by others of the same name, nobody may find
    some of these and some of those: the index goes first."""
    if len(files) > 1 and any((folder / name).exists() for name in files):
        (folder / INDEX_NAME).unlink(missing_ok=True)
        sync_folder(folder)


def _remove_others(folder: Path, files: Mapping[str, object]) -> None:
    """Weights of an earlier save: the file that would be taken for the model, or shards that no
    index names."""
    others = set(_earlier_files(folder)) - files.keys()
    if len(files) == 1:
        others.add(INDEX_NAME)
    for name in others:
        (folder / name).unlink(missing_ok=True)


def _earlier_files(folder: Path) -> Iterator[str]:
    for found in folder.glob("model-*-of-*" + _SUFFIX):
        parts = found.name.removesuffix(_SUFFIX).split("-")
        if len(parts) == 4 and all(len(part) == 5 and part.isdigit() for part in parts[1::2]):
            yield found.name
    yield WEIGHTS_NAME
