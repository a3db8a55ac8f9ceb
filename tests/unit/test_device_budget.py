"""`DeviceBudget` lends memory by torch's statistics alone."""

from __future__ import annotations

import pytest
import torch

from memd_client.device import budget

_LEAST_BYTES = 47104
_HALF_BYTES = (1_000_000 - 200_000 - _LEAST_BYTES) // 2


class Memory:
    """Torch's statistics of a device on which nobody else changes anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others_bytes = 200_000
        self.sum_bytes = 0
        self.refused_count = 0
        monkeypatch.setattr(torch.accelerator, "memory_stats", self._statistics)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", self._info)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    @property
    def _reserved_bytes(self) -> int:
        return self.others_bytes + self.sum_bytes + _LEAST_BYTES

    def _statistics(self, _: object) -> dict[str, int]:
        return {"reserved_bytes.all.current": self._reserved_bytes, "num_ooms": self.refused_count}

    def _info(self, _: object) -> tuple[int, int]:
        return 1_000_000 - self._reserved_bytes, 1_000_000

    def rounds(self, found: budget.DeviceBudget, count: int) -> list[int]:
        """Returns the bytes lent after each."""
        lent = []
        for _ in range(count):
            found.note_use()
            found.note_step(held_bytes=_LEAST_BYTES, kept_bytes=0, sum_bytes=self.sum_bytes)
            lent.append(found.lent_bytes)
        return lent


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


@pytest.fixture(autouse=True)
def lent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_STEADY_ROUNDS_CHOSEN", 0)


def chosen(size_bytes: int = _LEAST_BYTES) -> budget.DeviceBudget:
    return budget.DeviceBudget(
        torch.device("cuda", 0),
        least_bytes=_LEAST_BYTES,
        most_bytes=500_000,
        chosen_bytes=size_bytes,
    )


class TestLending:
    def test_half_of_what_others_have_not_needed_is_lent(self, memory: Memory) -> None:
        assert memory.rounds(chosen(), 1) == [_HALF_BYTES]

    def test_nothing_is_lent_before_others_have_needed_no_more(
        self, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(budget, "_STEADY_ROUNDS_CHOSEN", 2)
        assert memory.rounds(chosen(), 4) == [0, 0, _HALF_BYTES, _HALF_BYTES]

    def test_sums_are_not_what_others_need(self, memory: Memory) -> None:
        found = chosen()
        memory.rounds(found, 1)
        memory.sum_bytes = 100_000
        assert memory.rounds(found, 2) == [_HALF_BYTES] * 2

    def test_others_that_need_more_leave_less(
        self, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(budget, "_STEADY_ROUNDS_CHOSEN", 2)
        found = chosen()
        memory.rounds(found, 3)
        memory.others_bytes = 400_000
        assert memory.rounds(found, 1) == [_HALF_BYTES - 100_000]
        memory.others_bytes = 200_000
        assert memory.rounds(found, 1) == [_HALF_BYTES - 100_000]

    def test_nothing_is_lent_where_others_have_needed_all(self, memory: Memory) -> None:
        found = chosen()
        memory.others_bytes = 1_000_000
        assert memory.rounds(found, 2) == [0, 0]

    def test_copies_that_may_have_more_come_first(
        self, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(budget, "_STEADY_ROUNDS", 1)
        found = budget.DeviceBudget(
            torch.device("cuda", 0),
            least_bytes=_LEAST_BYTES,
            most_bytes=2_000_000,
            chosen_bytes=None,
        )
        assert memory.rounds(found, 30) == [0] * 30
        assert found.size_bytes > _LEAST_BYTES

    def test_what_ran_out_is_lent_again_ever_later(self, memory: Memory) -> None:
        found = chosen()
        found._rounds_needed = 1
        delays = []
        for _ in range(3):
            lent = memory.rounds(found, 40)
            delays.append(lent.index(_HALF_BYTES))
            memory.refused_count += 1
            found.note_refusals()
            assert found.lent_bytes == 0
        assert delays == [1, 1 + 2, 1 + 4]
