"""Trains on the simulated device with memd, in every cell or in those of the cover, each time with
other dice. No run races, and each has the bits of training without memd.

Run: python -m tests.soak.device_cells --count 324 [--cover] [--first SEED] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from memd_client.parameters import saved_activations
from tests.daemons import running_daemon
from tests.device.cells import SMALL_ACTIVATION_BYTES, Cell, cover, every_cell
from tests.device.models import are_equal
from tests.device.offloaded import reference
from tests.device.simulation import SIM
from tests.device.trained import trained

if TYPE_CHECKING:
    from torch import Tensor

    from tests.daemons import Daemon

PROGRESS_S = 600.0  # no run takes so long, even beside others
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    cells: int
    seeds: int  # of each cell, one less for some where `runs` is no multiple of the cells
    runs: int
    failed: int
    failures: tuple[str, ...]  # the first ones
    seconds: float


@cache
def _expected(cell: Cell) -> list[Tensor]:
    return reference(cell.model, cell.loop, "sim")


def _failure(daemon: Daemon, cell: Cell, seed: int) -> str | None:
    """What is wrong about this run."""
    try:
        expected = _expected(cell)
        SIM.seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saved_activations, "SMALL_BYTES", SMALL_ACTIVATION_BYTES)
            found = trained(daemon, patch, cell.model, cell.budget, cell.loop)
    except Exception:
        return traceback.format_exc(limit=-4)
    return None if are_equal(found, expected) else "other bits than without memd"


def train(cells: tuple[Cell, ...], count: int, first: int) -> Outcome:
    """Each cell with the first seed, then each with the next."""
    began = time.monotonic()
    runs = ((cell, seed) for seed in itertools.count(first) for cell in cells)
    failures: list[str] = []
    with running_daemon() as daemon:
        for cell, seed in itertools.islice(runs, count):
            faulthandler.dump_traceback_later(PROGRESS_S, exit=True)
            failure = _failure(daemon, cell, seed)
            if failure is not None:
                failures.append(f"{cell}, seed {seed}: {failure}")
                print(failures[-1], flush=True)
        faulthandler.cancel_dump_traceback_later()
    return Outcome(
        cells=len(cells),
        seeds=-(-count // len(cells)),
        runs=count,
        failed=len(failures),
        failures=tuple(failures[:_SHOWN]),
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=324, help="runs")
    parser.add_argument("--cover", action="store_true", help="only the cells of the cover")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # bits of sums depend on it
    gc.freeze()
    outcome = train(cover() if arguments.cover else every_cell(), arguments.count, arguments.first)
    print(json.dumps(asdict(outcome)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
