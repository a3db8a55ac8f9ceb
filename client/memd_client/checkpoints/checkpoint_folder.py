"""The folder of a distributed checkpoint, as `torch.distributed.checkpoint` asks storage for it."""

from __future__ import annotations

import os
from pathlib import Path

METADATA_NAME = ".metadata"


class CheckpointFolder:
    """The base of `Writer` and `Reader`: a folder on a file system, which each save or load may
    change."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save or a load begins, in the folder `checkpoint_id` if there is one."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
