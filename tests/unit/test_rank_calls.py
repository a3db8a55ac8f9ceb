"""Calls that all ranks make: gathered, compared, carried out once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest

from memd.peers import Session
from memd.refusal import Refused, StatusCode
from memd.service.ranks import RankCall, RankCalls, merged_step, refuse_other_counts
from memd_native import StatusError
from memd_proto.v1 import session_pb2
from tests.unit.fake_native import RanksReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memd.service.call import Call
    from memd_native import Server

NAMES = ["rank 0 of 2 (process 7)", "rank 1 of 2 (process 8)"]


class Ranks:
    """The part of Server that tells who the ranks are."""

    def __init__(self) -> None:
        self.start = 1
        self.left: StatusError | None = None

    def ranks(self, session_id: int) -> RanksReport:
        del session_id
        if self.left is not None:
            raise self.left
        return RanksReport(self.start, NAMES, [1, 2])


class Waited:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.is_lost = False
        self.is_gathered = threading.Event()

    def timeout_s(self) -> float:
        return self._timeout_s

    def is_waited_for(self) -> bool:
        self.is_gathered.set()
        return not self.is_lost


class Caller:
    """Two ranks of one job, each in a thread of its own."""

    def __init__(self) -> None:
        self.server = Ranks()
        self.calls = RankCalls(cast("Server", self.server))
        self.carried_out: list[list[str]] = []
        self.failures: list[Exception] = []  # of the calls to come

    def call(
        self,
        rank: int,
        number: int,
        what: str = "x",
        timeout_s: float = 30.0,
        *,
        waited: Waited | None = None,
        request: str = "",
    ) -> Any:
        def carry_out(calls: Mapping[int, RankCall]) -> str:
            self.carried_out.append([calls[each].request for each in sorted(calls)])
            if self.failures:
                raise self.failures.pop(0)
            return f"made {number}"

        return self.calls.together(
            Session(session_id=rank + 1, job_id=5, job_name="job"),
            RankCall(
                rank=rank, session_id=rank + 1, what=what, request=request or f"{rank}.{number}"
            ),
            number,
            waited=cast("Call", waited or Waited(timeout_s)),
            carry_out=carry_out,
        )

    def both(self, number: int, asked: tuple[str, str] = ("x", "x")) -> list[Any]:
        answers: list[Any] = [None, None]

        def ask(rank: int) -> None:
            try:
                answers[rank] = self.call(rank, number, asked[rank])
            except Exception as error:  # noqa: BLE001 # it is the answer
                answers[rank] = error

        threads = [threading.Thread(target=ask, args=[rank]) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return answers


def test_a_call_is_carried_out_once_and_answers_all_ranks_and_those_that_ask_again() -> None:
    caller = Caller()
    for number in (1, 2):
        assert caller.both(number) == [f"made {number}"] * 2
    assert caller.call(1, 2) == "made 2"  # its answer was lost
    assert caller.carried_out == [["0.1", "1.1"], ["0.2", "1.2"]]
    caller.both(3)
    with pytest.raises(Refused, match="1 comes after 3"):
        caller.call(1, 1)


def test_a_rank_that_does_not_call_is_named_and_the_call_is_made_when_it_does() -> None:
    caller = Caller()
    with pytest.raises(Refused, match=r"rank 1 of 2 \(process 8\) has not x in time") as refused:
        caller.call(0, 1, timeout_s=0.05)
    assert refused.value.code == StatusCode.DEADLINE
    # The one that has given up counts no more: the other waits for it.
    with pytest.raises(Refused, match=r"rank 0 of 2 \(process 7\) has not x in time"):
        caller.call(1, 1, timeout_s=0.05)
    assert caller.both(1) == ["made 1"] * 2
    assert len(caller.carried_out) == 1


@pytest.mark.parametrize("code", [StatusCode.DEADLINE, StatusCode.UNAVAILABLE])
def test_a_call_that_ended_without_an_outcome_is_carried_out_when_all_repeat_it(
    code: StatusCode,
) -> None:
    caller = Caller()
    caller.failures = [Refused(code, "the disk is slow"), Refused(StatusCode.CAPACITY, "is full")]
    for answer in caller.both(1):
        assert isinstance(answer, Refused)
        assert str(answer) == "the disk is slow"
    # It has an outcome now, which is told again.
    for _ in (1, 2):
        for answer in caller.both(1):
            assert isinstance(answer, Refused)
            assert str(answer) == "is full"
    assert caller.carried_out == [["0.1", "1.1"]] * 2
    assert caller.both(2) == ["made 2"] * 2


def test_a_defect_of_the_call_is_raised_to_all_ranks() -> None:
    caller = Caller()
    caller.failures = [ValueError("a defect")]
    assert list(map(repr, caller.both(1))) == ["ValueError('a defect')"] * 2


def test_a_call_whose_caller_is_lost_leaves_and_takes_no_newer_one_with_it() -> None:
    caller = Caller()
    lost, newer = Waited(30.0), Waited(30.0)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(caller.call, 0, 1, waited=lost, request="lost")
        assert lost.is_gathered.wait(30.0)
        second = threads.submit(caller.call, 0, 1, waited=newer, request="newer")
        assert newer.is_gathered.wait(30.0)
        lost.is_lost = True
        with pytest.raises(Refused, match="given up"):
            first.result(30.0)
        assert caller.call(1, 1) == "made 1"
        assert second.result(30.0) == "made 1"
    assert caller.carried_out == [["newer", "1.1"]]


def test_ranks_that_make_different_calls_are_both_told() -> None:
    answers = Caller().both(1, ("closed its step", "dropped its gradients"))
    for answer in answers:
        assert isinstance(answer, Refused)
        assert "rank 0 of 2 (process 7) has closed its step" in str(answer)
        assert "rank 1 of 2 (process 8) has dropped its gradients" in str(answer)


def test_the_end_of_a_rank_ends_the_wait_of_others() -> None:
    caller = Caller()
    left = StatusError("rank 1 has ended")
    threading.Timer(0.05, lambda: setattr(caller.server, "left", left)).start()
    with pytest.raises(StatusError, match="rank 1 has ended"):
        caller.call(0, 1)


def test_ranks_that_start_again_count_anew() -> None:
    caller = Caller()
    caller.both(1)
    caller.server.start = 2
    assert caller.both(1) == ["made 1"] * 2
    assert len(caller.carried_out) == 2


def step_of(rank: int, **changes: Any) -> RankCall:
    settings = {"lr": 0.1, "beta1": 0.9, **changes.pop("settings", {})}
    group = session_pb2.StepGroup(
        settings=session_pb2.AdamSettings(**settings), shard_ids=changes.pop("shard_ids", [1, 2])
    )
    request = session_pb2.StepRequest(
        session_id=rank + 1,
        step=changes.pop("step", 4),
        call=rank + 10,
        groups=[group] * changes.pop("groups", 1),
        buffers=[session_pb2.StagedBuffer(staged_shard_id=rank, buffer_shard_id=rank + 7)],
    )
    return RankCall(rank=rank, session_id=rank + 1, what="closed its step", request=request)


def test_the_step_of_all_ranks_is_the_first_ones_with_the_buffers_of_all() -> None:
    merged = merged_step({0: step_of(0), 1: step_of(1)}, NAMES)
    assert merged.session_id == 1
    assert merged.call == 10
    assert [each.buffer_shard_id for each in merged.buffers] == [7, 8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"lr": 0.2}}, r"values of lr differ: 0\.1 on rank 0, 0\.2 on rank 1"),
        ({"settings": {"amsgrad": True}}, "values of amsgrad differ"),
        ({"shard_ids": [1]}, r"parameters \(shard 2\) differ"),
        (
            {"shard_ids": [2, 1]},
            r"orders of parameters \(place 0\) differ: shard 1 on rank 0, shard 2 on rank 1",
        ),
        ({"shard_ids": [1, 2, 2]}, "numbers of parameters differ: 2 on rank 0, 3 on rank 1"),
        ({"step": 5}, "step numbers differ: 4 on rank 0, 5 on rank 1"),
        ({"groups": 2}, "numbers of parameter groups differ: 1 on rank 0, 2 on rank 1"),
    ],
    ids=["lr", "amsgrad", "shards", "order", "twice", "number", "groups"],
)
def test_the_first_difference_between_ranks_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        merged_step({0: step_of(0), 1: step_of(1, **changes)}, NAMES)


def end_of(rank: int, count: int, *, is_without_backward: bool) -> RankCall:
    request = session_pb2.EndGradientsRequest(
        session_id=rank + 1,
        accumulated_count=count,
        is_without_backward=is_without_backward,
    )
    return RankCall(rank=rank, session_id=rank + 1, what="ended its gradients", request=request)


@pytest.mark.parametrize(
    ("counts", "have_averaged", "words"),
    [
        ((2, 2), (True, True), ""),
        ((2, 2), (True, False), ""),  # the last backward of a rank made no gradient
        ((0, 0), (False, False), ""),
        ((2, 1), (True, True), r"rank 0 of 2 \(process 7\) has made 2 .* rank 1 of 2 .* 1;"),
        ((0, 1), (True, False), r"has made 0 in no_sync\(\), and rank 1"),
        ((2, 2), (False, False), "every backward since the last step ran in no_sync"),
    ],
)
def test_ranks_end_gradients_of_as_many_backwards_of_which_one_averages(
    counts: tuple[int, int], have_averaged: tuple[bool, bool], words: str
) -> None:
    calls = {
        rank: end_of(rank, counts[rank], is_without_backward=not have_averaged[rank])
        for rank in (0, 1)
    }
    if not words:
        refuse_other_counts(calls, NAMES)
        return
    with pytest.raises(Refused, match=words):
        refuse_other_counts(calls, NAMES)
