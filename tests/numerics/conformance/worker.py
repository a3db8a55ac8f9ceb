"""Trains the programs that it reads, one a line, and writes a line for each cell."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.numerics.conformance.cells import Cell, bench, by_plain_torch
from tests.numerics.conformance.program import Program


def main(folder: Path) -> None:
    # Whatever prints goes to the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with bench(folder) as trained:
        for line in sys.stdin:
            asked = json.loads(line)
            program = Program(**asked["program"])
            expected = by_plain_torch(program)
            for pool in asked["pools"]:
                verdict = trained.verdict(Cell(program, pool), expected)
                print(json.dumps(asdict(verdict)), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
