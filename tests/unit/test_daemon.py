"""What becomes of the holder when the daemon ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from memd import daemon as daemons
from memd.config import Configuration, Settings
from memd.daemon import Daemon, Options
from tests.unit.fake_native import FakeServer, as_server


@dataclass
class Keeper:
    kept: list[tuple[str, int]] = field(default_factory=list)
    ended: bool = False
    closed: bool = False

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


class DeviceStalls(Exception):
    pass


def life(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, *, serves: bool, returns: bool, fails: bool
) -> None:
    """A daemon that served, or did not get so far, whose draining saw that somebody returns, or
    did not, and whose end failed, or did not."""
    monkeypatch.setattr(daemons, "find_keeper", lambda *_, **__: keeper)
    configuration = Configuration(settings=Settings(), origins={})
    daemon = Daemon(configuration, options=Options(), environ={}, reload=lambda: configuration)
    with daemon._keeper():
        daemon._has_served = serves
        daemon._somebody_returns = returns
        if fails:
            raise DeviceStalls


def test_an_end_that_fails_leaves_memory_to_the_next_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for returns in (True, False):  # blobs of those who left may not be on disk either
        keeper = Keeper()
        with pytest.raises(DeviceStalls):
            life(keeper, monkeypatch, serves=True, returns=returns, fails=True)
        assert not keeper.ended
        assert keeper.closed


def test_a_first_start_that_fails_leaves_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    with pytest.raises(DeviceStalls):
        life(keeper, monkeypatch, serves=False, returns=True, fails=True)
    assert keeper.ended
    before = Keeper(kept=[("segment.1", -1)])
    with pytest.raises(DeviceStalls):
        life(before, monkeypatch, serves=False, returns=True, fails=True)
    assert not before.ended, "it is still the one before's"


@pytest.mark.parametrize("returns", [True, False])
def test_an_end_in_order_frees_memory_that_nobody_returns_to(
    monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    keeper = Keeper()
    life(keeper, monkeypatch, serves=True, returns=returns, fails=False)
    assert keeper.ended is not returns


def test_a_daemon_takes_work_from_ready_until_its_volumes_are_fenced() -> None:
    configuration = Configuration(settings=Settings(), origins={})
    daemon = Daemon(configuration, options=Options(), environ={}, reload=lambda: configuration)
    server = FakeServer()
    assert not daemon._takes_work()
    daemon._server = as_server(server)
    assert not daemon._takes_work()
    daemon._is_ready = True
    assert daemon._takes_work()
    server.fence_reason = "a flush failed: EIO"
    assert not daemon._takes_work()
