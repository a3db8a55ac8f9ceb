"""Each wait, event and `record_stream` of the device path is missed when it is taken out."""

from __future__ import annotations

import ast
import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

import memd_client
from memd_client.core.scratch import Scratch
from memd_client.device import (
    activation_copies,
    copies,
    departed_gradients,
    departures,
    device_range,
    event_thread,
    filled_memory,
    gradient_change,
    kept_gradients,
    staying_copies,
)
from memd_client.device.activation_copies import ActivationCopies, AwayBytes
from memd_client.device.event_thread import EventThread
from memd_client.device.gradient_change import GradientChange
from memd_client.parameters import gradients, lazy, saved_activations, shared_unscaling
from memd_client.transaction.transaction import Transaction
from tests.device.offloaded import LOOPS, MIXED_LOOPS, Loop, batch
from tests.device.offloaded_models import build
from tests.device.removed_statements import Statement, removed, statements
from tests.device.simulation import SIM
from tests.device.staying import stayed
from tests.device.trained import connected, trained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.daemons import Daemon

    Scenario = Callable[[Daemon, pytest.MonkeyPatch], None]

SEEDS = (
    pytest.param(2, marks=pytest.mark.more),
    pytest.param(10, marks=pytest.mark.soak),
)
_CALLS = ("wait_event", "wait_stream", "record", "record_stream", "synchronize")
_DEVICE_BYTES = 48 << 10
_SAVED_BYTES = 1 << 16
_STREAMS = 32  # of the simulation's pool


def _orders(call: ast.Call) -> bool:
    """`event.synchronize` is also passed on as a function."""
    parts = [call.func, *call.args]
    return any(isinstance(part, ast.Attribute) and part.attr in _CALLS for part in parts)


WAITS = [
    statement
    for module in (
        *(activation_copies, gradient_change, copies, departures, device_range, event_thread),
        *(filled_memory, gradients, staying_copies, departed_gradients, kept_gradients),
    )
    for statement in statements(module, _orders)
]


