"""Prints ecosystem.toml as a table: each expectation of the ecosystem, and what shows it.

A row has passed if its command ends with 0 and, where it is one of pytest, a test has passed. Its
last line goes into the table. buf, which no other part of memd needs, is installed below build.

Run: python -m tests.compat.ecosystem [--only WORD…] [--long]; `--long` also runs rows that take
minutes and need root. Words are looked for in areas and expectations.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_suffix(".toml")
BUF, BUF_PACKAGE = ROOT / "build" / "buf", "buf-bin==1.75.0"
PYTEST = "python -m pytest -q -p no:cacheprovider"
TIMEOUT_S = 3600.0
LAST_LINE_MAX = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    area: str
    expects: str
    tests: str = ""
    command: str = ""
    differs: str = ""
    is_long: bool = False

    @property
    def shell(self) -> str:
        return f"{PYTEST} {self.tests}" if self.tests else self.command.strip()

    def is_about(self, words: list[str]) -> bool:
        text = f"{self.area} {self.expects}".lower()
        return not words or any(word.lower() in text for word in words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    row: Row
    status: int
    last_line: str

    @property
    def has_passed(self) -> bool:
        has_tested = not self.row.tests or re.search(r"\b\d+ passed\b", self.last_line) is not None
        return self.status == 0 and has_tested


def rows() -> list[Row]:
    with ROWS.open("rb") as file:
        return [Row(**row) for row in tomllib.load(file)["row"]]


def outcome_of(row: Row) -> Outcome:
    # Programs of this environment, as after its activation.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", row.shell]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Outcome(row=row, status=124, last_line=f"no end within {TIMEOUT_S:.0f} s")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return Outcome(row=row, status=done.returncode, last_line=last[:LAST_LINE_MAX])


# The table


def line_of_difference(row: Row) -> str:
    return f"| {row.area} | {cell(row.expects)} | memd does otherwise | {cell(row.differs)} |"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def line(outcome: Outcome) -> str:
    row = outcome.row
    result = outcome.last_line if outcome.has_passed else f"FAILED: {outcome.last_line}"
    return f"| {row.area} | {cell(row.expects)} | `{cell(row.shell)}` | {cell(result)} |"


HEADER = "| area | what is expected | what shows it | the last line of it |\n|---|---|---|---|"


def buf() -> Path:
    """The program, installed on the first call."""
    program = BUF / "bin" / "buf"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", BUF], check=True)
        pip = (BUF / "bin" / "python", "-m", "pip", "install", "--quiet", BUF_PACKAGE)
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[])
    parser.add_argument("--long", action="store_true", help="also rows that take minutes, as root")
    parser.add_argument("--buf", action="store_true", help="only print where buf is")
    arguments = parser.parse_args()
    if arguments.buf:
        print(shlex.quote(str(buf())))
        return 0
    chosen = [row for row in rows() if row.is_about(arguments.only)]
    if not chosen:
        parser.error(f"no row is about {' or '.join(arguments.only)}")
    print(HEADER, flush=True)
    failed = left_out = differing = 0
    for row in chosen:
        if row.differs:
            differing += 1
            print(line_of_difference(row), flush=True)
            continue
        if row.is_long and not arguments.long:
            left_out += 1
            continue
        outcome = outcome_of(row)
        failed += not outcome.has_passed
        print(line(outcome), flush=True)
    ran = len(chosen) - left_out - differing
    rest = f"{differing} differ; {left_out} take minutes: --long"
    print(f"\n{ran - failed} of {ran} rows passed; {rest}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
