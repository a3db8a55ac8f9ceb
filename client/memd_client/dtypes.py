"""Element types of shards: torch's names and the protocol's numbers."""

from __future__ import annotations

import torch

from memd_client.errors import InvalidArgument
from memd_proto.v1 import types_pb2

DTYPE_NUMBERS: dict[torch.dtype, types_pb2.DType] = {
    torch.float32: types_pb2.D_TYPE_FLOAT32,
    torch.bfloat16: types_pb2.D_TYPE_BFLOAT16,
    torch.float16: types_pb2.D_TYPE_FLOAT16,
    torch.float64: types_pb2.D_TYPE_FLOAT64,
    torch.int8: types_pb2.D_TYPE_INT8,
    torch.int16: types_pb2.D_TYPE_INT16,
    torch.int32: types_pb2.D_TYPE_INT32,
    torch.int64: types_pb2.D_TYPE_INT64,
    torch.uint8: types_pb2.D_TYPE_UINT8,
    torch.bool: types_pb2.D_TYPE_BOOL,
}
_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}


def dtype_number(dtype: torch.dtype, *, name: str) -> types_pb2.DType:
    """The protocol's number of `dtype`. Errors mention `name`, the tensor's."""
    number = DTYPE_NUMBERS.get(dtype)
    if number is None:
        raise InvalidArgument(
            f"memd does not store {dtype}: {name}; it stores "
            f"{', '.join(str(known) for known in DTYPE_NUMBERS)}"
        )
    return number


def torch_dtype(number: int) -> torch.dtype:
    """The torch dtype of the protocol's number."""
    return _DTYPES[number]
