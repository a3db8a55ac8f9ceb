"""deploy/prometheus and deploy/grafana, seen by a Prometheus that scrapes a daemon in training."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.daemons import Daemon, Daemons

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "memd.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
GUIDE = Path(__file__).parents[2] / "docs" / "service.md"
TIMEOUT_S = 60.0
# Grafana fills these in; the scrapes here are a second apart.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$memd_job": ".*"}
TRAINER = """
    import itertools, torch, memd_client
    session = memd_client.connect(job="watched", durability="every:5")
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(24)])
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-4)
    for _ in itertools.count():
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return board


def expressions() -> dict[str, str]:
    """Of every target, by the title of its panel; two of one panel have numbers."""
    found = {}
    for panel in dashboard()["panels"]:
        for number, target in enumerate(panel.get("targets", ())):
            found[f"{panel['title']} {number}"] = target["expr"]
    return found


def test_panels_have_places_and_names_of_their_own() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36  # data sources by uid
    panels = board["panels"]
    for values in ([panel["id"] for panel in panels], [panel["title"] for panel in panels]):
        assert len(values) == len(set(values))
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        own = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & own, panel["title"]
        cells |= own


def test_every_panel_asks_the_data_source_that_the_reader_has_chosen() -> None:
    board = dashboard()
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert set(variables) == {"datasource", "instance", "memd_job"}
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["instance"]["datasource"] == variables["memd_job"]["datasource"] == chosen
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    for panel in panels:
        assert panel["datasource"] == chosen
        assert panel["targets"]
        assert all(target["datasource"] == chosen for target in panel["targets"])


def metrics(text: str) -> set[str]:
    found = set(re.findall(r"\bmemd_[a-z]\w*", text)) - {"memd_job"}
    return {re.sub("_(?:bucket|sum|count)$", "", name) for name in found}


def test_every_metric_of_a_job_or_the_daemon_that_is_drawn_exists() -> None:
    listed = set(re.findall(r"^\| `(memd_\w+)` \|", reference.generate(), re.MULTILINE))
    assert metrics(" ".join(expressions().values())) <= listed


def test_every_metric_of_the_alerts_and_of_the_guide_is_drawn() -> None:
    drawn = metrics(" ".join(expressions().values()))
    for text in (RULES, GUIDE):
        named = metrics(text.read_text(encoding="utf-8")) - {"memd_client"}
        assert len(named) >= 10
        assert not named - drawn


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **query: str) -> Any:
        """The data of the answer; an error has Prometheus's own words."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found


@contextmanager
def prometheus(daemon: Daemon, folder: Path) -> Iterator[Prometheus]:
    found = re.search(r"metrics http://([^ ,/]+)/metrics", daemon.ready_line)
    assert found, daemon.ready_line
    scraped = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    changed = scraped.replace("127.0.0.1:9464", found[1]).replace("15s", "1s").replace("10s", "1s")
    (folder / "prometheus.yml").write_text(changed, encoding="utf-8")
    shutil.copy(RULES, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


@contextmanager
def trainer(daemon: Daemon) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER)],
        env={"MEMD_ADDRESS": daemon.address, "PATH": "/usr/bin:/bin"},
    )
    try:
        yield
        assert process.poll() is None, "the trainer ended by itself"
    finally:
        process.kill()
        process.wait()


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if holds():
                return
        except OSError:
            pass  # Prometheus has not begun to listen
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.mark.more
def test_every_panel_shows_a_series_of_a_daemon_that_trains(
    daemons: Daemons, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed; `make test` fetches it")
    daemon = daemons.start(host="64MiB", nvme="512MiB")
    with trainer(daemon), prometheus(daemon, tmp_path) as watching:
        until(lambda: bool(watching.series("memd_committed_step > 10")), "no step is scraped")
        # Rates need several scrapes, and a commit to disk between two of them.
        drawn = expressions()
        empty = dict(drawn)

        def all_have_series() -> bool:
            for name in list(empty):
                if watching.series(empty[name]):
                    del empty[name]
            return not empty

        until(all_have_series, f"no series: {empty}")

        def evaluated() -> list[dict[str, Any]]:
            listed: list[dict[str, Any]] = watching.ask("rules")["groups"][0]["rules"]
            return listed

        until(lambda: all(rule["health"] != "unknown" for rule in evaluated()), "no evaluation")
        rules = evaluated()
        assert {rule["health"] for rule in rules} == {"ok"}
        assert len(rules) == RULES.read_text(encoding="utf-8").count("- alert:")
        assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
