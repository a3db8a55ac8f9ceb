"""One daemon a module, and a way to start others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tests.daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon, Daemons


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    with tests.daemons.daemons() as made:
        yield made


@pytest.fixture(scope="module")
def daemon(daemons: Daemons) -> Daemon:
    """64 MiB of memory and 512 MiB on disk."""
    return daemons.start()
