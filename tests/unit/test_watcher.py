"""Changes that no call brings are told once, by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from memd.watcher import Watcher
from tests.unit.fake_native import FakeServer, ScrubStatistics, as_server

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    statistics = server.statistics
    server.scrub = ScrubStatistics(errors=0, pass_count=0)  # type: ignore[attr-defined]

    def with_scrub() -> object:
        found = statistics()
        found.scrub = server.scrub  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(server, "statistics", with_scrub)
    return server


@pytest.fixture
def look(server: FakeServer, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The events of the next look, with their shards, count of errors or reason."""
    watcher = Watcher(as_server(server))
    caplog.set_level(logging.INFO)

    def look() -> list[str]:
        caplog.clear()
        watcher.look()
        return [
            f"{record.levelname} {record.getMessage().partition(':')[0]}: "
            + str(next(vars(record)[key] for key in KEYS if key in vars(record)))
            for record in caplog.records
        ]

    return look


KEYS = ("shards", "errors", "reason")


def test_a_fence_is_told_once(server: FakeServer, look: Callable[[], list[str]]) -> None:
    assert look() == []
    server.fence_reason = "sync of /volume: Input/output error"
    assert look() == ["ERROR volumes fenced: sync of /volume: Input/output error"]
    assert look() == []


def test_a_load_that_broke_off_is_told(server: FakeServer, look: Callable[[], list[str]]) -> None:
    server.load_notes.append("job gpt went back to what it was before")
    assert look() == ["WARNING a load broke off: job gpt went back to what it was before"]
    assert look() == []


def test_shards_are_named_when_they_are_lost_or_cannot_be_read(
    server: FakeServer, look: Callable[[], list[str]]
) -> None:
    job = server.open_job("gpt", uid=0)
    job.lost_shards.append("wte")  # before this daemon's first look
    assert look() == ["ERROR shards lost: wte"]
    job.lost_shards.append("wpe")
    job.unreadable_shards += ["h.1", "h.0"]
    assert look() == ["ERROR shards lost: wpe", "WARNING shards unreadable: h.0,h.1"]
    assert look() == []
    job.unreadable_shards.clear()
    job.lost_shards.append("h.1")
    assert look() == ["ERROR shards lost: h.1", "INFO shards readable again: h.0"]


def test_of_very_many_shards_the_first_are_named_and_all_are_counted(
    server: FakeServer, look: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    job = server.open_job("gpt", uid=0)
    job.lost_shards += [f"shard{number:04}" for number in range(1000)]
    (told,) = look()
    assert told.count("shard0") == 20
    assert vars(caplog.records[0])["count"] == 1000


def test_a_scrub_s_findings_and_the_end_of_each_pass_are_told(
    server: FakeServer, look: Callable[[], list[str]]
) -> None:
    def found(errors: int, passes: int) -> None:
        scrub = ScrubStatistics(errors=errors, pass_count=passes)
        server.scrub = scrub  # type: ignore[attr-defined]

    found(errors=0, passes=1)
    assert look() == ["INFO scrub pass ended: 0"]
    found(errors=2, passes=1)
    assert look() == ["ERROR scrub found damage: 2"]
    found(errors=3, passes=2)
    assert look() == ["ERROR scrub found damage: 1", "INFO scrub pass ended: 3"]
    assert look() == []
