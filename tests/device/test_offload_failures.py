"""Training on a device goes on after exceptions and kills, with the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import memd_client
from memd_client import MemdError
from memd_client.device import copies
from memd_client.device.departures import Departures
from memd_client.parameters.parameter import StreamedParameter, streamed
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, RATE, STEPS, batch, reference
from tests.device.offloaded_models import MODELS, build
from tests.device.simulation import SIM
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.shard import Shard
    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
SEEDS = 10
_ROOMY_BYTES = 1 << 20


class _Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        del ctx, gradients
        raise ValueError("in backward")


class Failing(nn.Module):
    """The second of its layers fails when it is told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._how: Callable[[Tensor], Tensor] | None = None
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        layers[1].register_forward_hook(self._fail)

    def fail(self, how: Callable[[Tensor], Tensor] | None) -> None:
        self._how = how

    def _fail(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        del module, inputs
        return output if self._how is None else self._how(output)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x)
        return loss


def in_forward(x: Tensor) -> Tensor:
    raise ValueError("in forward")


def in_backward(x: Tensor) -> Tensor:
    raised: Tensor = _Raises.apply(x)  # type: ignore[no-untyped-call]
    return raised


def interrupted(x: Tensor) -> Tensor:
    signal.raise_signal(signal.SIGINT)
    return x


def train_with_failures(model: Failing) -> list[Tensor]:
    """Each step fails once in each way, and is repeated."""
    optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        for how in (in_forward, in_backward, interrupted):
            model.fail(how)
            with pytest.raises((ValueError, KeyboardInterrupt)):
                model(batch(step).to("sim", non_blocking=True)).backward()
            optimizer.zero_grad()
        model.fail(None)
        loss = model(batch(step).to("sim", non_blocking=True))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in (*losses, *model.state_dict().values())]


