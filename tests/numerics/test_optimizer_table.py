"""torch's own table of Adam's and AdamW's settings: memd has the bits of torch's fused CPU kernel
for each.

The table names more for other devices than for the CPU, where the fused kernel takes them as well.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from memd.demo.twin import round_to_half
from tests.daemons import Daemon, running_daemon

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # hypothesis, which no test here needs
    from torch.testing._internal.common_optimizers import optim_db

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 61  # torch's vectors have 8 elements, and those behind the last whole one other bits
STEP_COUNT = 7
DEVICES = ("cpu", "mps", "cuda")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ("Adam", "AdamW")
INFOS: dict[str, Any] = {info.name: info for info in optim_db if info.name in NAMES}
# Arguments that torch's constructors take and its table leaves out.
MORE: dict[str, dict[str, Any]] = {
    "maximize without decay": {"maximize": True, "weight_decay": 0.0},
    "maximize, Tensor lr, Tensor betas": {
        "maximize": True,
        "lr": torch.tensor(0.003, dtype=torch.float64),
        "betas": (torch.tensor([0.7]), torch.tensor(0.97, dtype=torch.float64)),
    },
    "Tensor eps and weight_decay": {
        "eps": torch.tensor(1e-6),
        "weight_decay": torch.tensor(0.05, dtype=torch.float64),
    },
    "no learning rate": {"lr": 0},
    "a low first beta": {"betas": (0.3, 0.9), "eps": 0.0},
    "amsgrad, Tensor lr, a low second beta": {
        "amsgrad": True,
        "lr": torch.tensor(0.01),
        "betas": (0.7, 0.5),
        "weight_decay": 0.1,
    },
}


def table() -> dict[str, dict[str, Any]]:
    """Description → settings. Both optimizers have the same inputs."""
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        for device in DEVICES:
            for each in INFOS[name].optim_inputs_func(device):
                found.setdefault(each.desc, each.kwargs)
    return found | MORE


TABLE = table()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.late(torch.tanh(self.first(x)))
        return output


def build(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


class Reference:
    """torch's fused optimizer: over the parameters if they are fp32, and over fp32 masters of which
    each step publishes the rounded half if they are bf16."""

    def __init__(self, parameters: list[nn.Parameter], name: str, settings: dict[str, Any]) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        kind: Any = getattr(torch.optim, name)
        self.inner: torch.optim.Optimizer = kind(
            self._masters_of(parameters), **{**settings, "fused": True}
        )
        self.param_groups = self.inner.param_groups

    def _masters_of(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters
        ]
        self._pairs += zip(parameters, masters, strict=True)
        return masters

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group({**group, "params": self._masters_of(group["params"])})

    @torch.no_grad()
    def step(self) -> None:
        separate = [pair for pair in self._pairs if pair[0] is not pair[1]]
        for parameter, master in separate:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in separate:
            parameter.copy_(round_to_half(master))

    def zero_grad(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def change(optimizer: Any, step: int) -> None:
    """Changes groups between steps, as schedulers and loops do."""
    for group in optimizer.param_groups:
        if step in {1, 4}:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
        if step == 3:
            group["weight_decay"] = 0.03
            group["betas"] = (0.6, 0.9)
        if step == 5:
            group["maximize"] = not group["maximize"]
            group["amsgrad"] = False  # a maximum that is there stays


def train(model: Net, optimizer: Any, dtype: torch.dtype) -> None:
    for step in range(STEP_COUNT):
        loss_of(model, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(optimizer, step)
        if step == 2:
            model.late.requires_grad_()
            optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.02})


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="96MiB", nvme="256MiB") as daemon:
        yield daemon


@pytest.fixture
def session(daemon: Daemon) -> Iterator[memd_client.Session]:
    with memd_client.connect(
        daemon.address, job="table", host_bytes="64MiB", nvme_bytes="128MiB", fresh=True
    ) as session:
        yield session
        session.drop_job()


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("offloaded", [True, False], ids=["offloaded", "resident"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("desc", TABLE)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_torchs_table_has_the_bits_of_the_fused_kernel(
    session: memd_client.Session, name: str, desc: str, dtype: str, *, offloaded: bool
) -> None:
    kind = DTYPES[dtype]
    model, reference = build(kind), build(kind)
    if offloaded:
        memd_client.offload(model, session)
    settings = [copy.deepcopy(TABLE[desc]) for _ in range(2)]  # tensors are changed in place
    optimizer = getattr(memd_client, name)(
        model.first.parameters(),
        session=session,
        **{**settings[0], "fused": True},
    )
    twin = Reference(list(reference.first.parameters()), name, settings[1])
    train(model, optimizer, kind)
    train(reference, twin, kind)
    assert session.committed_step == STEP_COUNT
    assert_same_bits(model.state_dict(), reference.state_dict())
    state, expected = optimizer.state_dict(), twin.state_dict()
    assert state["state"].keys() == expected["state"].keys() == set(range(4))
    for index, moments in expected["state"].items():
        assert_same_bits(state["state"][index], moments)
    settled = {"foreach", "fused"}  # the arguments of either
    for group, other in zip(state["param_groups"], expected["param_groups"], strict=True):
        assert {key: group[key] for key in group if key not in settled} == {
            key: other[key] for key in other if key not in settled
        }


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_refuses_is_refused_as_well(session: memd_client.Session, name: str) -> None:
    model = memd_client.offload(build(torch.float32), session)
    seen = set()
    for each in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
        given, kind = each.optimizer_error_input, getattr(torch.optim, name)
        params = given.params if given.params is not None else [nn.Parameter(torch.zeros(4))]
        with pytest.raises(each.error_type, match=each.error_regex):
            kind(params, **given.kwargs)
        params = given.params if given.params is not None else model.parameters()
        with pytest.raises(each.error_type) as refused:
            getattr(memd_client, name)(params, session=session, **given.kwargs)
        seen.add(re.split(r"[ :]", str(refused.value), maxsplit=1)[0])
    assert len(seen) > 5, seen
    for settings in ({"foreach": True}, {"differentiable": True}):
        with pytest.raises(RuntimeError):
            getattr(torch.optim, name)([nn.Parameter(torch.zeros(4))], fused=True, **settings)
        with pytest.raises(memd_client.InvalidArgument, match=next(iter(settings))):
            getattr(memd_client, name)(model.parameters(), fused=True, **settings)
    # The next optimizer may still have the parameters.
    getattr(memd_client, name)(model.parameters())


@pytest.mark.parametrize("is_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_every_scheduler_of_torchs_table_has_torchs_bits(
    session: memd_client.Session, name: str, *, is_tensor: bool
) -> None:
    """The optimizer stays, as schedulers may: it goes on from rate to rate."""
    both = [memd_client.offload(build(torch.float32), session), build(torch.float32)]
    rates: list[list[float]] = [[], []]
    for which, (module, kind) in enumerate(zip(both, (memd_client, torch.optim), strict=True)):
        rate = torch.tensor(0.01) if is_tensor else 0.01
        optimizer = getattr(kind, name)(
            [
                {"params": [module.first.weight], "amsgrad": True},
                {"params": [module.first.bias], "maximize": True},
            ],
            lr=rate,
            fused=True,
        )
        for makers in INFOS["Adam"].scheduler_inputs:  # AdamW has fewer
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)
            schedulers = [make(optimizer) for make in makers]
            for step in range(4):
                loss = loss_of(module, step, torch.float32)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                for scheduler in schedulers:
                    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        scheduler.step(loss.detach())
                    else:
                        scheduler.step()
                rates[which].append(float(optimizer.param_groups[0]["lr"]))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 5
    assert_same_bits(both[0].state_dict(), both[1].state_dict())
