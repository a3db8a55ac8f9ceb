"""Answers to the calls of memd.v1: their codes, and the time that they took."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import grpc

# Upper ends, in seconds: 1 ms to 32.8 s, each twice the one before it.
SECONDS_BOUNDS = tuple(0.001 * 2**power for power in range(16))
OK = "ok"


@dataclass(kw_only=True, slots=True)
class MethodAnswers:
    """One method's. `counts`: answers by bucket of SECONDS_BOUNDS, with one more above all."""

    codes: Counter[str] = field(default_factory=Counter)
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    seconds: float = 0.0

    def cumulative(self) -> Sequence[int]:
        return list(accumulate(self.counts))


class Answers:
    """One entry a method of the services, as the caller of `counted` has it from gRPC: names that a
    client made up never come here. Any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._methods: dict[str, MethodAnswers] = {}

    @contextmanager
    def counted(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """The body answers the call. A caller that gave up has seen its own code, and not this."""
        began_s = monotonic()
        try:
            yield
        except GeneratorExit:  # gRPC closes a stream whose caller is gone
            self.note(method, "cancelled", monotonic() - began_s)
            raise
        except BaseException:
            self.note(method, _code_of(context, none="unknown"), monotonic() - began_s)
            raise
        self.note(method, _code_of(context, none=OK), monotonic() - began_s)

    def by_method(self) -> dict[str, MethodAnswers]:
        with self._lock:
            return {
                method: MethodAnswers(
                    codes=Counter(answers.codes),
                    counts=list(answers.counts),
                    seconds=answers.seconds,
                )
                for method, answers in self._methods.items()
            }

    def note(self, method: str, code: str, seconds: float) -> None:
        with self._lock:
            answers = self._methods.setdefault(method, MethodAnswers())
            answers.codes[code] += 1
            answers.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
            answers.seconds += seconds


def _code_of(context: grpc.ServicerContext, *, none: str) -> str:
    code = context.code()  # type: ignore[attr-defined]  # its types do not have it
    return none if code is None else str(code.name).lower()
