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
# Parameters of these are stored as bytes and never updated. Others have no copy kernel, or a scale
# beside their bytes.
FROZEN_DTYPES: frozenset[torch.dtype] = frozenset(
    (
        *(torch.float16, torch.float64, torch.complex64, torch.complex128, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
)
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
