"""Answers of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    NOTE = "note"  # memd works, and worse than it could
    OBSTACLE = "obstacle"  # memd does not start, or this user cannot use it


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    check: str
    state: State
    found: str
    cure: str = ""  # empty where all is well


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, state=State.OK, found=found)


def note(check: str, found: str, cure: str) -> Finding:
    return Finding(check=check, state=State.NOTE, found=found, cure=cure)


def obstacle(check: str, found: str, cure: str) -> Finding:
    return Finding(check=check, state=State.OBSTACLE, found=found, cure=cure)
