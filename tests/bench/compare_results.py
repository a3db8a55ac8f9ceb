"""What changed against the committed results, in ratios.

For every figure that both have: the new median over the committed one, and the noise beside it,
which is how far the runs of either lay from their median, in percent. Only where the runs of the
two do not overlap a figure is called better or worse. Where a figure stands against a limit that
was measured in the same run, its ratio is that of the fractions reached, so that another disk or a
busier minute is not taken for a change.

Run: python compare_results.py [--results FOLDER] [--out FOLDER] [--json]. The exit code is 1 where
a fraction of a limit fell by more than 5 % and its runs do not overlap. A figure without a limit
depends on the machine and its load, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memd.printing import print_json, print_table

HERE = Path(__file__).parent
# A difference in any of these explains others.
MACHINE_KEYS = ("cpu", "cores", "memory_bytes", "kernel", "torch", "peers")
LOAD_MAX = 0.5  # of the minute before a run
FALL_MAX = 0.05  # of a fraction of a limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    figure: str
    unit: str
    committed: float
    new: float
    ratio: float  # new / committed; of fractions reached where `of_limit`
    of_limit: bool
    noise: float  # the larger part of the median by which runs lay from it
    verdict: str  # "better", "worse", "same", or "one run"

    @property
    def is_fall(self) -> bool:
        return self.of_limit and self.verdict == "worse" and self.ratio < 1 - FALL_MAX


def judged(figure: dict[str, Any]) -> list[float]:
    """What is compared of a figure: the fractions reached where it has a limit, or its runs."""
    runs: list[float] = figure["runs"]
    if len(figure["limit_runs"]) != len(runs):
        return runs
    pairs = zip(runs, figure["limit_runs"], strict=True)
    if figure["less_is_better"]:
        return [limit / run for run, limit in pairs]
    return [run / limit for run, limit in pairs]


def noise(runs: list[float]) -> float:
    median = statistics.median(runs)
    return max(abs(run - median) for run in runs) / median if median else 0.0


def compare(committed: dict[str, Any], new: dict[str, Any]) -> Change | None:
    """None where nothing can be said: one was measured against a limit and the other was not, or
    the committed median is nothing."""
    of_limit = bool(new["limit_runs"])
    before, after = judged(committed), judged(new)
    if of_limit != bool(committed["limit_runs"]) or not statistics.median(before):
        return None
    # A fraction of a limit is better the nearer it is to it, whatever the figure is.
    less_is_better = new["less_is_better"] and not of_limit
    if min(len(before), len(after)) < 2:
        verdict = "one run"
    elif min(after) > max(before):
        verdict = "worse" if less_is_better else "better"
    elif max(after) < min(before):
        verdict = "better" if less_is_better else "worse"
    else:
        verdict = "same"
    return Change(
        figure=new["name"],
        unit=new["unit"],
        committed=committed["value"],
        new=new["value"],
        ratio=statistics.median(after) / statistics.median(before),
        of_limit=of_limit,
        noise=max(noise(before), noise(after)),
        verdict=verdict,
    )


def differences(committed: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes the two reports hard to compare, in words."""
    lines = [
        f"{key}: committed {committed['machine'].get(key)}, now {new['machine'].get(key)}"
        for key in MACHINE_KEYS
        if committed["machine"].get(key) != new["machine"].get(key)
    ]
    lines += [
        f"setting {key}: committed {committed['settings'].get(key)}, now {new['settings'].get(key)}"
        for key in sorted(committed["settings"].keys() | new["settings"].keys())
        if committed["settings"].get(key) != new["settings"].get(key)
    ]
    for name, report in (("committed", committed), ("now", new)):
        load = report["machine"].get("load", 0.0)
        if load > LOAD_MAX:
            lines.append(f"{name}: measured on a busy machine, with a load of {load:.1f} before it")
    return lines


def changes(committed: dict[str, Any], new: dict[str, Any]) -> tuple[list[Change], list[str]]:
    """Of all figures that both reports have, and the names of those that only one has."""
    before = {figure["name"]: figure for figure in committed["figures"]}
    after = {figure["name"]: figure for figure in new["figures"]}
    compared = [compare(before[name], figure) for name, figure in after.items() if name in before]
    only = [f"{name}: new" for name in after if name not in before]
    only += [f"{name}: no longer measured" for name in before if name not in after]
    return [change for change in compared if change is not None], only


def row(change: Change) -> tuple[str, ...]:
    return (
        change.figure,
        f"{change.committed:.4g} {change.unit}",
        f"{change.new:.4g} {change.unit}",
        f"{change.ratio:.3f}" + (" of limit" if change.of_limit else ""),
        f"{change.noise:.1%}",
        change.verdict,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--json", action="store_true", dest="as_json", help="For programs.")
    arguments = parser.parse_args()
    told: dict[str, Any] = {}
    for path in sorted(arguments.out.glob("*.json")):
        new = json.loads(path.read_text())
        reference = arguments.results / path.name
        if not reference.exists():
            told[path.stem] = {"changes": [], "notes": ["no committed result to compare with"]}
            continue
        committed = json.loads(reference.read_text())
        listed, only = changes(committed, new)
        told[path.stem] = {
            "changes": listed,
            "notes": [*differences(committed, new), *only],
        }
    falls = [
        f"{name}: {change.figure} is {1 - change.ratio:.0%} farther from its limit"
        for name, each in told.items()
        for change in each["changes"]
        if change.is_fall
    ]
    for fall in falls:
        print(fall, file=sys.stderr)
    if arguments.as_json:
        print_json(
            {
                name: {**each, "changes": [asdict(change) for change in each["changes"]]}
                for name, each in told.items()
            }
        )
        return 1 if falls else 0
    if not told:
        print(f"{arguments.out} holds no results; `make bench` makes them")
    for name, each in told.items():
        print(f"\n{name}")
        for note in each["notes"]:
            print(f"  {note}")
        if each["changes"]:
            header = ("figure", "committed", "now", "now / committed", "noise", "")
            print_table(header, [row(change) for change in each["changes"]])
    return 1 if falls else 0


if __name__ == "__main__":
    sys.exit(main())
