"""Safetensors files that are damaged or hostile are refused by name, and new ones appear whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn

import memd_client
from memd_client.checkpoints.checkpoint_files import CheckpointFiles
from memd_client.checkpoints.safetensors_header import HEADER_BYTES_MAX, encode_header, parse_header
from memd_client.checkpoints.whole_file import WholeFile
from memd_client.errors import CapacityError, DeviceError, InvalidArgument
from tests.descriptors import open_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(**changes: Any) -> dict[str, Any]:
    return {**ENTRY, **changes}


def made(path: Path, header: Any, data: bytes = bytes(8), *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def refusal(path: Any) -> str:
    with pytest.raises(InvalidArgument) as refused, CheckpointFiles(path):
        pass
    return str(refused.value)


WRONG: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{'a': 1}", b"", "not JSON"),
    "no UTF-8": (b'{"\xff": {}}', b"", "not JSON"),
    "nested too deeply": (b"[" * 200_000, b"", "not JSON"),
    "a number without end": (b'{"a": ' + b"1" * 5000 + b"}", b"", "not JSON"),
    "a list": ([], b"", "a JSON list"),
    "a name twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {}}',
        bytes(8),
        "names 'a' twice",
    ),
    "a field twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 8]}}',
        bytes(8),
        "names 'shape' twice",
    ),
    "another field": ({"a": entry(more=1)}, bytes(8), "other fields"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "other fields"),
    "a text for a tensor": ({"a": "F32"}, bytes(8), "other fields"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "b": ENTRY}, bytes(8), "__metadata__"),
    "an unknown dtype": ({"a": entry(dtype="F33")}, bytes(8), "'F33'"),
    "a dtype that is no text": ({"a": entry(dtype=["F32"])}, bytes(8), "['F32']"),
    "a negative dimension": ({"a": entry(shape=[-2])}, bytes(8), "no counts"),
    "a dimension of a fraction": ({"a": entry(shape=[2.0])}, bytes(8), "no counts"),
    "a dimension that is true": ({"a": entry(shape=[True, 2])}, bytes(8), "no counts"),
    "an infinite dimension": (
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}',
        bytes(8),
        "no counts",
    ),
    "a dimension beyond 63 bits": ({"a": entry(shape=[1 << 63, 0])}, b"", "no counts"),
    # 2^62 * 2^2 * 4 bytes are 0 in 64 bits.
    "a product that wraps": ({"a": entry(shape=[1 << 62, 4], data_offsets=[0, 0])}, b"", "takes"),
    "more dimensions than torch has": ({"a": entry(shape=[1] * 65)}, bytes(8), "65 dimensions"),
    "three offsets": ({"a": entry(data_offsets=[0, 8, 8])}, bytes(8), "no counts"),
    "negative offsets": ({"a": entry(data_offsets=[-8, 0])}, bytes(8), "no counts"),
    "offsets that go back": ({"a": entry(data_offsets=[8, 0])}, bytes(8), "lies at [8, 0]"),
    "offsets of other bytes": ({"a": entry(shape=[3])}, bytes(8), "takes 12 bytes"),
    "tensors that overlap": (
        {"a": ENTRY, "b": entry(data_offsets=[4, 12])},
        bytes(12),
        "'b' overlaps",
    ),
    "two tensors in one place": ({"a": ENTRY, "b": ENTRY}, bytes(8), "overlaps"),
    "a hole": ({"a": ENTRY, "b": entry(data_offsets=[12, 20])}, bytes(20), "'b' leaves a hole"),
    "a hole at the beginning": ({"a": entry(data_offsets=[4, 12])}, bytes(12), "leaves a hole"),
    "too few bytes": ({"a": ENTRY}, bytes(7), "truncated"),
    "more bytes": ({"a": ENTRY}, bytes(9), "goes on after its tensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_or_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    header, data, said = WRONG[name]
    path = made(tmp_path / "a.safetensors", header, data)
    message = refusal(path)
    assert said in message
    assert str(path) in message
    assert str(path) not in open_names()


def test_a_header_that_cannot_be_there_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for contents in (b"", b"1234567"):
        path.write_bytes(contents)
        assert f"{len(contents)} of 8 bytes" in refusal(path)
    assert "truncated" in refusal(made(path, {"a": ENTRY}, length=1 << 20))
    for length in (HEADER_BYTES_MAX + 1, (1 << 64) - 1):
        assert "are allowed" in refusal(made(path, {"a": ENTRY}, length=length))
    # A sparse file that is long enough.
    made(path, b"", length=HEADER_BYTES_MAX + 1)
    os.truncate(path, HEADER_BYTES_MAX + 100)
    assert "are allowed" in refusal(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.safetensors")
    assert "No such file" in refusal(f"{tmp_path}/missing.safetensors")
    assert "neither" in refusal(tmp_path)
    assert "empty" in refusal([])
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refusal(tmp_path / "pipe")
    assert "not a file" in refusal([tmp_path])
    assert "not a file" in refusal("/dev/zero")


def test_what_the_library_writes_is_read_and_written_with_the_same_bytes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        'quoted "ä\\\n\u2028': torch.ones(1, dtype=torch.bool),
        **{
            str(dtype): torch.zeros(3, dtype=dtype)
            for dtype in (
                *(torch.uint64, torch.float64, torch.complex64, torch.uint32, torch.int32),
                *(torch.float16, torch.uint16, torch.int16, torch.float8_e5m2fnuz, torch.int8),
                *(torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float8_e4m3fn),
                *(torch.float8_e5m2, torch.uint8),
            )
        },
    }
    for metadata in ({}, {"format": "pt"}):
        path = tmp_path / "a.safetensors"
        safetensors.torch.save_file(tensors, path, metadata=metadata or None)
        prefix, header = encode_header(
            [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()], metadata
        )
        data = path.read_bytes()
        assert data.startswith(prefix)
        assert header.file_bytes == len(data)
        with CheckpointFiles(path) as files:
            assert files.tensors.keys() == tensors.keys()
            assert parse_header(prefix[8:], len(data), path).tensors == header.tensors
            for name, tensor in tensors.items():
                stored = files.tensors[name]
                assert (stored.tensor.dtype, stored.tensor.shape) == (tensor.dtype, tensor.shape)
                found = bytearray(stored.tensor.size_bytes)
                stored.read(0, memoryview(found))
                assert bytes(found) == tensor.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "metadata", "said"),
    [
        ("a", {"step": 3}, "'step': 3"),
        ("a", {3: "step"}, "3: 'step'"),
        ("a", [("step", "3")], "no list"),
        ("a", {"step": "\ud800"}, "lone surrogates"),
        ("a", {"\udfff": "step"}, "lone surrogates"),
        ("a\ud800", {}, "lone surrogates"),
        ("__metadata__", {}, "rename it"),
    ],
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_header_that_nobody_could_read_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, metadata: Any, said: str, is_folder: bool
) -> None:
    model = nn.Module()
    model.register_buffer("first", torch.ones(2))
    model.register_buffer(name, torch.zeros(2))
    path = tmp_path / ("new" if is_folder else "a.safetensors")
    if not is_folder:
        path.write_bytes(b"old")
    with pytest.raises(memd_client.InvalidArgument, match=said):
        memd_client.save_safetensors(
            model, path, metadata=metadata, max_shard_bytes=8 if is_folder else None
        )
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == (
        [] if is_folder else [("a.safetensors", b"old")]
    )


def test_a_link_with_the_name_of_a_file_is_one_wherever_it_leads(tmp_path: Path) -> None:
    for folder in ("out", "blobs"):
        (tmp_path / folder).mkdir()
    blob = tmp_path / "blobs" / "0123abcd"
    blob.write_bytes(b"old")
    path = tmp_path / "out" / "model.safetensors"
    path.symlink_to("../blobs/0123abcd")
    model = nn.Linear(2, 2)
    memd_client.save_safetensors(model, path)
    assert path.is_symlink()
    assert [each.name for each in blob.parent.iterdir()] == ["0123abcd"]
    assert safetensors.torch.load_file(blob).keys() == {"weight", "bias"}


def test_a_link_to_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "out").symlink_to("a.safetensors")
    memd_client.save_safetensors(nn.Linear(2, 2), tmp_path / "out")
    assert [each.name for each in (tmp_path / "a.safetensors").iterdir()] == ["model.safetensors"]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "a.safetensors", {"a": ENTRY})
    with CheckpointFiles(path) as files:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(InvalidArgument, match="became shorter"):
            files.tensors["a"].read(0, memoryview(bytearray(8)))


# An index


def indexed(folder: Path, weight_map: Any) -> Path:
    made(folder / "one.safetensors", {"a": ENTRY})
    made(folder / "two.safetensors", {"b": ENTRY})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_an_index_brings_the_files_that_it_names(tmp_path: Path) -> None:
    index = indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    for path in (index, tmp_path, [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]):
        with CheckpointFiles(path) as files:
            assert set(files.tensors) == {"a", "b"}


def test_a_shard_may_be_a_link_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    index = indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (tmp_path / "one.safetensors").rename(blobs / "1")
    (tmp_path / "one.safetensors").symlink_to("blobs/1")
    with CheckpointFiles(index) as files:
        assert set(files.tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "'three.safetensors'"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is not there"),
        ({"c": "one.safetensors", "b": "two.safetensors"}, "'a' is there as well"),
        ({"a": "../one.safetensors"}, "its own folder"),
        ({"a": "/etc/passwd"}, "its own folder"),
        ({"a": ".."}, "its own folder"),
        ({"a": ""}, "its own folder"),
        ({"a": "one.safetensors\0"}, "its own folder"),
        ({"a": 1}, "its own folder"),
        ({}, "no weight_map"),
        (["one.safetensors"], "no weight_map"),
    ],
)
def test_an_index_that_is_wrong_or_hostile_is_refused(
    weight_map: Any, said: str, tmp_path: Path
) -> None:
    index = indexed(tmp_path, weight_map)
    assert said in refusal(index)
    assert not [name for name in open_names() if name.startswith(str(tmp_path))]


def test_an_index_that_is_no_index_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "a.json"
    for contents, said in ((b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "no weight_map")):
        index.write_bytes(contents)
        assert said in refusal(index)
    with index.open("wb") as file:
        file.truncate(HEADER_BYTES_MAX + 1)
    assert "larger than an index" in refusal(index)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [made(tmp_path / name, {"a": ENTRY}) for name in ("one", "two")]
    assert "'a' is in two files" in refusal(paths)


# Files that appear whole


def test_a_file_appears_with_all_its_bytes_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with WholeFile(path, 3) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    data = os.urandom(70 << 20)
    with WholeFile(path, len(data)) as file:
        file.write(data[:5])
        file.write(memoryview(data)[5:])
        file.finish()
        assert path.read_bytes() == b"old"
        file.place()
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    left = tmp_path / ".a.0123456789ab.partial"
    left.write_bytes(b"left")
    other = tmp_path / ".b.0123456789ab.partial"
    other.write_bytes(b"of another place")
    with WholeFile(path, 1) as first:
        assert not left.exists()
        with WholeFile(path, 1) as second:  # beside the first, which lives
            second.write(b"2")
            second.finish()
            second.place()
        first.write(b"1")
        first.finish()
        first.place()
    assert path.read_bytes() == b"1"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_file_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    taken: list[Path] = []

    def late(file: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with WholeFile(tmp_path / "a", 1) as file:
        file.write(b"1")
        file.finish()
        file.place()
    assert taken
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def failing(number: int, after: int) -> Callable[[int, memoryview], int]:
    write, calls = os.write, []

    def fail(file: int, data: memoryview) -> int:
        calls.append(file)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return write(file, data[:5])

    return fail


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_is_named_with_the_bytes_that_were_needed(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC, after))
    with (
        pytest.raises(CapacityError, match=r"/a needs 1.5 KiB \(1536 bytes\)"),
        WholeFile(path, 1536) as file,
    ):
        file.write(bytes(1536))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", failing(errno.EIO, 0))
    with pytest.raises(DeviceError, match="/a: ") as failed, WholeFile(tmp_path / "a", 1) as file:
        file.write(b"1")
    assert failed.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


def test_a_flush_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "it did not reach the disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DeviceError, match="did not reach"), WholeFile(tmp_path / "a", 0) as file:
        file.finish()
    assert list(tmp_path.iterdir()) == []


# Any bytes


def what_the_library_reads(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, KeyError, RuntimeError, OverflowError):
        return None


def what_memd_reads(path: Path) -> dict[str, bytes] | None:
    try:
        with CheckpointFiles(path) as files:
            found = {}
            for name, stored in files.tensors.items():
                data = bytearray(stored.tensor.size_bytes)
                stored.read(0, memoryview(data))
                found[name] = bytes(data)
            return found
    except InvalidArgument:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_of_a_damaged_file_is_what_the_library_reads(
    seed: int, tmp_path: Path
) -> None:
    """A file is refused, or has the tensors that the library finds in it."""
    random = Random(seed)
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3).bfloat16(), "c": torch.tensor([1, 2])}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    whole, read_count = path.read_bytes(), 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            place = random.randrange(len(data) if random.random() < 0.3 else 200)
            match random.randrange(3):
                case 0:
                    data[place] = random.choice(b'0123456789[]{}:," \\"')
                case 1:
                    data[place] ^= 1 << random.randrange(8)
                case _:
                    length = random.randint(1, 4)
                    data[place : place + length] = data[place : place + random.randint(0, 8)]
        path.write_bytes(data)
        found = what_memd_reads(path)
        if found is None:
            continue
        read_count += 1
        theirs = what_the_library_reads(path)
        assert theirs is not None, bytes(data)
        wanted = {
            name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, value in theirs.items()
        }
        assert found == wanted, bytes(data)
    assert read_count > 10
