"""A real daemon updates parameters while backward runs: the same bits, whatever its memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

LAYER_COUNT = 8
WIDTH = 512  # a layer's weight is a whole tile
STEP_COUNT = 10
# The tensors are small: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="160MiB", nvme="768MiB") as daemon:
        yield daemon


def early_tiles(daemon: Daemon, job: str) -> dict[str, float]:
    """By what became of them."""
    text = daemon.get("/metrics")
    found = re.findall(
        rf'^memd_early_tiles_(\w+)_total{{memd_job="{job}"(?:,reason="(\w+)")?}} (\S+)$',
        text,
        re.MULTILINE,
    )
    return {reason or what: float(count) for what, reason, count in found}


def make_model(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYER_COUNT):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, schedule: bool
) -> list[float]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) if schedule else None
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(STEP_COUNT):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def trained(
    daemon: Daemon,
    *,
    durability: str,
    dtype: torch.dtype,
    host_bytes: str,
    schedule: bool,
    in_backward: bool,
    amsgrad: bool = False,
) -> tuple[list[float], list[torch.Tensor], dict[str, float]]:
    """Losses, then values and moments, and what became of early tiles."""
    with memd_client.connect(
        daemon.address,
        job="trained",
        host_bytes=host_bytes,
        nvme_bytes="384MiB",
        durability=durability,
        fresh=True,
    ) as session:
        model = memd_client.offload(make_model(dtype), session)
        optimizer = memd_client.AdamW(
            model.parameters(),
            lr=1e-3,
            weight_decay=0.01,
            step_in_backward=in_backward,
            amsgrad=amsgrad,
        )
        losses = train(model, optimizer, schedule=schedule)
        state = optimizer.state_dict()["state"]
        tensors = [value.clone() for value in model.state_dict().values()]
        for moments in state.values():
            tensors += [value for name, value in moments.items() if name != "step"]
        assert session.committed_step == STEP_COUNT
        counted = early_tiles(daemon, "trained")
        session.drop_job()
    return losses, tensors, counted


@pytest.mark.parametrize("host_bytes", ["44MiB", "144MiB"], ids=["small cache", "all fits"])
@pytest.mark.parametrize("durability", ["step", "every:3", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_early_updates_have_the_bits_of_a_step_after_backward(
    daemon: Daemon, durability: str, dtype: torch.dtype, host_bytes: str
) -> None:
    ways = [
        trained(
            daemon,
            durability=durability,
            dtype=dtype,
            host_bytes=host_bytes,
            schedule=True,
            in_backward=in_backward,
        )
        for in_backward in (True, False)
    ]
    assert ways[0][0] == ways[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ways[0][1], ways[1][1], strict=True))
    counted, uncounted = ways[0][2], ways[1][2]
    if durability == "step":
        # Not all: a step that comes soon finds some of the last ones not begun.
        assert counted["adopted"] > 0
    assert sum(counted.values()) == counted["adopted"], "nothing was made in vain"
    assert sum(uncounted.values()) == 0
    if dtype == torch.float32:
        plain = make_model(dtype)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        assert train(plain, optimizer, schedule=True) == ways[0][0]
        assert all(
            torch.equal(a, b) for a, b in zip(ways[0][1], plain.state_dict().values(), strict=False)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_early_updates_with_amsgrad_have_the_bits_of_a_step_after_backward(
    daemon: Daemon, dtype: torch.dtype
) -> None:
    early, late = (
        trained(
            daemon,
            durability="step",
            dtype=dtype,
            host_bytes="60MiB",
            schedule=False,
            in_backward=in_backward,
            amsgrad=True,
        )
        for in_backward in (True, False)
    )
    assert early[0] == late[0]
    assert len(early[1]) == 4 * 2 * LAYER_COUNT
    assert all(torch.equal(a, b) for a, b in zip(early[1], late[1], strict=True))
    assert early[2]["adopted"] == sum(early[2].values()) > 0


def test_what_was_made_in_vain_is_counted_by_reason(daemon: Daemon) -> None:
    with memd_client.connect(
        daemon.address, job="in-vain", host_bytes="64MiB", nvme_bytes="192MiB"
    ) as session:
        model = memd_client.offload(make_model(torch.float32), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
        batch = torch.ones(32, WIDTH)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        assert session.committed_step == 3
        assert early_tiles(daemon, "in-vain")["settings"] > 0
        session.drop_job()


def test_a_collective_over_gradients_makes_their_updates_again(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The schema of a collective does not say that it changes its tensors."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        with memd_client.connect(
            daemon.address, job="reduced", host_bytes="64MiB", nvme_bytes="192MiB", rank=0
        ) as session:
            model = memd_client.offload(make_model(torch.float32), session)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
            batch = torch.ones(32, WIDTH)
            for _ in range(3):
                model(batch).square().mean().backward()
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
            assert session.committed_step == 3
            counted = early_tiles(daemon, "reduced")
            assert sum(counted.values()) > 0
            assert counted["adopted"] == 0
            session.drop_job()
    finally:
        torch.distributed.destroy_process_group()


def test_reading_every_gradient_makes_no_update_again(daemon: Daemon) -> None:
    with memd_client.connect(
        daemon.address, job="read", host_bytes="64MiB", nvme_bytes="192MiB"
    ) as session:
        model = memd_client.offload(make_model(torch.float32), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
        batch = torch.ones(32, WIDTH)
        for _ in range(3):
            model(batch).square().mean().backward()
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            assert len(norms) == 2 * LAYER_COUNT
            optimizer.step()
            optimizer.zero_grad()
        assert session.committed_step == 3
        counted = early_tiles(daemon, "read")
        assert counted["adopted"] == sum(counted.values()) > 0
        session.drop_job()
