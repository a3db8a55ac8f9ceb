"""The formats of an export's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memd.export import safetensors_files
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memd.export.file import File
    from memd_proto.v1 import job_pb2

FORMATS = ("safetensors", "dcp")


class Planner(Protocol):
    """Makes the files of a snapshot."""

    def __call__(
        self,
        shards: Sequence[job_pb2.SnapshotShard],
        *,
        metadata: Mapping[str, str],
        file_bytes_max: int,
    ) -> list[File]: ...


class RunChecksum(Protocol):
    """The CRC-32 of bytes by those of runs: `memd_client.base.checksum.RunChecksum`."""

    def add_run(self, begin: int, length: int, checksum: int) -> None: ...
    def value(self, begin: int, end: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Format:
    """How the files of an export are made."""

    planned_files: Planner
    # For files that have checksums of their bytes.
    new_checksum: Callable[[], RunChecksum] | None = None


def format_named(name: str) -> Format:
    """
    Raises:
        Refused: what the format needs is not installed.
    """
    if name == "safetensors":
        return Format(safetensors_files.planned_files)
    try:
        from memd.export import dcp_files
    except ImportError as error:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            "files of torch.distributed.checkpoint are made with PyTorch, which is not installed "
            f"where this command runs ({error}): pip install torch, or take --format "
            "safetensors",
        ) from error
    return Format(dcp_files.planned_files, dcp_files.RunChecksum)
