"""The conformance matrix: programs with memd against the same programs with plain PyTorch.

The exit code is 1 if a cell is neither equal, nor refused by design, nor an error of plain PyTorch.
Verdicts are kept under build: with --go-on, cells that were right in an earlier run keep theirs.

Run: python -m tests.numerics.conformance [--ci | --count N] [--only TEXT…] [--go-on] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from memd.demo.folder import volume_folder
from tests.daemons import BUILD
from tests.numerics.conformance import document
from tests.numerics.conformance.cells import EQUAL, VOLUME_BYTES, WRONG, Cell, Verdict
from tests.numerics.conformance.selection import cells, ci_cells, cover_first

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.numerics.conformance.program import Program

ROOT = Path(__file__).parents[3]
KEPT = BUILD / "conformance.json"
WORKERS = 2
# Compilers take half a minute for a program on a busy machine.
ANSWER_SECONDS_MAX = 240.0
LOG_BYTES_SHOWN = 2000


class Worker:
    """A process with a daemon of its own. It is started when there is work, and again when it
    died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._start_count = 0

    def verdicts(self, program: Program, pools: Sequence[str]) -> dict[Cell, Verdict]:
        process = self._process or self._start()
        assert process.stdin is not None
        asked = {"program": asdict(program), "pools": pools}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        found: dict[Cell, Verdict] = {}
        for pool in pools:
            found[Cell(program, pool)] = verdict = self._answer(process)
            if self._process is None:
                return found | {
                    Cell(program, other): Verdict(WRONG, f"not run: {verdict.text}")
                    for other in pools
                    if Cell(program, other) not in found
                }
        return found

    def end(self) -> None:
        """Its daemon ends with it."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        self._start_count += 1
        data = self._folder / str(self._start_count)
        data.mkdir(parents=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.numerics.conformance.worker", str(data)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._process

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._start_count}.log"

    def _answer(self, process: subprocess.Popen[str]) -> Verdict:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            is_late = not selector.select(ANSWER_SECONDS_MAX)
        line = "" if is_late else process.stdout.readline()
        if line:
            return Verdict(**json.loads(line))
        process.kill()
        process.communicate()
        self._process = None
        if is_late:
            return Verdict(WRONG, f"no answer in {ANSWER_SECONDS_MAX:.0f} s")
        log = self._log.read_text(errors="replace")[-LOG_BYTES_SHOWN:]
        print(log, file=sys.stderr)
        return Verdict(WRONG, f"the process ended with {process.returncode}")


def kept_verdicts() -> dict[Cell, Verdict]:
    """Those of an earlier run that were right."""
    if not KEPT.exists():
        return {}
    known = {str(cell): cell for cell in cells()}
    kept = {name: Verdict(**fields) for name, fields in json.loads(KEPT.read_text()).items()}
    return {known[name]: kept[name] for name in kept if name in known and kept[name].is_right}


def keep(verdicts: Mapping[Cell, Verdict]) -> None:
    KEPT.write_text(json.dumps({str(cell): asdict(each) for cell, each in verdicts.items()}))


def run(chosen: Sequence[Cell], verdicts: dict[Cell, Verdict]) -> None:
    """Adds to `verdicts` and prints a line for each cell as it is known. A program's pools share
    its reference."""
    pools: dict[Program, list[str]] = {}
    for cell in chosen:
        pools.setdefault(cell.program, []).append(cell.pool)

    def train(program: Program) -> None:
        worker = workers.get()
        try:
            found = worker.verdicts(program, pools[program])
        finally:
            workers.put(worker)
        for cell, verdict in found.items():
            verdicts[cell] = verdict
            shown = f"{verdict.kind:8}{cell!s:64}{verdict.read_bytes / 2**20:6.1f} MiB read"
            print(f"{shown}  {verdict.text}".rstrip(), flush=True)

    BUILD.mkdir(exist_ok=True)
    with volume_folder(BUILD, bytes_needed=WORKERS * VOLUME_BYTES) as folder:
        workers: SimpleQueue[Worker] = SimpleQueue()
        for number in range(WORKERS):
            workers.put(Worker(folder / str(number)))
        try:
            threads = ThreadPoolExecutor(WORKERS)
            try:
                for done in [threads.submit(train, program) for program in pools]:
                    done.result()
                    keep(dict(verdicts))
            finally:
                threads.shutdown(cancel_futures=True)  # a signal may have ended the loop
        finally:
            for _ in range(WORKERS):
                workers.get().end()


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    chosen = ci_cells() if arguments.ci else cover_first()[: arguments.count]
    if arguments.only:
        chosen = [cell for cell in chosen if any(text in str(cell) for text in arguments.only)]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="a pairwise cover and all of fp32, 1/4")
    parser.add_argument("--count", type=int, help="the first cells, those of the cover before all")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cells whose name has a text")
    parser.add_argument("--write", action="store_true", help=f"docs/{document.PATH.name}")
    parser.add_argument("--go-on", action="store_true", help="only what was not right before")
    parser.add_argument("--json", type=Path, help="a report")
    parser.add_argument("--list", action="store_true", help="the chosen cells, without a run")
    arguments = parser.parse_args()
    chosen = chosen_cells(arguments)
    if arguments.list:
        print("\n".join(map(str, chosen)))
        return 0
    began = time.monotonic()
    kept = kept_verdicts() if arguments.go_on else {}
    verdicts = dict(kept)
    run([cell for cell in chosen if cell not in kept], verdicts)
    counts = Counter(verdict.kind for verdict in verdicts.values())
    seconds = time.monotonic() - began
    print(f"{len(verdicts)} cells in {seconds:.0f} s:", dict(sorted(counts.items())))
    if arguments.write:
        document.PATH.write_text(document.document(verdicts), encoding="utf-8")
    if arguments.json is not None:
        others = {str(c): v.text for c, v in verdicts.items() if v.kind != EQUAL}
        report = {"cells": counts, "seconds": round(seconds, 1), "not equal": others}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
