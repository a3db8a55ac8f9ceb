"""The ranks that train a job together, and what they tell each other beside the daemon."""

from __future__ import annotations

import pickle
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memd_client.errors import InvalidArgument, MemdError, SessionFenced
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
# An exchange sends a piece first: the length of a message, and as much of it as there is room for.
_PIECE_BYTES = 512
_LENGTH_BYTES = 8
_LIMIT_S = 1800.0  # that of a process group for which nobody has chosen one
# How long the daemon may take to see that a process has ended, and how often it is asked.
_SEEN_S = 1.0
_LOOK_S = 0.05


class Ranks:
    """This process's place among those that train a job: one alone, or several with a process group
    of gloo that is memd's own. All ranks call what talks to others, in the same order. One thread
    at a time.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        *,
        members: Sequence[int] | None = None,
        limit_s: float = _LIMIT_S,
    ) -> None:
        """`members`: the ranks of the default process group that they are, by rank of the job; by
        default all of them."""
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._members = list(range(world_size) if members is None else members)
        self._limit_s = limit_s
        self._call_count = 0
        self._ask: Callable[[], object] | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def members(self) -> list[int]:
        """Their ranks in the default process group, by rank of the job."""
        return self._members

    @property
    def limit_s(self) -> float:
        """How long they wait for each other, in every call."""
        return self._limit_s

    @property
    def are_several(self) -> bool:
        return self._world_size > 1

    @property
    def is_first(self) -> bool:
        """The rank that gives first values, loads, and writes outside of steps."""
        return self._rank == 0

    def ask_for_ended(self, ask: Callable[[], object]) -> None:
        """From now on `ask`, where others do not answer: it raises SessionFenced, which names a
        rank, if the daemon knows that this one has ended."""
        self._ask = ask

    def next_call(self) -> session_pb2.RankCall | None:
        """For a call to the daemon that all ranks make; None if there is one rank. It is the same
        until `count_call`: a rank whose call had no outcome still meets the others in it, whichever
        call it makes then."""
        if not self.are_several:
            return None
        return session_pb2.RankCall(number=self._call_count + 1)

    def count_call(self) -> None:
        """The call that `next_call` names is answered or refused, or repeated until it is."""
        self._call_count += 1

    def exchange(self, value: T, what: str) -> list[T]:
        """The values of all ranks, by rank.

        Raises:
            InvalidArgument: on all ranks, another one does something else than `what`.
            SessionFenced: a rank has ended, which it names.
            MemdError: a rank does not answer while `what`.
        """
        if not self.are_several:
            return [value]
        try:
            told = [pickle.loads(each) for each in self._gather(pickle.dumps((what, value)))]
        except RuntimeError as error:
            raise self._unanswered(what, error) from error
        for rank, (others, _) in enumerate(told):
            if others != what:
                raise InvalidArgument(
                    f"all ranks make the same calls in the same order: rank {self._rank} came here "
                    f"to {what}, and rank {rank} to {others}"
                )
        return [each for _, each in told]

    def _gather(self, data: bytes) -> list[bytes]:
        """That of all ranks, by rank: one collective if each fits into a piece, which most do, and
        two otherwise."""
        head = self._gather_pieces(len(data).to_bytes(_LENGTH_BYTES, "little") + data, _PIECE_BYTES)
        lengths = [int.from_bytes(piece[:_LENGTH_BYTES], "little") for piece in head]
        begins = [piece[_LENGTH_BYTES:] for piece in head]
        left = max(lengths) - len(begins[0])
        ends = [b""] * self._world_size
        if left > 0:
            ends = self._gather_pieces(data[len(begins[0]) :], left)
        pairs = zip(begins, ends, lengths, strict=True)
        return [(begin + end)[:length] for begin, end, length in pairs]

    def _gather_pieces(self, data: bytes, size: int) -> list[bytes]:
        """`size` bytes of each rank, zeros where it has fewer."""
        own = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
        pieces = [torch.empty_like(own) for _ in range(self._world_size)]
        # torch.distributed.all_gather() has no error for a group that it has not made itself.
        self._group.allgather([pieces], [own]).wait()
        return [piece.numpy().tobytes() for piece in pieces]

    def together(self, make: Callable[[], T], what: str) -> list[T]:
        """The results of `make`, by rank. Each rank calls its own.

        Raises:
            Exception: of `make`.
            MemdError: on the other ranks, if it has failed on one.
        """
        if not self.are_several:
            return [make()]
        made: list[T] = []
        failure: Exception | None = None
        try:
            made.append(make())
        except Exception as error:  # noqa: BLE001 # the others are told
            failure = error
        try:
            told = self.exchange((made, failure_text(failure)), what)
            self._raise_first(failure, [text for _, text in told], what)
        finally:
            failure = None  # its traceback refers to this frame, and to what `make` has leased
        return [results[0] for results, _ in told]

    def refuse_different(
        self, values: Mapping[str, Any], what: str, *, look: Callable[[], object] | None = None
    ) -> None:
        """Before `what`, which all ranks do with the same `values`. Each rank calls `look` before,
        and where it raises on one, none goes on.

        Raises:
            InvalidArgument: on all ranks, with the first difference.
            Exception: of `look`.
            MemdError: on the other ranks, if it has failed on one.
        """

        def described() -> dict[str, Any]:
            if look is not None:
                look()
            return dict(values)

        for rank, others in enumerate(self.together(described, what)):
            for name, value in values.items():
                if others.get(name) != value:
                    raise InvalidArgument(
                        f"all ranks {what} alike, and {name} differs: {value!r} on rank "
                        f"{self._rank}, {others.get(name)!r} on rank {rank}"
                    )
            # On every rank: those that are equal to this one.
            extra = sorted(set(others) - set(values))
            if extra:
                raise InvalidArgument(
                    f"all ranks {what} alike, and rank {rank} has {extra[0]}, which rank "
                    f"{self._rank} has not"
                )

    def in_order(self, make: Callable[[], T], what: str) -> T:
        """The result of `make`, which the first rank calls before all others do.

        Raises:
            Exception: of `make`.
            MemdError: on the other ranks, if it has failed on one.
        """
        if not self.are_several:
            return make()
        made: list[T] = []
        failure: Exception | None = None
        texts: list[str] = []
        for is_turn in (self.is_first, not self.is_first):
            if is_turn and not any(texts):
                try:
                    made.append(make())
                except Exception as error:  # noqa: BLE001 # the others are told
                    failure = error
            texts = self.exchange(failure_text(failure), what)
        self._raise_first(failure, texts, what)
        return made[0]

    def by_one(self, rank: int, make: Callable[[], None], what: str) -> None:
        """`rank` calls `make`, and all go on when it has.

        Raises:
            Exception: of `make`.
            MemdError: on the other ranks, if it has failed.
        """

        def make_mine() -> None:
            if rank == self._rank:
                make()

        self.together(make_mine, what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Into `tensor`, which is dense and on the CPU: the first rank's."""
        if not self.are_several:
            return
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise self._unanswered(what, error) from error

    def end(self) -> None:
        """Ends this rank's group with the others."""
        self._group = None

    def _raise_first(self, own: Exception | None, texts: Sequence[str], what: str) -> None:
        """`texts`: the failures of all ranks, of which this one's is `own`."""
        try:
            if own is not None:
                raise own
        finally:
            own = None  # its traceback refers to this frame
        for rank, text in enumerate(texts):
            if text:
                raise MemdError(f"rank {rank} of {self._world_size} could not {what}: {text}")

    @contextmanager
    def naming_ended(self) -> Iterator[None]:
        """Inside are collectives of torch, with a group of the program's own.

        Raises:
            SessionFenced: one has failed since a rank has ended, which it names.
        """
        try:
            yield
        except RuntimeError as error:
            ended = None if isinstance(error, MemdError) else self._ended()
            if ended is None:
                raise
            raise ended from error

    def _unanswered(self, what: str, error: RuntimeError) -> MemdError:
        return self._ended() or MemdError(
            f"rank {self._rank} of {self._world_size}: another rank has ended or does not answer "
            f"while they {what}; start all ranks again, and resume from the last step: {error}"
        )

    def _ended(self) -> SessionFenced | None:
        """That of the daemon, if a rank has ended. It may see this a moment later than gloo."""
        deadline = time.monotonic() + _SEEN_S
        while self._ask is not None:
            try:
                self._ask()
            except SessionFenced as ended:
                return ended
            except MemdError:
                break  # the daemon has ended too, or is older than this client
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        return None


def failure_text(failure: Exception | None) -> str:
    """How the other ranks are told of it; "" if there is none."""
    if failure is None:
        return ""
    if isinstance(failure, MemdError):
        return str(failure)
    return ": ".join(filter(None, (type(failure).__name__, str(failure))))
