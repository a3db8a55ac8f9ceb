"""The update in memory, beside a loop with the same reads and writes and no arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.bench.figures import Figure
from memd_native import measure_adam
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DTYPES = {"fp32": types_pb2.D_TYPE_FLOAT32, "bf16": types_pb2.D_TYPE_BFLOAT16}


def adam_figures(
    *,
    dtypes: Sequence[str],
    element_count: int,
    tensor_counts: Sequence[int],
    thread_counts: Sequence[int],
    rounds: int,
) -> Iterator[Figure]:
    """GB/s of every combination, each when it is done."""
    for dtype in dtypes:
        for threads in thread_counts:
            for tensors in tensor_counts:
                rate = measure_adam(
                    dtype=_DTYPES[dtype],
                    element_count=element_count,
                    tensor_count=tensors,
                    thread_count=threads,
                    round_count=rounds,
                )
                gigabytes = rate.element_count * rate.bytes_per_element / 1e9
                yield Figure(
                    name=f"adam {dtype}, {_counted(tensors, 'tensor')}, "
                    f"{_counted(threads, 'thread')}",
                    unit="GB/s",
                    runs=[gigabytes / seconds for seconds in rate.update_seconds],
                    limit_name="memory traffic",
                    limit_runs=[gigabytes / seconds for seconds in rate.traffic_seconds],
                )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
