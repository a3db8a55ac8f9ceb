"""Moments that a load gives to parameters, in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memd_client.core.moving_moments import split_moments
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memd_client.base.mapped_files import FileBytes, MappedFiles
    from memd_client.connection.shard import Shard
    from memd_client.core.leases import Leases
    from memd_client.core.moving_moments import MomentPiece
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

    def in_file(self, element_first: int) -> FileBytes | None:
        """The bytes from there on, if a file has them."""
        return self._file.behind(4 * element_first) if self._file is not None else None

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`."""
        source = self.in_file(element_first)
        if source is not None and source.read(into.view(torch.uint8).numpy().data):
            return
        into.copy_(self._flat[element_first : element_first + into.numel()])


class FittingMaster:
    """The fp32 values of a bfloat16 parameter, which must be those of the values that it has.
    `MomentBytes`."""

    def __init__(self, master: MomentBytes, shard: Shard, leases: Leases, *, advice: str) -> None:
        """
        Args:
            advice: ends the message about others.
        """
        self._master = master
        self._shard = shard
        self._leases = leases
        self._advice = advice

    def read(self, element_first: int, into: torch.Tensor) -> None:
        """As of `MomentBytes`, of elements of one shard of the daemon.

        Raises:
            InvalidArgument: they are the fp32 values of other ones.
        """
        self._master.read(element_first, into)
        part, begin = self._part(element_first)
        value = self._leases.value(part).view(-1)
        first = element_first - begin
        other = _other_than_published(into, value[first : first + into.numel()])
        del value  # the lease
        if other is not None:
            raise InvalidArgument(
                f"parameter {self._shard.name!r} has other bfloat16 values than training makes of "
                f"its fp32 values in the files; {self._advice}: element {element_first + other}"
            )

    def _part(self, element: int) -> tuple[Shard, int]:
        """The shard of the daemon that has it, and its first element in the parameter."""
        begin = 0
        for part in self._shard.parts:
            if element < begin + part.element_count:
                return part, begin
            begin += part.element_count
        raise AssertionError((self._shard.name, element))


def _other_than_published(master: torch.Tensor, value: torch.Tensor) -> int | None:
    """The first element of bfloat16 that a step does not publish of its fp32 value. Ties go away
    from zero, and any NaN is published as any other."""
    published = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    fits = torch.where(master.isnan(), value.isnan(), published == value.view(torch.int16))
    if bool(fits.all()):
        return None
    return int((~fits).nonzero()[0])


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
    has_master: bool = False  # `read` has it beside the moments


class MomentPieces:
    """The pieces of all moments of one load. They are filled in their order: those of one parameter
    are open at a time."""

    def __init__(self, loaded: Sequence[LoadedMoments]) -> None:
        self._pieces: list[MomentPiece] = []
        # For each, and the first element of its shard in the parameter.
        self._sources: list[tuple[LoadedMoments, int]] = []
        self._zeros: list[MomentPiece] = []
        for each, part, begin in _parts(loaded):
            for piece in _pieces(each, part):
                if each.read is None:
                    self._zeros.append(piece)
                    continue
                self._pieces.append(piece)
                self._sources.append((each, begin))
        self._source: LoadedMoments | None = None
        self._moments: Mapping[str, MomentBytes] = {}

    @property
    def pieces(self) -> Sequence[MomentPiece]:
        """Those that have bytes."""
        return self._pieces

    @property
    def zeros(self) -> Sequence[MomentPiece]:
        """Those that will be zero."""
        return self._zeros

    def fill(self, number: int, into: torch.Tensor) -> None:
        """Writes number `number` of those that have bytes into a tensor of them."""
        source, begin = self._sources[number]
        if source is not self._source:
            assert source.read is not None
            self._moments, self._source = source.read(), source
        piece = self._pieces[number]
        for name, part in piece.split(into).items():
            self._moments[name].read(begin + piece.element_first, part)
        if all(each is not source for each, _ in self._sources[number + 1 : number + 2]):
            self._source, self._moments = None, {}  # before others are read


def _pieces(loaded: LoadedMoments, part: Shard) -> Iterator[MomentPiece]:
    return split_moments(
        part,
        loaded.update_count,
        has_maximum=loaded.has_maximum,
        has_master=loaded.has_master,
    )


def moment_reads(
    loaded: Iterable[LoadedMoments],
) -> Iterator[tuple[LoadedMoments, str, int, int]]:
    """All that `MomentPieces` reads, in its order: the name of the moment, the number of the first
    element in the parameter, and how many."""
    for each, part, begin in _parts(loaded):
        if each.read is None:
            continue
        for piece in _pieces(each, part):
            for name in piece.names:
                yield each, name, begin + piece.element_first, piece.element_count


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
