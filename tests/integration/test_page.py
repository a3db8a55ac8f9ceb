"""The page of a daemon that trains."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd.page.overview import POLICY
from tests.daemons import TIMEOUT_S
from tests.faults.small_training import batch, build, loss_of
from tests.unit.test_page import Outline

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Daemon


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
def test_a_browser_draws_it_and_refuses_nothing(daemon: Daemon, tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed, whose package takes minutes")
    url = daemon.ready_line.partition("metrics ")[2].partition("/metrics")[0] + "/"
    picture = tmp_path / "page.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr", "--dump-dom"]
    answer = subprocess.run(
        [*command, f"--screenshot={picture}", url],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert "host: " in answer.stdout
    assert "<svg" in answer.stdout
    # What the policy forbids, and what cannot be loaded, is told on the console.
    assert ":CONSOLE" not in answer.stderr, answer.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_says_that_it_loads_nothing(daemon: Daemon) -> None:
    url = daemon.ready_line.partition("metrics ")[2].partition("/metrics")[0]
    with urllib.request.urlopen(url + "/", timeout=30) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
