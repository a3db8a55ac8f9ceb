"""offload(activations=...) against a real daemon: the cases of tests/unit/activation_cases.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import memd_client
from tests.daemons import running_daemon
from tests.unit.activation_cases import (  # noqa: F401  # pytest finds them by their names here
    TestActivations,
    all_are_stored,
    stored_mlp,
    stored_pair,
    tier,
)
from tests.unit.client_cases import session  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon
    from tests.unit.client_cases import OpenSession


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def job(daemon: Daemon) -> Iterator[OpenSession]:
    """Sessions of a job that is dropped after the test."""

    def open_session() -> memd_client.Session:
        return memd_client.connect(daemon.address, job="activations")

    yield open_session
    open_session().drop_job()
