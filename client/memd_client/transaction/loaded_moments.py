"""Moments that a load gives to parameters, in the pieces that are staged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memd_client.core.staged_values import StagedValue, split_moments, staged_name
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memd_client.base.mapped_files import FileBytes, MappedFiles
    from memd_client.connection.shard import Shard
    from memd_client.transaction.moments import MomentSet


class MomentBytes(Protocol):
    """One moment of one parameter, in row-major order."""

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """Writes the elements from number `element_first` on into a one-dimensional float32
        tensor of them."""
        ...


class HeldMoment:
    """A moment that a tensor has, of any floating-point dtype. `MomentBytes`."""

    def __init__(self, moment: torch.Tensor, files: MappedFiles | None) -> None:
        """
        Args:
            files: made when the tensor was there. If one of them has its bytes, they are read from
                there.
        """
        # A view, unless its elements lie elsewhere.
        self._flat = moment.detach().reshape(-1)
        self._file: FileBytes | None = None
        if files is not None and _lies_as_stored(moment):
            self._file = files.find(moment)

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`."""
        if self._file is not None:
            source = self._file.behind(4 * element_first)
            if source.read(into.view(torch.uint8).numpy().data):
                return
        into.copy_(self._flat[element_first : element_first + into.numel()])


def _lies_as_stored(moment: torch.Tensor) -> bool:
    """Whether memory has the elements in float32 and in row-major order."""
    return (
        type(moment) is torch.Tensor
        and moment.is_cpu
        and moment.dtype == torch.float32
        and moment.is_contiguous()
        and moment.numel() > 0
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LoadedMoments:
    """The moments that one parameter gets."""

    shard: Shard
    update_count: int
    has_maximum: bool
    # By their names, of as many elements as the parameter. With each call it may look for them
    # anew. None: they are zero.
    read: Callable[[], Mapping[str, MomentBytes]] | None
    # The moments of a state_dict which are these from now on.
    whole: MomentSet | None = None


class MomentPieces:
    """The pieces of all moments of one load. They are filled in their order: those of one parameter
    are open at a time."""

    def __init__(self, loaded: Sequence[LoadedMoments], *, first_index: int) -> None:
        """
        Args:
            first_index: the number of the first value that is staged.
        """
        self._loaded = loaded
        self._staged: list[StagedValue] = []
        # For each that has bytes, and the first element of its shard in the parameter.
        self._sources: list[tuple[LoadedMoments, int]] = []
        index = first_index
        for each, part, begin in _parts(loaded):
            for piece in split_moments(part, each.update_count, has_maximum=each.has_maximum):
                if each.read is None:
                    self._staged.append(StagedValue("", 0, part.shard_id, piece))
                    continue
                name = staged_name(index)
                self._staged.append(StagedValue(name, piece.size_bytes, part.shard_id, piece))
                self._sources.append((each, begin))
                index += 1
        self._with_bytes = [value for value in self._staged if value.name]
        self._source: LoadedMoments | None = None
        self._moments: Mapping[str, MomentBytes] = {}

    @property
    def staged(self) -> Sequence[StagedValue]:
        return self._staged

    def fill(self, number: int, into: torch.Tensor) -> None:
        """Writes number `number` of those that have bytes into a tensor of them."""
        source, begin = self._sources[number]
        if source is not self._source:
            assert source.read is not None
            self._moments, self._source = source.read(), source
        piece = self._with_bytes[number].moments
        assert piece is not None
        for name, part in piece.split(into).items():
            self._moments[name].read(begin + piece.element_first, part)
        if all(each is not source for each, _ in self._sources[number + 1 : number + 2]):
            self._source, self._moments = None, {}  # before others are read


def _parts(loaded: Iterable[LoadedMoments]) -> Iterator[tuple[LoadedMoments, Shard, int]]:
    """Each shard that the daemon has of the parameters, and its first element in its parameter."""
    for each in loaded:
        begin = 0
        for part in each.shard.parts:
            yield each, part, begin
            begin += part.element_count


def update_count_of(step: Any, *, name: str) -> int:
    """`step` of torch's format, of the parameter `name`.

    Raises:
        InvalidArgument: it counts nothing.
    """
    try:
        number = float(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not number.is_integer() or not 0 <= number < 1 << 53:
        raise InvalidArgument(f"'step' of parameter {name!r} counts no updates: {step!r}")
    return int(number)
