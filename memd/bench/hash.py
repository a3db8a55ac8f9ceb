"""Checksums of extents, beside reading the same memory and doing nothing with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.bench.figures import Figure
from memd_native import isa_names, measure_hash

if TYPE_CHECKING:
    from collections.abc import Iterator


def hash_figures(*, size: int, rounds: int) -> Iterator[Figure]:
    """GB/s of one thread, with the widest instructions present and with none."""
    rate = measure_hash(bytes=size, round_count=rounds)
    gigabytes = rate.bytes / 1e9
    for name, runs in ((isa_names()[-1], rate.hash_seconds), ("plain", rate.plain_seconds)):
        yield Figure(
            name=f"checksum, {name}",
            unit="GB/s",
            runs=[gigabytes / seconds for seconds in runs],
            limit_name="reading memory",
            limit_runs=[gigabytes / seconds for seconds in rate.read_seconds],
        )
