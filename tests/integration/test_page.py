"""The page of a daemon that trains."""

from __future__ import annotations

import re
import struct
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd.page.overview import POLICY
from tests.daemons import TIMEOUT_S
from tests.faults.small_training import batch, build, loss_of
from tests.integration import watched_page
from tests.integration.browser import WIDTH, browser, program
from tests.integration.watched_page import JOBS, url_of, watch
from tests.unit.test_page import Outline

if TYPE_CHECKING:
    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
PICTURE = "docs/pictures/page.png"


def page_with_lines(daemon: Daemon) -> Outline:
    """Once it has two rates, of three samples a second apart or more; else the last."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        page = Outline(daemon.get("/"))
        if any(tag == "polyline" for tag, _ in page.tags) or time.monotonic() > end:
            return page
        time.sleep(0.1)


def test_a_training_is_drawn(daemon: Daemon) -> None:
    assert "none was committed" in Outline(daemon.get("/")).text
    model = build()
    with memd_client.connect(daemon.address, job="drawn", host_bytes=16 << 20) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, session=session)
        for step in range(3):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.put("blob", torch.zeros(8))
        page = page_with_lines(daemon)
        assert "drawn" in page.text
        assert "3 steps: what each took" in page.text
        assert "step 3, on disk 3" in page.text
        assert "sessions 1" in page.text
        assert str(daemon.data / "memd.volume") in page.text
        assert any(tag == "polyline" for tag, _ in page.tags)
        session.drop_job()


@pytest.mark.more
def test_a_browser_draws_a_training_and_loads_it_again_by_itself(
    daemon: Daemon, tmp_path: Path
) -> None:
    if program() is None:
        pytest.skip("no Chromium is installed; `make test-more` installs it")
    with browser(tmp_path / "profile") as page:
        looks, picture = watch(daemon, page, load_count=5)
    for look in looks:
        shown = {job["name"]: step_of(job["text"]) for job in look.shown["jobs"]}
        assert set(JOBS) <= set(shown)
        for job in JOBS:
            assert look.steps_before[job] <= shown[job] <= look.steps_after[job], look
    first, last = looks[0].shown, looks[-1].shown
    for job in JOBS:
        before, after = card_of(first, job), card_of(last, job)
        assert step_of(before["text"]) < step_of(after["text"])
        assert "stalls: " in after["text"]
        assert [line["points"] > 1 for line in after["lines"]] == [True]
        assert after["lines"][0]["stroke"] == "rgb(60, 169, 81)"
        # Two quotas, each with what is free of it, and at least the latter of the stalls.
        assert after["bars"] >= 5
    (volume,) = last["volumes"]
    assert volume["name"] == str(daemon.data / "memd.volume")
    assert [line["points"] > 1 for line in volume["lines"]] == [True, True]
    assert last["style"] == "solid"  # of a card: the policy lets the page's own style through
    assert set(page.requested) == {url_of(daemon)}
    assert page.complaints == []
    assert size_of(picture)[0] == WIDTH


def card_of(shown: dict[str, Any], job: str) -> dict[str, Any]:
    (card,) = (each for each in shown["jobs"] if each["name"] == job)
    return dict(card)


def step_of(text: str) -> int:
    found = re.search(r"^step (\d+), on disk \d+$", text, re.MULTILINE)
    assert found, text
    return int(found[1])


def size_of(png: bytes) -> tuple[int, int]:
    """Of its first chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert png[12:16] == b"IHDR"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_guide_names_the_command_that_draws_its_picture() -> None:
    assert size_of((ROOT / PICTURE).read_bytes())[0] == WIDTH
    assert f"python -m {watched_page.__name__} {PICTURE}" in " ".join(
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    )


def test_the_page_says_that_it_loads_nothing(daemon: Daemon) -> None:
    with urllib.request.urlopen(url_of(daemon), timeout=30) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
