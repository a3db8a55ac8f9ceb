"""How soon `memd serve` is ready on a volume that exists, and how much of that its pool takes.

Run: python tests/bench/bench_start.py [--json FILE] [--runs N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from report import byte_count, seconds, write_report
from tests.daemons import daemons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    machine = describe_machine()
    ready, prefault, anonymous = [], [], []
    # The first daemon makes the volume and leaves bytecode behind, as an installation has it.
    environ = {"PYTHONDONTWRITEBYTECODE": ""}
    with daemons() as made:
        made.start(name="start", environ=environ).stop()
        for _ in range(arguments.runs):
            began = time.perf_counter()
            daemon = made.start(name="start", environ=environ)
            ready.append(time.perf_counter() - began)
            anonymous.append(daemon.rss_anon_bytes())
            daemon.stop()
            log = daemon.log.read_text()
            prefault.append(float(log.partition("prefault_seconds=")[2].split()[0]))
    write_report(
        arguments.json,
        name="bench_start",
        machine=machine,
        settings={"runs": arguments.runs},
        figures=[
            seconds("ready", ready),
            seconds("of it, touching the pool", prefault),
            byte_count("anonymous memory", anonymous),
        ],
    )


if __name__ == "__main__":
    main()
