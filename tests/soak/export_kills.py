"""kill -9 of the command or of the daemon, at random moments of an export of a snapshot.

The folder is whole or absent. The next command goes on with what is there, and one whose daemon is
killed waits for the next daemon.

Run: python -m tests.soak.export_kills --killed command|daemon [--format safetensors|dcp] --count 10
[--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.daemons import daemons
from tests.faults.exports import kill_commands, kill_daemons, make_job
from tests.faults.restarts import Restarts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--killed", choices=("command", "daemon"), required=True)
    parser.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    with daemons() as made, tempfile.TemporaryDirectory(prefix="memd-") as folder:
        restarts = Restarts(made, "exports", made.start(name="exports"))
        given = {"count": arguments.count, "seed": arguments.seed, "file_format": arguments.format}
        if arguments.killed == "command":
            make_job(restarts.daemon)
            seen = kill_commands(restarts.daemon, Path(folder), **given)
        else:
            seen = kill_daemons(restarts, Path(folder), **given)
        restarts.settle().stop()
    report = {
        "killed": arguments.killed,
        **given,
        **seen,
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
