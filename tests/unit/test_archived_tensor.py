"""The bytes of a tensor are found in an archive of `torch.save` without being loaded."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from memd_client.checkpoints.archived_tensor import PackedArchiveError, find_tensor


def archive_of(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def find(data: bytes) -> Any:
    return find_tensor(io.BytesIO(data), len(data))


def changed(data: bytes, records: dict[str, bytes], *, compression: int = 0) -> bytes:
    """The archive with other bytes in these records."""
    written = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(written, "w", compression) as new,
    ):
        for each in old.infolist():
            short = each.filename.partition("/")[2]
            new.writestr(each.filename, records.get(short, old.read(each)))
    return written.getvalue()


def record(data: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return next(archive.read(each) for each in archive.namelist() if each.endswith(name))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(33, 7),
        torch.rand(5).bfloat16(),
        torch.rand(()),
        torch.arange(6, dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.rand(300, 7)[100:200],  # the archive has all 300
        nn.Parameter(torch.rand(4, 4)),
    ],
)
def test_the_bytes_of_a_tensor_are_where_it_is_said_to_lie(value: torch.Tensor) -> None:
    data = archive_of(value)
    found = find(data)
    assert found.form.is_meta
    assert (found.form.dtype, found.form.shape) == (value.dtype, value.shape)
    begin = found.run_begin(found.form)
    wanted = bits(value)
    assert data[begin : begin + len(wanted)] == wanted


def test_rows_of_a_tensor_lie_one_after_the_other_and_columns_do_not() -> None:
    value = torch.rand(6, 4)
    data = archive_of(value)
    found = find(data)
    begin = found.run_begin(found.form[2:5])
    wanted = bits(value[2:5])
    assert data[begin : begin + len(wanted)] == wanted
    assert found.run_begin(found.form[:, :2]) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(4, 6).t(),
        [torch.rand(2), torch.rand(2)],
        {"a": torch.rand(2)},
        torch.rand(4).to_sparse(),
        "text",
        torch.complex(torch.rand(3), torch.rand(3)).conj(),
    ],
)
def test_what_has_another_form_is_left_to_torch(value: Any) -> None:
    assert find(archive_of(value)) is None


def test_another_order_of_bytes_is_left_to_torch() -> None:
    data = archive_of(torch.rand(8))
    assert find(changed(data, {})) is not None
    assert find(changed(data, {"byteorder": b"big"})) is None


def test_a_tensor_that_claims_more_than_its_record_has_is_left_to_torch() -> None:
    claims = record(archive_of(torch.zeros(1 << 20)), "/data.pkl")
    assert find(changed(archive_of(torch.zeros(4)), {"data.pkl": claims})) is None


def test_a_compressed_record_is_refused() -> None:
    data = archive_of(torch.zeros(1 << 10))
    with pytest.raises(PackedArchiveError):
        find(changed(data, {}, compression=zipfile.ZIP_DEFLATED))


def test_a_part_of_a_file_that_ends_before_its_record_is_left_to_torch() -> None:
    data = archive_of(torch.zeros(1 << 10))
    assert find_tensor(io.BytesIO(data), 100) is None
