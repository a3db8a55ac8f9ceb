"""One daemon a module, and a way to start others."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.daemons import BUILD, Daemon, Daemons

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    """Sockets lie in the temporary folder, because a socket's path is short."""
    test_data = BUILD / "test-data"
    test_data.mkdir(parents=True, exist_ok=True)
    sockets = Path(tempfile.mkdtemp(prefix="memd-"))
    data = Path(tempfile.mkdtemp(prefix="daemon-", dir=test_data))
    daemons = Daemons(sockets, data)
    yield daemons
    daemons.end()
    shutil.rmtree(sockets)
    shutil.rmtree(data)


@pytest.fixture(scope="module")
def daemon(daemons: Daemons) -> Daemon:
    """64 MiB of memory and 512 MiB on disk."""
    return daemons.start()
