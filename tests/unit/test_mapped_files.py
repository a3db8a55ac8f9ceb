"""Which bytes of which file a tensor shows, and how they are read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from memd_client.base import file_reads
from memd_client.base.file_reads import read_once
from memd_client.base.mapped_files import FileBytes, MappedFiles, ReadingAhead
from memd_client.errors import DeviceError
from tests.descriptors import open_names

COUNT = 3 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "values"
    torch.arange(COUNT, dtype=torch.int32).numpy().tofile(path)
    return path


def mapped(path: Path, *, shared: bool = False) -> torch.Tensor:
    return torch.from_file(str(path), shared=shared, size=COUNT, dtype=torch.int32)


def read(found: FileBytes | None, tensor: torch.Tensor) -> torch.Tensor:
    assert found is not None
    into = torch.full_like(tensor, -1, memory_format=torch.contiguous_format)
    assert found.read(into.view(torch.uint8).numpy().data)
    return into


def flags_of(tensor: torch.Tensor) -> set[str]:
    """VmFlags of the map that has the tensor."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_there = begin <= tensor.data_ptr() < end
        elif is_there and first == "VmFlags:":
            return set(rest)
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("shared", [False, True])
def test_a_part_of_a_mapped_file_is_read_from_the_file(path: Path, *, shared: bool) -> None:
    part = mapped(path, shared=shared)[1001 : COUNT - 1]
    assert torch.equal(read(MappedFiles().find(part), part), part)


def test_the_rest_of_what_a_file_has_is_read_from_the_file(path: Path) -> None:
    part = mapped(path)[7:1007]
    found = MappedFiles().find(part)
    assert found is not None
    assert torch.equal(read(found.behind(4 * 1000 - 8), part[-2:]), part[-2:])


def test_memory_of_no_file_is_found_in_none() -> None:
    maps = MappedFiles()
    assert maps.find(torch.ones(1 << 20)) is None
    assert maps.find(torch.ones(3)) is None


def test_elements_that_are_not_as_in_memory_are_in_no_file(path: Path) -> None:
    negative = mapped(path).view(torch.float32).view(torch.complex64).conj().imag
    assert negative.is_neg()
    assert MappedFiles().find(negative) is None


def test_what_was_changed_in_memory_is_no_longer_the_files(path: Path) -> None:
    whole = mapped(path)
    before, after = whole[: COUNT // 2], whole[COUNT // 2 :]
    whole[COUNT // 2 + 5] = 7
    maps = MappedFiles()
    assert maps.find(after) is None
    assert maps.find(whole) is None
    assert torch.equal(read(maps.find(before), before), before)


def test_what_was_changed_through_a_shared_map_is_the_files(path: Path) -> None:
    whole = mapped(path, shared=True)
    whole[5] = 7
    assert read(MappedFiles().find(whole), whole)[5] == 7


def test_a_file_of_another_name_or_inode_is_not_read(path: Path) -> None:
    whole = mapped(path)
    found = MappedFiles().find(whole)
    assert found is not None
    into = bytearray(whole.nbytes)
    path.rename(path.with_name("elsewhere"))
    assert not found.read(memoryview(into))
    path.write_bytes(bytes(whole.nbytes))
    assert not found.read(memoryview(into))
    assert not any(into)
    path.with_name("elsewhere").unlink()
    assert MappedFiles().find(whole) is None


def test_a_file_with_a_map_for_each_tensor_is_opened_once(path: Path) -> None:
    parts = [mapped(path, shared=True)[1000 * n : 1000 * (n + 1)] for n in range(8)]
    maps, before = MappedFiles(), open_names().count(str(path))
    for part in parts:
        assert torch.equal(read(maps.find(part), part), part)
    assert open_names().count(str(path)) == before + 1
    maps.close()
    assert open_names().count(str(path)) == before


def test_the_memory_of_a_device_is_not_read_from_it() -> None:
    """/dev/zero, a map of which is listed with its name, would give anything its zeros."""
    with Path("/dev/zero").open("rb") as device:
        memory = mmap.mmap(device.fileno(), 1 << 20, flags=mmap.MAP_PRIVATE)
    whole = torch.frombuffer(memory, dtype=torch.int32)
    found = MappedFiles().find(whole)
    assert found is not None
    assert not found.read(memoryview(bytearray(whole.nbytes)))


def test_a_file_that_became_shorter_is_an_error(path: Path) -> None:
    whole = mapped(path)
    found = MappedFiles().find(whole)
    assert found is not None
    os.truncate(path, 1 << 20)
    with pytest.raises(DeviceError, match="became shorter while a tensor was mapped there"):
        found.read(memoryview(bytearray(whole.nbytes)))


def test_a_read_works_without_the_kernels_flag(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "_RWF_DONTCACHE", 1 << 30)  # no kernel knows it
    into = torch.empty(COUNT, dtype=torch.int32)
    file = os.open(path, os.O_RDONLY)
    try:
        assert read_once(file, 0, into.view(torch.uint8).numpy().data) == into.nbytes
    finally:
        os.close(file)
    assert torch.equal(into, mapped(path))


def test_reading_ahead_is_suspended_until_it_is_resumed(path: Path) -> None:
    whole = mapped(path)
    reading_ahead = ReadingAhead()
    reading_ahead.suspend(torch.ones(1 << 20))
    assert "rr" not in flags_of(whole)
    reading_ahead.suspend(whole[1000:])
    assert "rr" in flags_of(whole)
    reading_ahead.resume()
    assert "rr" not in flags_of(whole)
