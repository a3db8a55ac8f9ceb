"""One daemon a module, a way to start others, and folders that suit sockets and volumes."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tests.daemons
from tests.daemons import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon, Daemons


# A unix socket's path has at most 107 bytes. pytest's folders and the socket's name take up to 79
# of them, and the user's name in the first of these folders up to 20 more.
_TEMPORARY_PATH_BYTES_MAX = 8


DEVICE_TESTS = Path(__file__).parent / "device"


def pytest_configure(config: pytest.Config) -> None:
    """Many tests have their sockets below the temporary folder, so its path must be short."""
    if len({_is_device_test(path) for path in _wanted_paths(config)}) > 1:
        raise pytest.UsageError("run tests/device in a process of its own: it installs a device")
    if len(tempfile.gettempdir()) > _TEMPORARY_PATH_BYTES_MAX:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The simulated device is installed once in a process, and orders its threads: its tests run
    where nothing else is asked for."""
    if _is_device_test(collection_path) and not all(map(_is_device_test, _wanted_paths(config))):
        return True
    return None


def _wanted_paths(config: pytest.Config) -> list[Path]:
    folder = config.invocation_params.dir
    return [(folder / argument.partition("::")[0]).resolve() for argument in config.args]


def _is_device_test(path: Path) -> bool:
    return path.is_relative_to(DEVICE_TESTS)


_modules_frozen = 0


@pytest.fixture(scope="module", autouse=True)
def nothing_imported_is_garbage() -> None:
    """Tests collect garbage, thousands of times, and the libraries of all tests are a million
    objects to look at. Nothing of a test lives between two files."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Lightning leaves variables that name a process group, which children would join."""
    before = dict(os.environ)
    yield
    # PYTEST_CURRENT_TEST is pytest's own to remove.
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def saved_tensors_hooks() -> Iterator[None]:
    """Those that a test leaves would save for the next test."""
    yield
    torch = sys.modules.get("torch")  # the daemon's tests run without it
    if torch is not None:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """An empty folder that takes a volume. tmp_path does not where the temporary folder is a tmpfs,
    as it is from Debian 13 on."""
    parent = BUILD / "test-data"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="disk-", dir=parent) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    """With 128 MiB on disk each, because a start writes all of it. `daemon` is for training."""
    with tests.daemons.daemons(nvme_bytes=128 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(daemons: Daemons) -> Daemon:
    """64 MiB of memory and 512 MiB on disk."""
    return daemons.start(nvme="512MiB")
