"""Archives around bytes that are written later are what `torch.save` would have made."""

from __future__ import annotations

import io
import itertools
import random
import zipfile
import zlib

import pytest
import torch

from memd_client.base.checksum import RunChecksum
from memd_client.checkpoints import tensor_archive
from memd_client.checkpoints.tensor_archive import TensorArchive
from memd_client.checkpoints.torch_archive import ALIGNMENT

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.uint16]


def archived(value: torch.Tensor) -> bytes:
    archive = TensorArchive(value.dtype, value.shape)
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    assert archive.data_bytes == len(data)
    assert len(archive.prefix) % ALIGNMENT == 0
    whole = archive.prefix + data + archive.suffix(zlib.crc32(data))
    assert archive.size_bytes == len(whole)
    return whole


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_zip_read_the_same_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    whole = archived(value)
    found = torch.load(io.BytesIO(whole), weights_only=True)
    assert found.dtype == dtype
    assert found.shape == value.shape
    assert found.stride() == value.stride()
    assert torch.equal(found.float(), value.float())
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None  # all checksums match
        assert all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())


def test_records_of_four_gigabytes_have_fields_of_eight_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a smaller limit: readers take the long form for any size."""
    monkeypatch.setattr(tensor_archive, "_LIMIT", 1000)
    value = torch.rand(1000)
    whole = archived(value)
    assert b"PK\x06\x06" in whole
    assert torch.equal(torch.load(io.BytesIO(whole), weights_only=True), value)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("archive/data/0").file_size == 4000


def test_a_checksum_of_runs_in_any_order_is_that_of_the_bytes() -> None:
    rng = random.Random(1)
    for _ in range(50):
        size = rng.randrange(1, 4000)
        data = bytearray(size)
        edges = sorted({rng.randrange(size + 1) for _ in range(8)})
        runs = list(itertools.pairwise(edges))
        rng.shuffle(runs)
        checksum = RunChecksum()
        for begin, end in runs[: rng.randrange(len(runs) + 1)]:
            run = rng.randbytes(end - begin)
            data[begin:end] = run
            checksum.add(begin, run)
        assert checksum.value(0, size) == zlib.crc32(data)


def test_runs_that_overlap_or_lie_behind_the_end_are_no_checksum() -> None:
    checksum = RunChecksum()
    checksum.add(0, b"abc")
    with pytest.raises(ValueError, match="behind 2"):
        checksum.value(0, 2)
    checksum.add(1, b"x")
    with pytest.raises(ValueError, match="overlap"):
        checksum.value(0, 3)
