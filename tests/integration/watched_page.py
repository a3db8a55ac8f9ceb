"""The page of a daemon that trains two jobs, as a browser draws it. Run as a program, with Debian's
chromium-headless-shell, it draws the picture of the guide:

    python -m tests.integration.watched_page docs/pictures/page.png
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import memd_client
from tests.daemons import daemons
from tests.integration.browser import LIMIT_S, browser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.daemons import Daemon
    from tests.integration.browser import Browser

WIDTH = 512
JOBS = {"gpt-finetune": 8, "vision": 4}  # layers

# Boxes are what the browser has laid out: one without an area is not seen.
_SHOWN = """(() => {
  const isSeen = (each) => { const box = each.getBoundingClientRect();
    return box.width > 0 && box.height > 0; };
  const seen = (where, what) => [...where.querySelectorAll(what)].filter(isSeen);
  const heading = (text) => seen(document, 'h2').find((each) => each.innerText === text);
  const cards = (text) => seen(heading(text).nextElementSibling, '.card');
  const card = (each) => ({
    name: each.querySelector('h3').innerText, text: each.innerText,
    lines: seen(each, 'polyline').map((line) => ({points: line.points.numberOfItems,
      stroke: getComputedStyle(line).stroke})),
    bars: seen(each, '.bar rect').length});
  return {text: document.body.innerText, jobs: cards('Jobs').map(card),
    volumes: cards('Volumes').map(card), bars: seen(document, '.bar rect').length,
    style: getComputedStyle(document.querySelector('.card')).borderTopStyle};
})()"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one load of the page shows, and between which steps of each job it was made."""

    shown: dict[str, Any]
    steps_before: dict[str, int]
    steps_after: dict[str, int]


class Training:
    def __init__(self, daemon: Daemon, job: str, *, layers: int) -> None:
        torch.manual_seed(0)
        self.job, self.step_count = job, 0
        self._batch = torch.randn(16, WIDTH)
        self._model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.session = memd_client.connect(daemon.address, job=job, host_bytes=24 << 20)
        memd_client.offload(self._model, self.session)
        self._optimizer = memd_client.AdamW(self._model.parameters(), lr=1e-3, session=self.session)

    def close(self) -> None:
        self.session.drop_job()

    def step(self) -> None:
        (self._model(self._batch) - self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.session.commit(wait=True)
        self.step_count += 1


def url_of(daemon: Daemon) -> str:
    return daemon.ready_line.partition("metrics ")[2].partition("/metrics")[0] + "/"


def watch(daemon: Daemon, page: Browser, *, load_count: int) -> tuple[list[Look], bytes]:
    """Opens the page once, and trains while it loads itself again. The looks, and a PNG."""
    with ExitStack() as ends:
        jobs = [
            ends.enter_context(closing(Training(daemon, job, layers=layers)))
            for job, layers in JOBS.items()
        ]
        for job in jobs:
            job.step()
        looks = []
        before = _steps(jobs)
        page.open(url_of(daemon))
        while True:
            looks.append(
                Look(shown=page.evaluate(_SHOWN), steps_before=before, steps_after=_steps(jobs))
            )
            if len(looks) == load_count:
                return looks, page.picture()  # while the jobs are there
            before = _steps(jobs)
            _train_until_it_loads(jobs, page)


def _train_until_it_loads(jobs: Sequence[Training], page: Browser) -> None:
    loaded, end_s = page.load_count, time.monotonic() + LIMIT_S
    while page.load_count == loaded:
        for job in jobs:
            job.step()
        page.take_events()
        assert time.monotonic() < end_s, "the page does not load itself again"


def _steps(jobs: Sequence[Training]) -> dict[str, int]:
    return {job.job: job.step_count for job in jobs}


def main(picture: Path) -> None:
    # Its name is in the picture.
    with (
        tempfile.TemporaryDirectory(prefix="memd-", dir="/var/tmp") as data,
        daemons() as made,
        browser(Path(data) / "profile") as page,
    ):
        daemon = made.start(data=data, host="256MiB", nvme="1GiB")
        _, drawn = watch(daemon, page, load_count=15)
        picture.write_bytes(drawn)
        assert daemon.stop() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
