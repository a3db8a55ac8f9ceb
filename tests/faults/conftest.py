"""Fixtures of tests that kill daemons."""

from tests.faults.restarts import restarts

__all__ = ["restarts"]
