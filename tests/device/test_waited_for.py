"""Statistics count where threads of the trainer have waited for a device, by what for."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd_client.base.interrupts import Latch
from memd_client.core.scratch import Scratch
from memd_client.device import departures
from memd_client.device.activation_copies import ActivationCopies
from memd_client.device.device_leases import DeviceLeases
from memd_client.parameters.parameter import streamed
from tests.device.offloaded import batch
from tests.device.offloaded_models import build
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from memd_client import Session
    from memd_client.device.event_thread import EventThread
    from tests.daemons import Daemon

_ROOMY_BYTES = 1 << 20
_SAVED_BYTES = 1 << 16


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def offloaded(session: Session) -> nn.Module:
    return memd_client.offload(build("mlp"), session, device="sim", device_bytes=_ROOMY_BYTES)


def leases_of(model: nn.Module) -> DeviceLeases:
    entry = streamed(next(model.parameters()))
    assert entry is not None
    leases = entry.job.leases_of(entry.shard)
    assert isinstance(leases, DeviceLeases)
    return leases


def waited_for(session: Session, action: Callable[[], object]) -> dict[str, int]:
    """Waits that `action` has added."""
    before = Counter(session.statistics().waited_for)
    action()
    return dict(Counter(session.statistics().waited_for) - before)


@contextmanager
def held_until_waited_for(session: Session, thread: EventThread) -> Iterator[None]:
    """The thread sees no copy pass before one more wait is counted."""
    held, is_over = Latch(), threading.Event()
    before = sum(session.statistics().waited_for.values())

    def run() -> None:
        while not is_over.wait(0.001):
            if sum(session.statistics().waited_for.values()) > before:
                break
        held.open()

    thread.after(None, held.wait)
    watcher = threading.Thread(target=run)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def read(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.sum()


def drop(parameter: nn.Parameter) -> None:
    entry = streamed(parameter)
    assert entry is not None
    entry.job.drop_gradients([entry.shard])


@pytest.mark.parametrize("use", [read, drop])
def test_a_gradient_that_was_leaving(session: Session, use: Callable[[nn.Parameter], None]) -> None:
    model = offloaded(session)
    with held_until_waited_for(session, leases_of(model)._departures._thread):
        model(batch(0).to("sim")).backward()
        found = waited_for(session, lambda: use(next(model.parameters())))
    assert found == {"gradient": 1}


def test_another_size_of_the_memory_of_parameters(session: Session) -> None:
    model = offloaded(session)
    leases = leases_of(model)
    leases._budget._size_bytes = _ROOMY_BYTES // 2
    assert waited_for(session, leases._resize) == {"resize": 1}


def test_a_value_that_is_written(session: Session) -> None:
    model = offloaded(session)
    entry = streamed(next(model.parameters()))
    assert entry is not None
    leases, shard = leases_of(model), entry.shard
    there, here = (torch.zeros(shard.shape, device=device) for device in ("sim", "cpu"))
    assert waited_for(session, lambda: leases.write(shard, there)) == {"write": 1}
    assert waited_for(session, lambda: leases.write(shard, here)) == {}


def test_a_view_that_was_kept(session: Session) -> None:
    model = offloaded(session)
    kept: list[Tensor] = []
    handle = model.get_submodule("layers.0").register_forward_pre_hook(
        lambda module, _: kept.append(module.get_parameter("weight").detach())
    )
    with torch.no_grad():
        model(batch(0).to("sim"))
        handle.remove()
        found = waited_for(session, lambda: model(batch(0).to("sim")))
    assert found.keys() == {"comparison"}


def test_room_for_what_is_added_to_a_gradient(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offloaded(session)
    model(batch(0).to("sim")).backward()
    assert waited_for(session, lambda: model(batch(1).to("sim")).backward()) == {}
    monkeypatch.setattr(departures, "_STAGED_BYTES_MAX", 0)
    found = waited_for(session, lambda: model(batch(2).to("sim")).backward())
    assert found == {"room": sum(1 for _ in model.parameters())}


def test_a_slot_of_saved_tensors_that_is_used_again(session: Session) -> None:
    job = session.transaction.job
    scratch = Scratch(job, "host")
    slot = scratch.take(_SAVED_BYTES)
    copies = ActivationCopies(session.leases.registration, torch.device("sim", 0), job=job.name)

    def leave() -> None:
        source = torch.ones(_SAVED_BYTES, dtype=torch.uint8, device="sim")
        copies.leave(source, slot.shard.shard_id, lambda: scratch.overwrite(slot)[:_SAVED_BYTES])

    with held_until_waited_for(session, copies._thread):
        leave()
        assert waited_for(session, leave) == {"room": 1}
    copies.close()
