"""Earlier versions of memd: what releases.toml says of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Scripts of a release that build it, by what they make.
SCRIPTS = {"wheel": "deploy/wheels/build.sh", "package": "deploy/debian/build.sh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    name: str
    commit: str
    format: str
    protocol: int
    ledger: int
    # Keys of SCRIPTS.
    builds: tuple[str, ...] = ()


def releases() -> list[Release]:
    with (HERE / "releases.toml").open("rb") as file:
        entries = tomllib.load(file)["release"]
    return [Release(**{**entry, "builds": tuple(entry.get("builds", ()))}) for entry in entries]


def newest_that_builds(what: str) -> Release:
    return [release for release in releases() if what in release.builds][-1]
