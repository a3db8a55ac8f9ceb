"""amsgrad's maxima in a real daemon: on disk, in a small pool, and where a job begins with them
late. What the client does is in tests/unit/amsgrad_cases.py.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

MAXIMUM = "max_exp_avg_sq"
# Two layers whose weights are a tile and a part of one; all biases share a bucket with the last.
WIDTHS = (512, 768, 512, 64)
# The tensors are small: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="96MiB", nvme="512MiB") as daemon:
        yield daemon


def build() -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """One with amsgrad and one without, in every bucket that is shared."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not name.startswith("2.")], "amsgrad": True},
        {"params": [p for name, p in named if name.startswith("2.")]},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        # Gradients that shrink leave the maxima behind.
        (model(batch).square().mean() / (1 + step % 4) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def expect_same(model: nn.Module, optimizer: Any, reference: nn.Module, twin: Any) -> None:
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    state, expected = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert state.keys() == expected.keys()
    for index, moments in expected.items():
        assert list(state[index]) == list(moments), index
        for name, value in moments.items():
            assert torch.equal(state[index][name], value), (index, name)


@pytest.mark.parametrize("durability", ["step", "every:3", "none"])
def test_maxima_come_back_from_disk(tmp_path: Path, durability: str) -> None:
    """Each session has a daemon of its own, and a pool that does not hold the state."""
    reference = build()
    twin = torch.optim.AdamW(groups_of(reference), lr=1e-2, fused=True)
    for first in (0, 4):
        with memd_client.connect(
            f"embedded:{tmp_path}?host=24MiB&nvme=192MiB", job="maxima", durability=durability
        ) as session:
            assert session.committed_step == first
            model = memd_client.offload(build(), session)
            optimizer = memd_client.AdamW(groups_of(model), lr=1e-2)
            steps = range(first, first + 4)
            train(model, optimizer, steps)
            train(reference, twin, steps)
            expect_same(model, optimizer, reference, twin)


def halves_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[0::2]}, {"params": parameters[1::2]}]


def give_maxima(optimizer: Any, *, amsgrad: bool) -> None:
    """To the second half, or takes them; the moments go on."""
    optimizer.param_groups[1]["amsgrad"] = amsgrad
    state = optimizer.state_dict()
    for index in state["param_groups"][1]["params"]:
        moments = state["state"][index]
        moments.pop(MAXIMUM, None)
        if amsgrad:
            moments[MAXIMUM] = moments["exp_avg_sq"] * 2
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_job_that_has_moments_begins_with_maxima_and_ends_with_them(
    tmp_path: Path, *, in_backward: bool
) -> None:
    """Parameters of both kinds share buckets, before a restart and after it."""
    reference = build()
    twin: Any = torch.optim.AdamW(halves_of(reference), lr=1e-2, fused=True)
    had_maxima = False
    for session_number, amsgrad in enumerate((False, True, True, False)):
        with memd_client.connect(
            f"embedded:{tmp_path}?host=24MiB&nvme=192MiB", job="late"
        ) as session:
            model = memd_client.offload(build(), session)
            optimizer: Any = memd_client.AdamW(
                halves_of(model), lr=1e-2, step_in_backward=in_backward
            )
            optimizer.param_groups[1]["amsgrad"] = amsgrad
            if had_maxima != amsgrad:
                for each in (optimizer, twin):
                    give_maxima(each, amsgrad=amsgrad)
                twin.param_groups[1]["fused"] = True
            had_maxima = amsgrad
            steps = range(3 * session_number, 3 * session_number + 3)
            train(model, optimizer, steps)
            train(reference, twin, steps)
            expect_same(model, optimizer, reference, twin)


def test_a_quota_without_room_for_maxima_says_so_and_trains_without(daemon: Daemon) -> None:
    def optimizer_of(**settings: Any) -> tuple[nn.Module, memd_client.AdamW]:
        model = memd_client.offload(build(), session)
        return model, memd_client.AdamW(model.parameters(), lr=1e-2, **settings)

    reference = build()
    twin = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    element_count = sum(p.numel() for p in reference.parameters())
    # Twice 12 bytes an element, and gradients; maxima would take 8 more.
    quota = 31 * element_count
    with memd_client.connect(
        daemon.address, job="narrow", host_bytes="32MiB", nvme_bytes=quota
    ) as session:
        with pytest.raises(memd_client.CapacityError, match="narrow"):
            optimizer_of(amsgrad=True)
        session.drop_job()
    with memd_client.connect(
        daemon.address, job="narrow", host_bytes="32MiB", nvme_bytes=quota
    ) as session:
        model, optimizer = optimizer_of()
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(memd_client.CapacityError, match="narrow"):
            train(model, optimizer, range(1))
        assert session.committed_step == 0
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = False
        train(model, optimizer, range(2))
        train(reference, twin, range(2))
        expect_same(model, optimizer, reference, twin)
        session.drop_job()


def test_a_quota_without_room_for_maxima_that_are_loaded_changes_nothing(daemon: Daemon) -> None:
    reference = build()
    twin = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    element_count = sum(p.numel() for p in reference.parameters())
    # Twice 12 bytes an element, the tiles that a load replaces and the moments on their way take
    # 56; maxima would take 14 more.
    with memd_client.connect(
        daemon.address, job="narrow", host_bytes="32MiB", nvme_bytes=60 * element_count
    ) as session:
        model = memd_client.offload(build(), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        train(reference, twin, range(2))
        source = build()
        maxima = torch.optim.AdamW(source.parameters(), lr=1e-2, amsgrad=True, fused=True)
        train(source, maxima, range(1))
        with pytest.raises(
            memd_client.CapacityError,
            match=r"narrow.* = .*moments on their way\) \+ .*maxima that the job has not",
        ):
            optimizer.load_state_dict(maxima.state_dict())
        assert optimizer.param_groups[0]["amsgrad"] is False
        expect_same(model, optimizer, reference, twin)
        optimizer.load_state_dict(twin.state_dict())
        train(model, optimizer, range(2, 4))
        train(reference, twin, range(2, 4))
        expect_same(model, optimizer, reference, twin)
        session.drop_job()
