"""Frozen parameters of any dtype: run as client_cases.py is."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

import memd_client
from tests.unit.client_cases import (
    WIDTH,
    assert_same_gradients,
    build,
    leases_held,
    loss_of,
)

if TYPE_CHECKING:
    from memd_client import Session
    from tests.unit.client_cases import OpenSession

DTYPES = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)


class Quantised(nn.Module):
    """A linear layer with a frozen weight of bytes, a scale a row, and a trained adapter."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        values = torch.randint(0, 100, (WIDTH, WIDTH))
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1, dtype=torch.float16), requires_grad=False)
        self.offset = nn.Parameter(
            torch.tensor(7, dtype=torch.int8), requires_grad=False
        )  # one byte
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = (self.weight.to(torch.float32) - self.offset) * self.scale.to(torch.float32)
        output: torch.Tensor = functional.linear(x, whole) / 100
        output += self.up(self.down(x)) + self.shift
        return output


class Qlora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Quantised(dtype)
            for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.relu(layer(x))
        return x


class TestFrozen:
    @pytest.mark.parametrize("early", [False, True])
    def test_a_quantised_model_with_adapters_trains_and_resumes_with_plain_bits(
        self, job: OpenSession, early: bool
    ) -> None:
        reference = build(Qlora)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        step = 0
        for steps in (3, 2):
            with job() as session:
                torch.manual_seed(0 if step == 0 else 1)  # stored values win
                model = memd_client.offload(Qlora(), session)
                assert session.resume() == step
                ours = memd_client.AdamW(model.parameters(), lr=1e-2, step_in_backward=early)
                for _ in range(steps):
                    losses = []
                    for trained, optimizer in ((model, ours), (reference, torchs)):
                        losses.append(loss_of(trained, step))
                        losses[-1].backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    assert torch.equal(*losses)
                    step += 1
                assert leases_held(session) == 0
                state, expected = model.state_dict(), reference.state_dict()
                for name, value in expected.items():
                    assert state[name].dtype == value.dtype
                    assert torch.equal(bits(state[name]), bits(value)), name

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (3,), (4, 5), (3, 7, 1)], ids=str)
    def test_each_dtype_has_its_bits(
        self, session: Session, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        torch.manual_seed(0)
        value = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        if dtype != torch.bool:
            value *= torch.randint(1, 256, value.shape, dtype=torch.uint8)
        value = value.view(dtype).view(shape)
        model = nn.ParameterDict({"w": nn.Parameter(value.clone(), requires_grad=False)})
        memd_client.offload(model, session)
        parameter: Any = model["w"]
        assert (parameter.dtype, parameter.shape) == (dtype, value.shape)
        assert torch.equal(bits(parameter.detach()), bits(value))
        with memd_client.gather(model, write=True):
            parameter.data = torch.zeros_like(value)
        assert torch.count_nonzero(bits(parameter.detach())) == 0
        model.load_state_dict({"w": value})
        assert torch.equal(bits(model.state_dict()["w"]), bits(value))
        assert torch.equal(bits(copy.deepcopy(parameter)), bits(value))
        assert leases_held(session) == 0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
    def test_only_float32_and_bfloat16_are_trained(
        self, session: Session, dtype: torch.dtype
    ) -> None:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=dtype))})
        with pytest.raises(memd_client.MemdError, match=r"'w', or freeze it.*it is torch\."):
            memd_client.offload(model, session)
        memd_client.offload(model.requires_grad_(False), session)
        for gathered in (False, True):
            with (
                memd_client.gather(model if gathered else []),
                pytest.raises(memd_client.InvalidArgument, match="'w' stays frozen"),
            ):
                model.requires_grad_(True)

    @pytest.mark.parametrize("gathered", [False, True])
    def test_a_gradient_that_memd_has_no_room_for_is_refused(
        self, session: Session, *, gathered: bool
    ) -> None:
        frozen = nn.Parameter(torch.zeros(4, dtype=torch.float16), requires_grad=False)
        model = memd_client.offload(nn.ParameterDict({"w": frozen}), session)
        parameter: Any = model["w"]
        with (
            memd_client.gather(model if gathered else [], write=True),
            pytest.raises(memd_client.InvalidArgument, match="'w' stays frozen"),
        ):
            parameter.grad = torch.ones(4, dtype=torch.float16)
        parameter.grad = None
        assert parameter.grad is None

    @pytest.mark.parametrize(
        "other", [torch.zeros(4, 2, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int8)]
    )
    def test_another_shape_or_dtype_is_another_parameter(
        self, job: OpenSession, other: torch.Tensor
    ) -> None:
        for value in (torch.ones(2, 4, dtype=torch.uint8), other, torch.zeros(2, 4)):
            model = nn.ParameterDict({"w": nn.Parameter(value, requires_grad=False)})
            with job() as session:
                if value is not other and value.dtype == torch.uint8:
                    memd_client.offload(model, session)
                    continue
                with pytest.raises(memd_client.InvalidArgument, match=r"'w:uint8\[2,4\]'"):
                    memd_client.offload(model, session)

    def test_transforms_of_torch_func_use_the_values(self, session: Session) -> None:
        x = torch.randn(3, WIDTH)
        model, reference = memd_client.offload(build(Qlora), session), build(Qlora)
        ours, plain = (torch.func.vmap(each)(x).detach() for each in (model, reference))
        assert torch.equal(ours, plain)
        ours, plain = (
            torch.func.grad(lambda x, each=each: each(x).sum())(x) for each in (model, reference)
        )
        assert torch.equal(ours, plain)
        with torch.inference_mode():
            assert torch.equal(model(x), reference(x))

    def test_a_checkpoint_keeps_their_values_whatever_torch_names_the_function_that_keeps_them(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "_recomputation_hook"
        source = inspect.getsource(getattr(checkpoint, name))
        assert source.count("def pack_hook(x)") == 1
        found: dict[str, Any] = {}
        exec(source.replace("pack_hook", "other"), vars(checkpoint), found)
        monkeypatch.setattr(checkpoint, name, found[name])
        model, reference = build(Normed), build(Normed)
        memd_client.offload(model, session)
        for each in (model, reference):
            output = checkpoint.checkpoint(each, torch.ones(2, WIDTH), use_reentrant=False)
            output.square().sum().backward()
        assert_same_gradients(model, reference)


class Normed(nn.Module):
    """An operator saves a frozen parameter itself, between trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH).requires_grad_(requires_grad=False),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


def bits(value: torch.Tensor) -> torch.Tensor:
    """NaN equals itself then."""
    return value.detach().contiguous().flatten().view(torch.uint8)