def test_a_step_is_repeated_after_exceptions_in_forward_and_backward(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("mlp", LOOPS[0], "sim")
    for seed in range(SEEDS):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            model = Failing(build("mlp"))
            memd_client.offload(model, session, device="sim")
            found = train_with_failures(model)
            assert session.statistics().leases_held == 0
        assert are_equal(found, expected)


CHILD = """
import os, signal, sys
import torch
import memd_client
from tests.device.offloaded import RATE, batch
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
address, model, saved = sys.argv[1:4]
seed, last, kill_at = map(int, sys.argv[4:])
torch.set_num_threads(1)
SIM.seed(seed)
session = memd_client.connect(address, job="killed", host_bytes="48MiB")
module = memd_client.offload(build(model), session, device="sim")
optimizer = memd_client.AdamW([p for p in module.parameters() if p.requires_grad], lr=RATE)
count = 0
def arrive(parameter):
    global count
    count += 1
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
for parameter in module.parameters():
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(arrive)
for step in range(session.resume(), last):
    module(batch(step).to("sim", non_blocking=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([value.cpu() for value in module.state_dict().values()], saved)
session.close()
"""


@pytest.mark.more
@pytest.mark.parametrize("model", ["mlp", pytest.param("norms", marks=pytest.mark.soak)])
def test_a_killed_trainer_goes_on_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, model: str
) -> None:
    """Killed in backward, with copies to and from the device under way."""
    trained_count = sum(each.requires_grad for each in build(model).parameters())
    saved = tmp_path / "state"
    base = [sys.executable, "-c", CHILD, daemon.address, model, str(saved)]

    def run(seed: int, kill_at: int) -> int:
        command = [*base, str(seed), str(STEPS), str(kill_at)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert run(1, trained_count * 2 + 3) == -signal.SIGKILL
    assert run(2, trained_count + 1) == -signal.SIGKILL
    assert run(3, 0) == 0
    assert are_equal(torch.load(saved), reference(model, LOOPS[0], "sim")[STEPS:])
    with memd_client.connect(daemon.address, job="killed") as session:
        session.drop_job()


@pytest.mark.parametrize("name", MODELS)
def test_the_training_thread_waits_for_the_device_nowhere(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Except where plain torch does: `train` reads losses and values when all steps are made."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build(name), session, device="sim")
        optimizer = memd_client.AdamW(
            [each for each in model.parameters() if each.requires_grad], lr=RATE
        )
        SIM.host_waits()
        before = session.statistics().waited_for
        for step in range(STEPS):
            for _ in range(2):
                model(batch(step).to("sim", non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert SIM.host_waits() == {}
        assert session.statistics().waited_for == before


def test_a_step_that_fails_leaves_no_new_value_on_the_device(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon shows new values before the commit, so that the next forward may have them."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        entry = streamed(next(model.parameters()))
        assert entry is not None
        leases = entry.job.leases_of(entry.shard)
        before = leases.value(entry.shard).cpu()
        entry.residency.begin_update()
        there = leases.value(entry.shard)
        there.fill_(7)  # as if it had come after the update
        del there
        entry.residency.undo_update()
        assert torch.equal(leases.value(entry.shard).cpu(), before)


def test_a_lease_from_before_a_change_makes_no_copy(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        parameter = next(model.parameters())
        entry = streamed(parameter)
        assert entry is not None
        host, asked_again = session.leases, list[Any]()
        plain_resident, plain_value = host.resident, host.value

        def resident(shard: Shard) -> torch.Tensor | None:
            lease = plain_resident(shard)
            if not asked_again:  # as another thread may, meanwhile
                host.of(entry.shard).note_change(entry.shard)
            return lease

        def value(shard: Shard, *mode: int) -> torch.Tensor:
            asked_again.append(shard)
            return plain_value(shard, *mode)

        with monkeypatch.context() as patched:
            patched.setattr(host, "resident", resident)
            patched.setattr(host, "value", value)
            assert parameter.detach().cpu().shape == parameter.shape
        assert asked_again == [entry.shard]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_second_stream_may_use_a_parameter_that_is_in_place(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    SIM.seed(seed)
    with connected(daemon, monkeypatch) as session:
        model = build("mlp")
        expected = model(batch(0))
        memd_client.offload(model, session, device="sim", device_bytes=_ROOMY_BYTES)
        side = torch.Stream(device="sim")
        with torch.no_grad(), memd_client.gather(model.get_submodule("layers.0")):
            with side:
                there = batch(0).to("sim")
                loss = model(there)
            side.synchronize()
        torch.accelerator.synchronize()
        assert torch.equal(loss.cpu(), expected)


def test_memory_of_a_gradient_that_is_held_shows_the_sum(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        parameter = next(model.parameters())
        model(batch(0).to("sim")).backward()
        assert parameter.grad is not None
        held = parameter.grad.numpy()
        first = held.copy()
        model(batch(0).to("sim")).backward()
        assert (held == 2 * first).all()
        del held


def test_views_of_a_parameter_that_are_kept_follow_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = build("mlp")
        state = {name: value + 1 for name, value in model.state_dict().items()}
        memd_client.offload(model, session, device="sim", device_bytes=_ROOMY_BYTES)
        layer, kept = model.get_submodule("layers.0"), []
        hook = layer.register_forward_pre_hook(
            lambda module, _: kept.append(module.get_parameter("weight").detach())
        )
        model(batch(0).to("sim"))
        model.load_state_dict(state)
        assert torch.equal(kept[0].cpu(), state["layers.0.weight"])
        hook.remove()
        optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
        model(batch(0).to("sim")).backward()
        optimizer.step()
        assert torch.equal(kept[0].cpu(), model.state_dict()["layers.0.weight"])


def test_a_change_through_data_in_forward_is_kept(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        layer = model.get_submodule("layers.0")
        hook = layer.register_forward_pre_hook(
            lambda module, _: module.get_parameter("weight").data.fill_(0.5)
        )
        with torch.no_grad():
            model(batch(0).to("sim"))
        hook.remove()
        assert model.state_dict()["layers.0.weight"].unique().tolist() == [0.5]


def test_a_gradient_that_could_not_leave_keeps_no_lease(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")

        def fail(*_: object) -> torch.Event:
            raise torch.OutOfMemoryError("no memory")

        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(Departures, "_copy_out", fail)
                with pytest.raises(torch.OutOfMemoryError):
                    model(batch(0).to("sim")).backward()
            model.zero_grad()
            model(batch(0).to("sim")).backward()
        torch.accelerator.synchronize()
        model.zero_grad()
        # The client's thread ends the leases of a copy after the copy's event.
        end = time.monotonic() + 10
        while session.statistics().leases_held:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_step_is_open_before_it_takes_the_first_gradient(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of other threads begin ahead only while none is open."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
        model(batch(0).to("sim")).backward()
        seen = []
        plain = StreamedParameter.begin_update

        def begin_update(entry: StreamedParameter) -> None:
            seen.append(session.leases.is_step_open)
            plain(entry)

        with monkeypatch.context() as patched:
            patched.setattr(StreamedParameter, "begin_update", begin_update)
            optimizer.step()
        assert seen == [True] * len(list(model.parameters()))


def test_a_buffer_that_a_load_has_replaced_is_part_of_the_next_commit(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though it has the value of the last commit again."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("norms"), session, device="sim")
        first = tmp_path / "model.safetensors"
        memd_client.save_safetensors(model, first)
        optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
        model(batch(0).to("sim")).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = {name: value.cpu() for name, value in model.named_buffers()}
        memd_client.load_safetensors(model, [first], session)
        model(batch(1).to("sim")).backward()
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(trained[name])
        optimizer.step()
        assert session.committed_step == 2
        for name, value in trained.items():
            stored = session.leases.read(session.find_shard(name)).clone()
            assert torch.equal(stored, value)


def _forward_until_it_fails(model: nn.Module) -> None:
    """The thread that waits for copies may be behind."""
    for _ in range(1000):
        model(batch(0).to("sim"))


def test_a_value_that_did_not_arrive_is_not_used(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")

        clear = copies._clear

        def fail(boxes: list[copies.Box]) -> None:
            clear(boxes)  # their leases end in this thread, behind the copy
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patched:
            patched.setattr(copies, "_clear", fail)
            with pytest.raises(MemdError, match="did not reach sim:0"):
                _forward_until_it_fails(model)


def test_what_is_closed_keeps_no_memory_of_the_device(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the model and the session are there."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        found = []
        drop = copies.DeviceCopies.close

        def close(owner: copies.DeviceCopies) -> None:
            found.append(weakref.ref(owner._range.memory))
            drop(owner)

        with monkeypatch.context() as patched, torch.no_grad():
            model(batch(0).to("sim"))
            patched.setattr(copies.DeviceCopies, "close", close)
            session.leases.devices.close()
        assert [memory() for memory in found] == [None]
        with torch.no_grad(), pytest.raises(MemdError, match="session is closed"):
            model(batch(0).to("sim"))


def test_no_other_thread_takes_the_place_of_a_copy_before_its_use(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim")
        names = [name for name, _ in model.named_parameters()]
        bring = copies.DeviceCopies.bring
        is_free = []

        def look(owner: copies.DeviceCopies) -> None:
            is_free.append(owner._lock.acquire(blocking=False))
            if is_free[-1]:
                owner._lock.release()

        def bring_slowly(owner: copies.DeviceCopies, *arguments: Any, **named: Any) -> int:
            found = bring(owner, *arguments, **named)
            other = threading.Thread(target=look, args=(owner,))
            other.start()
            other.join()
            return found

        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(copies.DeviceCopies, "bring", bring_slowly)
            model(batch(0).to("sim"))
        assert len(is_free) >= len(names)
        assert not any(is_free)


def test_a_write_through_a_view_that_was_kept_is_the_parameters(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch counts the write; otherwise a sentence refuses it."""
    with connected(daemon, monkeypatch) as session:
        model = memd_client.offload(build("mlp"), session, device="sim", device_bytes=_ROOMY_BYTES)
        before = model.state_dict()["layers.0.weight"]
        layer, kept = model.get_submodule("layers.0"), list[Tensor]()
        hook = layer.register_forward_pre_hook(
            lambda module, _: kept.append(module.get_parameter("weight").detach())
        )
        with torch.no_grad():
            model(batch(0).to("sim"))
            hook.remove()
            kept[0].mul_(2)
            model(batch(0).to("sim"))
            assert torch.equal(model.state_dict()["layers.0.weight"], 2 * before)
            kept[0].data.mul_(2)
            with pytest.raises(MemdError, match="torch does not count that, so the value is as it"):
                model(batch(0).to("sim"))
            model(batch(0).to("sim"))
        assert torch.equal(model.state_dict()["layers.0.weight"], 2 * before)
        assert torch.equal(kept[0].cpu(), 2 * before)
