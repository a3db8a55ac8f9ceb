"""Real text that every machine has: the sources of Python's own standard library."""

import mmap
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES_MAX = 16 * 2**20  # a demo sees far less
_PIECE_BYTES = 2**20

# Not part of every distribution's Python (Debian ships tests apart), or not of the library.
_FOLDERS_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"}


class TextError(ValueError):
    """The text can't be trained on."""


def read_standard_library(
    folder: Path | None = None, *, bytes_max: int = TEXT_BYTES_MAX
) -> mmap.mmap:
    """Sources in the order of their names, the same for the same Python."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        (path.relative_to(folder) for path in folder.rglob("*.py")), key=lambda path: path.parts
    )
    return _mapped(
        (
            folder / path
            for path in paths
            if _FOLDERS_LEFT_OUT.isdisjoint(path.parts)
            and not path.name.startswith("_sysconfigdata")
        ),
        bytes_max,
    )


def read_text(path: Path, *, bytes_max: int = TEXT_BYTES_MAX) -> mmap.mmap:
    return _mapped([path], bytes_max)


def _mapped(paths: Iterable[Path], bytes_max: int) -> mmap.mmap:
    """The contents of the files, one after the other, as those of a file: the kernel takes back
    what is not read."""
    with tempfile.TemporaryFile() as text:
        left_bytes = bytes_max
        for path in paths:
            with path.open("rb") as file:
                while left_bytes and (piece := file.read(min(left_bytes, _PIECE_BYTES))):
                    left_bytes -= text.write(piece)
            if not left_bytes:
                break
        text.flush()
        if left_bytes == bytes_max:
            raise TextError("the text is empty: give a longer text")
        return mmap.mmap(text.fileno(), bytes_max - left_bytes, access=mmap.ACCESS_COPY)


class Batches:
    """Pieces of the text at places that depend on nothing but the seed and the step. The text is
    kept, not copied."""

    def __init__(
        self, text: bytearray | mmap.mmap, *, batch: int, sequence: int, seed: int
    ) -> None:
        if len(text) < sequence + 1:
            raise TextError(
                f"the text has {len(text)} bytes, one sequence and its target need "
                f"{sequence + 1}: give a longer text or a smaller --sequence"
            )
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._batch = batch
        self._sequence = sequence
        self._seed = seed

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `step`, each (batch, sequence), int64."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        place_count = len(self._text) - self._sequence
        places = torch.randint(place_count, (self._batch, 1), generator=generator)
        pieces = self._text[places + torch.arange(self._sequence + 1)].long()
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
