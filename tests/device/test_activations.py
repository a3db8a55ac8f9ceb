"""Tensors that autograd saves on a device go to memd, and come back ahead of backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memd_client
from memd_client.device import activation_copies
from memd_client.device.activation_copies import ActivationCopies
from memd_client.parameters import saved_activations
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS as PLAIN_LOOPS
from tests.device.offloaded import RATE, STEPS, Loop, batch, reference
from tests.device.offloaded_models import MODELS, build
from tests.device.simulation import SIM
from tests.device.test_offload_failures import Failing, train_with_failures
from tests.device.trained import connected, trained

if TYPE_CHECKING:
    from memd_client import Session
    from tests.daemons import Daemon

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))
WINDOWS = (0, 4096, 1 << 20)  # nothing is kept on the device, a part, and everything
LOOPS = tuple(Loop(tier, activations=tier) for tier in ("host", "nvme"))


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_activations, "SMALL_BYTES", 256)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_training_has_the_bits_of_training_without_memd(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    loop: Loop,
    window_bytes: int,
    seeds: int,
) -> None:
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", window_bytes)
    expected = reference(model, loop, "sim")
    for seed in range(seeds):
        SIM.seed(seed)
        assert are_equal(trained(daemon, monkeypatch, model, "least", loop), expected)


def offloaded(model: nn.Module, session: Session) -> nn.Module:
    return memd_client.offload(model, session, device="sim", activations="host")


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("model", MODELS)
def test_the_training_thread_waits_for_the_device_nowhere(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, model: str, window_bytes: int
) -> None:
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", window_bytes)
    with connected(daemon, monkeypatch) as session:
        module = offloaded(build(model), session)
        optimizer = memd_client.AdamW(
            [each for each in module.parameters() if each.requires_grad], lr=RATE
        )
        SIM.host_waits()
        for step in range(STEPS):
            module(batch(step).to("sim", non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert SIM.host_waits() == {}


def test_memory_of_the_device_falls_by_what_has_left(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", 0)
    kept, activations_bytes = [], 0
    for activations in (None, "host"):
        with connected(daemon, monkeypatch) as session:
            module = memd_client.offload(
                build("mlp"), session, device="sim", device_bytes="1MiB", activations=activations
            )
            inputs = torch.randn(512, 24).to("sim")
            before_bytes = torch.accelerator.memory_allocated()
            loss = module(inputs)
            kept.append(torch.accelerator.memory_allocated() - before_bytes)
            activations_bytes = session.statistics().activation_bytes
            loss.backward()
            del loss
    assert activations_bytes > 500_000
    assert kept[0] - kept[1] > 0.8 * activations_bytes


@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_a_step_is_repeated_after_exceptions_in_forward_and_backward(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", window_bytes)
    expected = reference("mlp", PLAIN_LOOPS[0], "sim")
    for seed in range(3):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            model = Failing(build("mlp"))
            offloaded(model, session)
            assert are_equal(train_with_failures(model), expected)
            assert session.statistics().activation_bytes == 0


def test_a_graph_that_is_kept_runs_backward_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", 0)
    with connected(daemon, monkeypatch) as session:
        model = offloaded(build("gpt"), session)
        loss = model(batch(0).to("sim"))
        sums = []
        for _ in range(2):
            loss.backward(retain_graph=True)
            sums.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        assert sums[0]
        assert all(torch.equal(2 * one, both) for one, both in zip(sums[0], sums[1], strict=True))


def test_no_room_for_what_comes_ahead_is_no_error(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when it is used."""
    monkeypatch.setattr(activation_copies, "WINDOW_BYTES", 0)
    plain, tried = ActivationCopies.bring, list[int]()

    def bring(copies: ActivationCopies, away: Any, *arguments: Any) -> None:
        tried.append(away)
        if tried.count(away) == 1:
            raise torch.OutOfMemoryError("no memory")
        plain(copies, away, *arguments)

    expected = reference("mlp", PLAIN_LOOPS[0], "sim", 1)
    with connected(daemon, monkeypatch) as session:
        model = offloaded(build("mlp"), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
        loss = model(batch(0).to("sim"))
        with monkeypatch.context() as patched:
            patched.setattr(ActivationCopies, "bring", bring)
            try:
                loss.backward()
            except torch.OutOfMemoryError:  # what nobody has asked for ahead
                assert len(tried) == 1
                loss = None
                optimizer.zero_grad()
                loss = model(batch(0).to("sim"))
                loss.backward()
        optimizer.step()
        found = [loss.detach().cpu(), *(each.cpu() for each in model.state_dict().values())]
        assert are_equal(found, expected)


class Twice(nn.Module):
    """Several operations save one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (functional.gelu(x) + torch.tanh(x * self.scale) * x.exp()).mean()


def test_a_tensor_that_several_save_leaves_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = ActivationCopies.leave, list[int]()

    def leave(copies: ActivationCopies, source: Tensor, *arguments: Any) -> Any:
        left.append(source.data_ptr())
        return plain(copies, source, *arguments)

    monkeypatch.setattr(ActivationCopies, "leave", leave)
    monkeypatch.setitem(MODELS, "twice", Twice)
    with connected(daemon, monkeypatch) as session:
        model = offloaded(build("twice"), session)
        loss = model(batch(0).to("sim"))
        assert len(left) == len(set(left))
        loss.backward()
        del loss


def test_a_tensor_that_was_changed_between_is_stored_anew(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And backward refuses the older one."""
    with connected(daemon, monkeypatch) as session:
        model = offloaded(build("mlp"), session)
        layer, inputs = model.get_submodule("layers.0"), batch(0).to("sim")
        early = layer(inputs).sum()
        torch.accelerator.synchronize()  # a copy of what is changed would be nobody's
        inputs.mul_(2)
        layer(inputs).sum().backward()
        found = model.get_parameter("layers.0.weight").grad
        assert found is not None
        expected = (2 * batch(0)).sum(0).expand(96, 24)
        assert torch.allclose(found, expected, rtol=1e-5)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            early.backward()
        del early
