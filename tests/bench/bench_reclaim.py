"""How soon the leases of a killed trainer are gone while a worker that it forked lives on.

Run: python tests/bench/bench_reclaim.py [--json FILE] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from tests.daemons import running_daemon
from tests.faults.test_trainer_killed import JOB, kill_and_time_reclaim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    seconds = []
    for _ in range(arguments.runs):
        with running_daemon() as daemon:
            seconds.append(kill_and_time_reclaim(daemon))
    report = {
        "machine": describe_machine(),
        "job": JOB,
        "leases_gone_seconds": {
            "median": statistics.median(seconds),
            "max": max(seconds),
            "runs": seconds,
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
