"""How soon the leases of a killed trainer are gone while a worker that it forked lives on.

Run: python tests/bench/bench_reclaim.py [--json FILE] [--runs N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from report import seconds, write_report
from tests.daemons import running_daemon
from tests.faults.test_trainer_killed import kill_and_time_reclaim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    machine, times = describe_machine(), []
    for _ in range(arguments.runs):
        with running_daemon() as daemon:
            times.append(kill_and_time_reclaim(daemon))
    write_report(
        arguments.json,
        name="bench_reclaim",
        machine=machine,
        settings={"runs": arguments.runs},
        figures=[seconds("leases gone", times)],
    )


if __name__ == "__main__":
    main()
