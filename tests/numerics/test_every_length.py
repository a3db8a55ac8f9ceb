"""Parameters of every length beside torch's fused CPU kernel, which updates the elements behind the
last whole vector of each by a loop of its own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import memd_client
from memd.demo.twin import round_to_half
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE = 256 << 10
# Those behind a whole tile lie in another tile than the rest of their parameter.
LENGTHS = (*range(1, 71), 4097, 100_003, TILE - 1, TILE + 3, 2 * TILE + 5)
STEP_COUNT = 4
AWKWARD = (
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    -1e-39,
    1e-30,
    1e19,
    -1e20,
    3e38,
    np.inf,
    -np.inf,
    np.nan,
)
FLAGS = tuple(
    {"weight_decay": decay, "maximize": maximize, "amsgrad": amsgrad, "betas": (beta1, 0.95)}
    for decay, maximize, amsgrad, beta1 in itertools.product(
        (0.0, 0.1), (False, True), (False, True), (0.9, 0.5, 0.0)
    )
)


def numbers(length: int, seed: int) -> torch.Tensor:
    """Of many magnitudes, and a quarter of them awkward."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(length) * 10.0 ** random.integers(-6, 7, length)
    is_awkward = random.random(length) < 0.25
    values[is_awkward] = random.choice(AWKWARD, length)[is_awkward]
    return torch.from_numpy(values.astype(np.float32))


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(length, length).to(dtype)) for length in LENGTHS]


def groups_of(each: list[nn.Parameter]) -> list[dict[str, Any]]:
    """With other flags for each length, and all of them for short ones."""
    return [
        {"params": [parameter], **FLAGS[index % len(FLAGS)]} for index, parameter in enumerate(each)
    ]


def set_gradients(each: list[nn.Parameter], step: int) -> None:
    for parameter in each:
        gradient = numbers(parameter.numel(), 1000 * step + parameter.numel())
        parameter.grad = gradient.to(parameter.dtype)


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit, where neither is a NaN: its bits depend on the order of operands."""
    both_nan = actual.isnan() & expected.isnan()
    integers = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert bool(((actual.view(integers) == expected.view(integers)) | both_nan).all()), what


@pytest.fixture
def session() -> Iterator[memd_client.Session]:
    with (
        running_daemon(host="96MiB", nvme="256MiB") as daemon,
        memd_client.connect(daemon.address, job="lengths", host_bytes="64MiB") as session,
    ):
        yield session


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_length_has_the_bits_of_torchs_fused_kernel(
    session: memd_client.Session, dtype: torch.dtype, *, decoupled: bool
) -> None:
    ours, masters = parameters(dtype), [nn.Parameter(p.float()) for p in parameters(dtype)]
    name = "AdamW" if decoupled else "Adam"
    optimizer = getattr(memd_client, name)(groups_of(ours), lr=1e-2, session=session)
    twin = getattr(torch.optim, name)(groups_of(masters), lr=1e-2, fused=True)
    for step in range(1, STEP_COUNT + 1):
        for each in (ours, masters):
            set_gradients(each, step)
        if dtype == torch.bfloat16:
            for parameter, master in zip(ours, masters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
        optimizer.step()
        twin.step()
        for length, parameter, master in zip(LENGTHS, ours, masters, strict=True):
            expected = master.detach()
            if dtype == torch.bfloat16:
                expected = round_to_half(expected)
            assert_same_numbers(parameter.detach(), expected, f"{length} after step {step}")
    assert session.committed_step == STEP_COUNT
    states, expected_states = optimizer.state_dict()["state"], twin.state_dict()["state"]
    for index, length in enumerate(LENGTHS):
        assert states[index].keys() == expected_states[index].keys()
        for key, value in expected_states[index].items():
            assert_same_numbers(states[index][key].clone(), value, f"{key} of {length}")


# An order of dimensions, and the shape in memory.
CHANNELS_LAST = ((0, 3, 1, 2), (5, 2, 3, 13))
FORMS = {
    "shorter-than-a-vector": ((1, 0), (3, 2)),
    "whole-vectors": ((0, 3, 1, 2), (5, 2, 3, 16)),
    "ten-vectors": ((1, 0), (5, 16)),
    "three-dimensions": ((2, 0, 1), (3, 8, 5)),
}


def strided(form: tuple[tuple[int, ...], tuple[int, ...]]) -> nn.Parameter:
    order, shape = form
    parameter = nn.Parameter(numbers(int(np.prod(shape)), 7).view(shape).permute(order))
    assert not parameter.is_contiguous()
    return parameter


def set_strided_gradient(parameter: nn.Parameter, step: int) -> None:
    """In the parameter's order in memory, as backward makes it."""
    values = numbers(parameter.numel(), 1000 * step)
    parameter.grad = torch.empty_like(parameter).copy_(values.view(parameter.shape))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_strides_have_the_bits_of_torchs_fused_kernel(
    session: memd_client.Session, form: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    ours, twins = strided(form), strided(form)
    optimizer = memd_client.AdamW([("p", ours)], lr=1e-2, session=session)
    twin = torch.optim.AdamW([twins], lr=1e-2, fused=True)
    for step in range(1, STEP_COUNT + 1):
        for parameter, each in ((ours, optimizer), (twins, twin)):
            set_strided_gradient(parameter, step)
            each.step()
        assert_same_numbers(ours.detach(), twins.detach(), f"after step {step}")
    assert ours.stride() == twins.stride()


def test_strides_that_move_the_last_elements_are_refused(session: memd_client.Session) -> None:
    """They have other bits there, and nothing is lost: made contiguous, the loop goes on."""
    with pytest.raises(memd_client.InvalidArgument, match=r"'early'.*not contiguous.*390 elements"):
        memd_client.AdamW([("early", strided(CHANNELS_LAST))], session=session)
    ours = nn.Parameter(strided(CHANNELS_LAST).detach().contiguous())
    twins = nn.Parameter(ours.detach().clone())
    optimizer = memd_client.AdamW([("late", ours)], lr=1e-2, session=session)
    twin = torch.optim.AdamW([twins], lr=1e-2, fused=True)
    for step in range(1, STEP_COUNT + 1):
        for parameter in (ours, twins):
            set_strided_gradient(parameter, step)
        if step == 2:
            ours.data = ours.data.contiguous(memory_format=torch.channels_last)
            with pytest.raises(memd_client.InvalidArgument, match=r"'late'.*not contiguous"):
                optimizer.step()
            ours.data = ours.data.contiguous()
        optimizer.step()
        twin.step()
        assert_same_numbers(ours.detach(), twins.detach(), f"after step {step}")
    assert session.committed_step == STEP_COUNT
