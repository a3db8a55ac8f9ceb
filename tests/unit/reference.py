"""Writes docs/reference.md: the settings and metrics, as the sources have them.

Run: python -m tests.unit.reference
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

from memd import config
from memd.metrics import DaemonCollector
from memd.peers import Peers
from memd.service.answers import OK
from memd.service.call import Gate
from tests.unit.fake_native import FakeServer, as_server

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
HEAD = """# Reference

`make regenerate` writes this page from the sources.
"""


def table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def comments() -> dict[str, str]:
    """What stands above each field of `Settings`."""
    found = {}
    source = inspect.getsource(config.Settings)
    for comment, name in re.findall(r"((?:^    # .*\n)+)^    (\w+): ", source, re.MULTILINE):
        found[name] = " ".join(line.strip().removeprefix("# ") for line in comment.splitlines())
    return found


def settings() -> str:
    what = comments()
    rows = [
        (
            f"`{name}`",
            f"`MEMD_{name.upper()}`",
            f"`{default}`",
            "SIGHUP" if name in config.RELOADABLE else "start",
            what[name],
        )
        for name, default in config.shown(config.Settings()).items()
    ]
    return table(("setting", "variable", "default", "read at", "what"), rows)


def metrics() -> str:
    server, peers = FakeServer(), Peers()
    job = server.open_job("job", uid=1)
    server.attach(job.job_id)
    gate = Gate(peers)
    gate.answers.note("Attach", OK, 0.0)
    rows = []
    for family in DaemonCollector(as_server(server), peers=peers, gate=gate).collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        rows.append(
            (
                f"`{name}`",
                family.type,
                ", ".join(f"`{label}`" for label in labels),
                family.documentation,
            )
        )
    return table(("metric", "type", "labels", "what"), rows)


def generate() -> str:
    return "\n".join(
        [
            HEAD,
            "## Settings\n",
            "Flags of `memd serve` come first, then variables, then fragments "
            "`conf.d/*.toml`\nbeside the TOML file, a later name before an earlier one, then the "
            "file.\n",
            settings(),
            "\n## Metrics\n",
            metrics(),
            "\n`process_*` are those of every Prometheus client: processor time, memory, open "
            "descriptors and the start of the\ndaemon's process.\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(generate(), encoding="utf-8")
