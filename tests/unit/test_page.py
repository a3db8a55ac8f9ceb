"""The page at `/`: what it draws, and that it loads and runs nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from memd.page.history import SAMPLES_MAX, History, Sample, growth, rates
from memd.page.overview import Overview
from memd.page.pictures import Part, bar, line
from memd_native import ShardSpec
from tests.unit.fake_native import FakeServer, as_server

if TYPE_CHECKING:
    from collections.abc import Callable

VOID = {"meta", "rect", "polyline", "br"}


class Outline(HTMLParser):
    """Fails where a tag is not closed; keeps tags, their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta" and not (tag in VOID and self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def page(server: FakeServer, now: list[float]) -> Callable[[], Outline]:
    overview = Overview(as_server(server), is_ready=lambda: True, clock=lambda: now[0])
    return lambda: Outline(overview.html())


def test_a_daemon_without_jobs_has_a_page(page: Callable[[], Outline]) -> None:
    outline = page()
    assert "ready, up 0 min 0 s" in outline.text
    assert "host: 32 MiB of 64 MiB used" in outline.text
    assert ("meta", {"http-equiv": "refresh", "content": "2"}) in outline.tags


def test_the_page_loads_and_runs_nothing(server: FakeServer, page: Callable[[], Outline]) -> None:
    job = server.open_job("gpt", uid=0)
    job.name = '<script src="http://evil">"\'&'
    server.fence_reason = "<b>sync</b> of /volume"
    outline = page()
    tags = {tag for tag, _ in outline.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "b", "image", "use"}
    for _, attributes in outline.tags:
        assert not {"src", "srcset", "onload", "xlink:href"} & set(attributes)
        assert (attributes.get("href") or "/").startswith("/")
    style = Overview(as_server(server), is_ready=lambda: True).html().partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert job.name in outline.text, "as text"
    assert "not committing: <b>sync</b> of /volume" in outline.text


def test_jobs_are_drawn_with_what_is_wrong_with_them(
    server: FakeServer, page: Callable[[], Outline]
) -> None:
    job = server.open_job("gpt", uid=0)
    grant = server.attach(job.job_id)
    server.declare(grant.session_id, [ShardSpec("wte.weight", 1, 1, [256, 64], 2)])
    assert "shards lost" not in page().text
    job.lost_shards.append("wte.weight")
    job.committed_step = 7
    text = page().text
    assert "gpt" in text
    assert "of root, " in text
    assert "1 shards lost" in text
    assert "step 7, on disk 0" in text
    assert "stalls: " in text


def test_rates_are_those_between_two_looks(
    server: FakeServer,
    page: Callable[[], Outline],
    now: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = server.open_job("gpt", uid=0)
    moved = [8192]
    statistics = server.statistics

    def growing() -> Any:
        found = statistics()
        found.devices[0].read.bytes = moved[0]
        return found

    monkeypatch.setattr(server, "statistics", growing)
    assert "…" in page().text
    for _ in range(3):
        now[0] += 2
        moved[0] += 3 << 20
        job.committed_step += 5
        outline = page()
    assert "read 1.5 MiB/s" in outline.text
    assert "steps 2.50/s" in outline.text
    lines = [attributes["points"] for tag, attributes in outline.tags if tag == "polyline"]
    assert lines, "of three rates there is a line"


def test_a_bar_s_parts_are_as_long_as_their_values() -> None:
    parts = [
        Part(name="a", value=25, shown="25 B", color="#111"),
        Part(name="b", value=50, shown="50 B", color="#222"),
    ]
    drawn = bar(parts, whole=100, label="used", width=200)
    found = re.findall(r'x="([\d.]+)" width="([\d.]+)"', drawn)
    assert found == [("0.0", "50.0"), ("50.0", "100.0")]
    assert "a: 25 B" in drawn
    assert bar([], whole=0, label="nothing")


def test_a_line_s_highest_point_is_its_largest_value() -> None:
    drawn = line([(10, 0), (20, 4), (30, 2)], label="read", shown="2 B/s", color="#111")
    assert 'points="0.0,34.0 120.0,2.0 240.0,18.0"' in drawn
    assert "polyline" not in line([(1, 1)], label="read", shown="", color="#111")
    assert "polyline" in line([(1, 0), (2, 0)], label="read", shown="", color="#111")


def test_a_counter_that_began_anew_has_no_rate() -> None:
    samples = [Sample(at_s=at, step_count=count) for at, count in ((0, 5), (1, 7), (2, 1), (3, 2))]
    assert rates(samples, lambda sample: sample.step_count) == [(1, 2.0), (3, 1.0)]
    assert growth(samples, lambda sample: sample.step_count) == 2
    assert growth(samples[:1], lambda sample: sample.step_count) == 5


def test_readers_share_samples_and_old_ones_go(server: FakeServer) -> None:
    now = [0.0]
    history = History(lambda: now[0])
    statistics: Any = server.statistics()
    for _ in range(5):  # as many readers at once
        assert len(history.with_now(statistics)) <= 2
    for _ in range(3 * SAMPLES_MAX):
        now[0] += 2
        samples = history.with_now(statistics)
    assert len(samples) == SAMPLES_MAX + 1
    now[0] += 3600
    assert len(history.with_now(statistics)) == 1


def test_the_largest_of_many_jobs_have_parts_of_their_own(
    server: FakeServer, page: Callable[[], Outline], monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = server.statistics
    info = server.open_job("gpt", uid=0)
    template = statistics().jobs[0]

    def many() -> Any:
        found = statistics()
        found.jobs = [
            replace(
                template,
                job=replace(info, name=f"job{number}", job_id=number, host_bytes_used=number),
            )
            for number in range(30)
        ]
        return found

    monkeypatch.setattr(server, "statistics", many)
    text = page().text
    assert "job29 29 B" in text
    assert "job23 23 B" in text
    assert "job22 22 B" not in text
    assert "other jobs " in text
