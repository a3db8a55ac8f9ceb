"""Training on a GPU with parameters in memd has the bits of training without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.device.offloaded import LOOPS, RATE, Loop, batch, budget_bytes, reference, train
from tests.device.offloaded_models import MODELS, build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
REPEATS = 3


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("share", [None, 0.5, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_bits_of_training_without_memd(
    daemon: Daemon, name: str, share: float | None, loop: Loop
) -> None:
    expected = reference(name, loop, "cuda")
    for _ in range(REPEATS):
        with memd_client.connect(
            daemon.address, job="gpu", host_bytes="48MiB", durability="none"
        ) as session:
            model = build(name)
            memd_client.offload(
                model, session, device="cuda", device_bytes=budget_bytes(model, share)
            )
            found = train(model, session, loop, "cuda")
            session.drop_job()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("loop", LOOPS[:2], ids=str)  # norms have other bits on a GPU
@pytest.mark.parametrize("name", MODELS)
def test_training_of_parameters_that_stay_there_has_the_same_bits(
    daemon: Daemon, name: str, loop: Loop
) -> None:
    expected = reference(name, loop, "cuda")
    for _ in range(REPEATS):
        with memd_client.connect(
            daemon.address, job="gpu", host_bytes="48MiB", durability="none"
        ) as session:
            found = train(build(name).to("cuda"), session, loop, "cuda")
            session.drop_job()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_captured_backward_of_parameters_that_stay_there(daemon: Daemon) -> None:
    """Each replay makes other gradients in the same memory, under the same version."""
    with memd_client.connect(
        daemon.address, job="gpu", host_bytes="48MiB", durability="none"
    ) as session:
        model, plain = build("mlp").to("cuda"), build("mlp").to("cuda")
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        host = [torch.nn.Parameter(each.detach().cpu()) for each in plain.parameters()]
        reference_optimizer = torch.optim.AdamW(host, lr=RATE, fused=True)
        x = batch(0).to("cuda")
        for module in (model, plain):  # as capturing asks for
            with torch.cuda.stream(torch.cuda.Stream()):
                module(x).backward()
            torch.cuda.synchronize()
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).backward()
        for step in range(3):
            x.copy_(batch(step))
            graph.replay()
            optimizer.step()
            plain.zero_grad()
            plain(x).backward()
            with torch.no_grad():
                for there, here in zip(plain.parameters(), host, strict=True):
                    assert there.grad is not None
                    here.grad = there.grad.cpu()
                reference_optimizer.step()
                for there, here in zip(plain.parameters(), host, strict=True):
                    there.copy_(here)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
        session.drop_job()


def test_a_graph_is_refused(daemon: Daemon) -> None:
    with memd_client.connect(
        daemon.address, job="gpu", host_bytes="48MiB", durability="none"
    ) as session:
        model = memd_client.offload(build("mlp"), session, device="cuda")
        x = batch(0).to("cuda")
        with (
            pytest.raises(memd_client.NotYet, match="CUDA graphs"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
        session.drop_job()