def train(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    trained(daemon, patch, "mlp", "least", LOOPS[1])


def stay(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """Gradients change when they have left."""
    stayed(daemon, patch, "mlp", LOOPS[2])


def settle_elsewhere(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """Another thread settles a step, and new values come on its stream."""
    plain, side = Transaction._settle_values, torch.Stream(device="sim")

    def settle_late(transaction: Transaction, targets: Iterable[Any]) -> None:
        def settle() -> None:
            with side:
                transaction.job.settle()

        thread = threading.Thread(target=settle)
        thread.start()
        thread.join()
        plain(transaction, targets)

    with patch.context() as patched:
        patched.setattr(Transaction, "_settle_values", settle_late)
        stayed(daemon, patched, "mlp", LOOPS[0])


def leave(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """The session ends while kernels that use its parameters are queued, and others get the
    memory."""
    with connected(daemon, patch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_DEVICE_BYTES)
        with torch.no_grad():
            model(batch(0).to("sim", non_blocking=True))
        del model
        gc.collect()
    del session
    gc.collect()
    for _ in range(_STREAMS):
        with torch.Stream(device="sim"):
            torch.empty(_DEVICE_BYTES, dtype=torch.uint8, device="sim")


def scale(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """A GradScaler copies its numbers to pinned memory, which operations on gradients read, as
    where gradients of the host are beside them."""

    def announced(leaves: list[Any], structure: Any) -> Any:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_pinned():
                SIM.host_touches(leaf, writes=False)
        return tree_unflatten(leaves, structure)

    with patch.context() as patched:
        patched.setattr(shared_unscaling, "unscale_departed", lambda *_: False)
        patched.setattr(lazy, "tree_unflatten", announced)  # just before the operation
        trained(daemon, patch, "mlp", "least", MIXED_LOOPS[1])


def clip(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """Gradients come back for their norms, and the thread reads the factor in pinned memory."""
    plain = GradientChange.make_here

    def announced(change: GradientChange, gradient: Tensor) -> None:
        SIM.host_touches(change._host, writes=False)
        plain(change, gradient)

    with patch.context() as patched:
        patched.setattr(GradientChange, "is_none", False)
        patched.setattr(GradientChange, "make_here", announced)
        trained(daemon, patched, "mlp", "least", LOOPS[2])


def share_casts(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """A second stream uses casts of autocast that the first has made again, and the first gets
    their memory."""
    with connected(daemon, patch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim", device_bytes="1MiB")
        cast_bytes = {each.numel() * 2 for each in model.parameters()}
        there, side = batch(0).to("sim"), torch.Stream(device="sim")
        with torch.autocast("sim", torch.bfloat16):
            model(there)
            side.wait_stream(torch.accelerator.current_stream())
            with memd_client.gather(model), side:
                model(there)
            for size_bytes in cast_bytes:
                torch.full((size_bytes,), 7, dtype=torch.uint8, device="sim")
        torch.accelerator.synchronize()


def save(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """Saved tensors leave the device and come back."""
    with patch.context() as patched:
        patched.setattr(saved_activations, "SMALL_BYTES", 256)
        patched.setattr(activation_copies, "WINDOW_BYTES", 0)
        trained(daemon, patched, "mlp", "all", Loop("saved", activations="host"))


class _LateThread(EventThread):
    """Does nothing before somebody waits for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._late: list[tuple[Any, Any]] | None = []

    def after(self, event: torch.Event | None, action: Any) -> None:
        if self._late is None:
            super().after(event, action)
        else:
            self._late.append((event, action))

    def close(self) -> None:
        late, self._late = self._late, None
        for each in late or ():
            super().after(*each)
        super().close()


class _Saved:
    """Bytes of one session that leave and come back by hand."""

    def __init__(self, session: Any) -> None:
        job = session.transaction.job
        self._scratch = Scratch(job, "host")
        self._copies = ActivationCopies(
            session.leases.registration, torch.device("sim", 0), job=job.name
        )
        self._slots: dict[AwayBytes, Any] = {}

    def leave(self, source: Tensor) -> AwayBytes:
        slot = self._scratch.take(_SAVED_BYTES)
        away = self._copies.leave(
            source, slot.shard.shard_id, lambda: self._scratch.overwrite(slot)[:_SAVED_BYTES]
        )
        self._slots[away] = slot
        return away

    def bring(self, away: AwayBytes) -> Tensor:
        slot = self._slots[away]
        box = away.leases[:1] or [self._scratch.read(slot)[:_SAVED_BYTES]]
        self._copies.bring(away, slot.shard.shard_id, 0, box)
        return self.use(away)

    def use(self, away: AwayBytes) -> Tensor:
        there = self._copies.use(away)
        assert there is not None
        return there

    def close(self) -> None:
        self._copies.close()


def _filled() -> Tensor:
    return torch.full((_SAVED_BYTES,), 7, dtype=torch.uint8, device="sim")


@contextmanager
def saving(daemon: Daemon, patch: pytest.MonkeyPatch) -> Iterator[_Saved]:
    """The host has seen no copy pass before the end."""
    with patch.context() as patched, connected(daemon, patch) as session:
        patched.setattr(activation_copies, "WINDOW_BYTES", 0)
        patched.setattr(activation_copies, "EventThread", _LateThread)
        saved = _Saved(session)
        try:
            yield saved
        finally:
            saved.close()


def use_memory_that_was_left(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """And bring back what has left it."""
    with saving(daemon, patch) as saved:
        first = saved.leave(_filled())
        saved.leave(_filled())  # for which the first has to go
        _filled()  # in its memory
        with torch.Stream(device="sim"):  # the one that saved it waits for its copy
            saved.bring(first)


def save_memory_of_another_stream(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    """Its program has seen to its own uses."""
    side, here = torch.Stream(device="sim"), torch.accelerator.current_stream()
    with saving(daemon, patch) as saved:
        with side:
            source = _filled()
        here.wait_stream(side)
        source.sum()
        side.wait_stream(here)
        saved.leave(source)
        saved.leave(_filled())
        del source
        with side:
            _filled()


def use_on_two_streams(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    side = torch.Stream(device="sim")
    with saving(daemon, patch) as saved:
        away = saved.leave(_filled())
        saved.leave(_filled())
        saved.bring(away)
        with side:
            saved.use(away).sum()
        activation_copies.drop(away)
        _filled()


def drop_what_is_leaving(daemon: Daemon, patch: pytest.MonkeyPatch) -> None:
    with saving(daemon, patch) as saved:
        activation_copies.drop(saved.leave(_filled()))
        _filled()


SCENARIOS = (train, stay, settle_elsewhere, leave, scale, clip, share_casts)
SAVING_SCENARIOS = (
    save,
    use_memory_that_was_left,
    save_memory_of_another_stream,
    use_on_two_streams,
    drop_what_is_leaving,
)


def race_of(daemon: Daemon, patch: pytest.MonkeyPatch, scenarios: Sequence[Scenario]) -> str:
    for scenario in scenarios:
        try:
            scenario(daemon, patch)
        except Exception as error:  # noqa: BLE001 # whoever misses it
            return str(error)
        finally:
            torch.accelerator.synchronize()
    return ""


def test_the_waits_are_found() -> None:
    assert len(WAITS) == 30


@pytest.mark.parametrize("seeds", SEEDS)
def test_nothing_races(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        assert race_of(daemon, monkeypatch, (*SCENARIOS, *SAVING_SCENARIOS)) == ""


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_removed_wait_is_missed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, wait: Statement, seeds: int
) -> None:
    scenarios = SAVING_SCENARIOS if wait.module is activation_copies else SCENARIOS
    with removed(wait):
        for seed in range(seeds):
            SIM.seed(seed)
            assert "race: " in race_of(daemon, monkeypatch, scenarios)
