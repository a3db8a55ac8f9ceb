"""Settings of one run of the demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DTypeName = Literal["fp32", "bf16"]
ELEMENT_BYTES: dict[DTypeName, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    parameter_count: int  # asked for; the model built is the nearest there is
    step_count: int
    dtype: DTypeName
    batch: int
    sequence: int
    seed: int
    cache_fraction: float  # of parameters and states, in memory
    host_bytes: int | None  # None: host_pool() of the model
    nvme_bytes: int | None  # None: volume() of the model
    text: Path | None  # None: Python's standard library
    data: Path | None  # None: default_parent()
    verify: bool

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]
