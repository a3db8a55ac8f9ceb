"""Offloaded models under autocast, with each daemon: run as client_cases.py is."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memd_client
from memd_client.parameters.residency import residency_of_storage
from tests.unit.client_cases import (
    LENGTH,
    MODELS,
    WIDTH,
    Gpt,
    Mlp,
    Recurrent,
    assert_same_gradients,
    assert_same_state,
    batch,
    build,
    leases_held,
    loss_of,
    skip_without_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session


class Shared(nn.Module):
    """One linear layer called twice, and one used through a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.once = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(functional.relu(self.twice(x)))
        output: torch.Tensor = self.once(x)
        return output


class Loop(nn.Module):
    """Cells that are called for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTMCell(WIDTH, WIDTH)
        self.second = nn.RNNCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, carried, outputs = None, None, []
        for position in x.unbind(1):
            state = self.first(position, state)
            carried = self.second(state[0], carried)
            outputs.append(carried)
        return torch.stack(outputs)


class Precise(nn.Module):
    """A part that computes in fp32, and casts by itself; the last layer in bf16 whatever the rest
    has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.second(x.float())
            by_hand = functional.linear(x.bfloat16(), self.first.weight.bfloat16())
            x = x + self.second(by_hand.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.third(x)
        output: torch.Tensor = x + self.first(x)
        return output


class LowPrecision(torch.autograd.Function):
    """Gets casts from `custom_fwd`, and saves them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = LowPrecision.apply(self.linear(x), self.linear.weight)  # type: ignore[no-untyped-call]
        output: torch.Tensor = self.out(x) + x.flatten(1)[:, :WIDTH].unsqueeze(1)
        return output


class Adapted(nn.Module):
    """Frozen layers, whose casts autocast does not cache, with one that is trained on top."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.conv(self.frozen(self.before(x)))
        return output


class Autocasting(nn.Module):
    """Enters autocast in its own forward, around a child and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Mlp(), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: torch.Tensor = self.inner(functional.linear(x, self.weight)) @ self.weight
            return output


class Changing(nn.Module):
    """Changes its weight in its own forward, between two uses."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(self.linear(x), self.weight)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return functional.linear(x, self.weight)


AUTOCAST_MODELS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "shared layer": Shared,
    "cells in a loop": Loop,
    "parts in other precisions": Precise,
    "custom_fwd": Functions,
    "frozen": Adapted,
    "autocast in forward": Autocasting,
    "changed in forward": Changing,
}


# The others cast by themselves, put parameters in place before they enter autocast, or change them.
CAST_BY_AUTOCAST = [
    name
    for name, make in AUTOCAST_MODELS.items()
    if make not in (Precise, Functions, Autocasting, Changing)
]


class LivingCasts(TorchDispatchMode):
    """The casts of parameters that operations inside made, and that still have memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self.bytes_max = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            source = args[0].untyped_storage()
            if residency_of_storage(source) is not None and result.dtype != args[0].dtype:
                self._made.append(weakref.ref(result.untyped_storage()))
        self.bytes_max = max(self.bytes_max, self.bytes)
        return result

    @property
    def made_count(self) -> int:
        return len(self._made)

    @property
    def bytes(self) -> int:
        living = [storage for made in self._made if (storage := made()) is not None]
        return sum(storage.nbytes() for storage in living)


@pytest.fixture(params=AUTOCAST_MODELS)
def cast_pair(request: pytest.FixtureRequest, session: Session) -> tuple[nn.Module, nn.Module]:
    """An offloaded model, and the same one in memory."""
    make = AUTOCAST_MODELS[request.param]
    reference = build(make)
    skip_without_kernel(reference, torch.bfloat16)
    return memd_client.offload(build(make), session), reference


@pytest.fixture
def shared_pair(session: Session) -> tuple[nn.Module, nn.Module]:
    return memd_client.offload(build(Shared), session), build(Shared)


def optimizers(model: nn.Module, reference: nn.Module) -> tuple[Any, Any]:
    ours = memd_client.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    trained = [p for p in reference.parameters() if p.requires_grad]
    return ours, torch.optim.AdamW(trained, lr=1e-2, fused=True)


@pytest.fixture(autouse=True)
def _autocast_has_ended() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_training_has_torchs_bits(
        self, cast_pair: tuple[nn.Module, nn.Module], session: Session, dtype: torch.dtype
    ) -> None:
        """Two micro-batches in one context and one in another, then a step."""
        if dtype is torch.float16 and isinstance(cast_pair[0], Recurrent):
            pytest.skip("torch has no LSTM kernel in fp16 on most CPUs")
        losses: dict[nn.Module, list[torch.Tensor]] = {}
        for model, optimizer in zip(cast_pair, optimizers(*cast_pair), strict=True):
            seen = losses.setdefault(model, [])
            for step in range(2):
                with torch.autocast("cpu", dtype=dtype):
                    first, second = loss_of(model, 3 * step), loss_of(model, 3 * step + 1)
                (first + second).backward()
                with torch.autocast("cpu", dtype=dtype):
                    third = loss_of(model, 3 * step + 2)
                    third.backward()
                seen += [first.detach(), second.detach(), third.detach()]
                assert leases_held(session) == 0
                if step == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        ours, expected = losses.values()
        assert all(torch.equal(*each) for each in zip(ours, expected, strict=True))
        assert_same_gradients(*cast_pair)
        assert_same_state(*cast_pair)

    def test_a_scaler_skips_and_makes_the_steps_that_torchs_does(
        self, gpt: tuple[nn.Module, nn.Module]
    ) -> None:
        scales = []
        for model, optimizer in zip(gpt, optimizers(*gpt), strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
            for step in range(8):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = loss_of(model, step)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        half = len(scales) // 2
        assert scales[:half] == scales[half:]
        assert scales[0] < 2.0**24, "no step was skipped"
        assert max(scales[1:half]) > min(scales[:half]), "no step was made"
        assert_same_state(*gpt)

    def test_the_gradients_of_two_uses_add_up_in_the_low_precision(
        self, shared_pair: tuple[nn.Module, nn.Module]
    ) -> None:
        model, reference = shared_pair
        uncached = copy.deepcopy(reference)
        for each, cache in ((model, True), (reference, True), (uncached, False)):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                loss = loss_of(each)
            loss.backward()
        assert_same_gradients(model, reference)
        sums = [each.get_parameter("twice.weight").grad for each in (reference, uncached)]
        assert sums[0] is not None
        assert sums[1] is not None
        assert not torch.equal(sums[0], sums[1]), "both sums have the same bits"

    @pytest.mark.parametrize("cast_pair", CAST_BY_AUTOCAST, indirect=True)
    def test_no_cast_outlives_its_module_call_in_training(
        self, cast_pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, _ = cast_pair
        with LivingCasts() as living:
            losses = []
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for index in range(2):
                    losses.append(loss_of(model, index))
                    assert living.bytes == 0
            assert living.made_count
            sum(losses, torch.zeros(())).backward()
            assert living.bytes == 0
        assert leases_held(session) == 0

    @pytest.mark.parametrize("cast_pair", CAST_BY_AUTOCAST, indirect=True)
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_training_follows_an_evaluation_in_inference_mode(
        self, cast_pair: tuple[nn.Module, nn.Module]
    ) -> None:
        losses = []
        for model in cast_pair:
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                loss_of(model, 0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(loss_of(model, 1))
            losses[-1].backward()
        assert torch.equal(*losses)
        for ours, expected in zip(*(model.parameters() for model in cast_pair), strict=True):
            assert (ours.grad is None) == (expected.grad is None)
            assert expected.grad is None or torch.equal(ours.grad, expected.grad)

    @pytest.mark.parametrize("cast_pair", CAST_BY_AUTOCAST, indirect=True)
    @pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
    def test_no_cast_outlives_its_module_call_in_one_long_evaluation(
        self,
        cast_pair: tuple[nn.Module, nn.Module],
        grad_mode: Callable[[], Any],
    ) -> None:
        outputs = []
        for model in cast_pair:
            model.eval()
            with LivingCasts() as living, grad_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                for index in range(3):
                    outputs.append(loss_of(model, index))
                    assert living.bytes == 0
        half = len(outputs) // 2
        assert all(torch.equal(*each) for each in zip(outputs[:half], outputs[half:], strict=True))

    def test_the_casts_of_one_module_at_a_time_are_in_memory(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        largest = max(
            sum(parameter.numel() for parameter in layer.parameters())
            for layer in (model.first, model.second)
        )
        with LivingCasts() as living:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model) + loss_of(model, 1)
            loss.backward()
        assert living.bytes_max == largest * torch.bfloat16.itemsize

    def test_nothing_is_cast_when_backward_does_not_need_it(self, mlp: tuple[Mlp, Mlp]) -> None:
        """Only the second weight is needed, for the gradient of its input."""
        model, _ = mlp
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        with LivingCasts() as living:
            loss.backward()
        assert living.made_count == 1

    def test_backward_over_a_retained_graph_after_a_step_has_torchs_bits(
        self, shared_pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        """With casts, torch does not refuse it: it has copies of the old values."""
        for model, optimizer in zip(shared_pair, optimizers(*shared_pair), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first, second = loss_of(model), loss_of(model, 1)
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            second.backward()
            optimizer.step()
            del first, second
        assert leases_held(session) == 0
        assert_same_state(*shared_pair)

    def test_a_step_inside_autocast_leaves_torchs_cache_as_it_was(
        self, shared_pair: tuple[nn.Module, nn.Module]
    ) -> None:
        """In the context torch goes on with the casts of the old values."""
        losses = []
        for model, optimizer in zip(shared_pair, optimizers(*shared_pair), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for step in range(3):
                    loss = loss_of(model, step)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                torch.clear_autocast_cache()
                losses.append(loss_of(model).detach())
        assert all(torch.equal(*each) for each in zip(losses[:4], losses[4:], strict=True))
        assert_same_state(*shared_pair)

    @pytest.mark.parametrize("way", ["gather", "copy_", "load_state_dict", "in forward", "data"])
    def test_a_change_inside_autocast_leaves_torchs_casts_as_they_were(
        self, mlp: tuple[Mlp, Mlp], session: Session, way: str
    ) -> None:
        losses = []
        for model in mlp:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                before = loss_of(model)
                change(model, way)
                losses.append(loss_of(model, 1).detach())
                torch.clear_autocast_cache()
                losses.append(loss_of(model, 1).detach())
            before.backward()
            losses.append(before.detach())
        assert all(torch.equal(*each) for each in zip(losses[:3], losses[3:], strict=True))
        assert_same_gradients(*mlp)
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_a_change_in_forward_that_torchs_cache_does_not_outlive_is_named(
        self, session: Session
    ) -> None:
        """A frozen weight has a cast for each use, and backward has only its recipe."""
        model = memd_client.offload(Changing(trained=False), session)
        for changes_again in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model)
            if changes_again:
                with memd_client.gather(model, write=True):
                    pass
            with pytest.raises(RuntimeError, match=r"inplace operation.*parameter 'weight'"):
                loss.backward()

    def test_a_cast_that_the_user_keeps_is_the_users(self, mlp: tuple[Mlp, Mlp]) -> None:
        """And so is one that he has changed by a means that torch does not notice."""
        for model in mlp:
            kept: list[torch.Tensor] = []

            def hook(
                module: nn.Module, inputs: Any, kept: list[torch.Tensor] = kept
            ) -> torch.Tensor:
                with torch.autocast("cpu", enabled=False):
                    cast = module.get_parameter("weight").bfloat16()
                    view = module.get_parameter("weight").bfloat16().view(-1, 16)
                    cast.data.mul_(2)
                    view.data.mul_(3)
                    kept.append(cast)
                    x = functional.linear(inputs[0].bfloat16(), cast)
                    return functional.linear(x.view(-1, 16), view).float()[:, :64]

            with torch.autocast("cpu", dtype=torch.bfloat16):
                handle = model.second.register_forward_pre_hook(hook)
                loss = loss_of(model)
                handle.remove()
            loss.backward()
            weight = model.state_dict()["layers.2.weight"]
            assert torch.equal(kept[0], weight.bfloat16() * 2)
        assert_same_gradients(*mlp)

    def test_hooks_of_others_keep_their_bytes(
        self, shared_pair: tuple[nn.Module, nn.Module]
    ) -> None:
        """Then a cast has other users than the cache, and its memory stays."""
        for model in shared_pair:
            with (
                torch.autocast("cpu", dtype=torch.bfloat16),
                torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
            ):
                loss = loss_of(model) + loss_of(model, 1)
            loss.backward()
        assert_same_gradients(*shared_pair)

    def test_threads_have_torchs_bits(self, gpt: tuple[nn.Module, nn.Module]) -> None:
        """A thread that leaves autocast empties the cache of all."""
        model, reference = gpt
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            expected = [loss_of(reference, index) for index in range(3)]
        wrong: list[int] = []

        def evaluate(index: int) -> None:
            for _ in range(10):
                with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                    if not torch.equal(loss_of(model, index), expected[index]):
                        wrong.append(index)

        threads = [threading.Thread(target=evaluate, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_copies_of_a_model_under_autocast_are_ordinary(self, gpt: tuple[Gpt, Gpt]) -> None:
        model, reference = gpt
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(model)
            with memd_client.gather(model):
                copied = copy.deepcopy(model)
            loss = loss_of(copied)
            expected = loss_of(reference)
        assert torch.equal(loss, expected)
        assert batch(copied).equal(batch(reference))


def change(model: Mlp, way: str) -> None:
    weight = model.first.weight
    if way == "gather":
        with memd_client.gather(model, write=True), torch.no_grad():
            weight.mul_(2)
    elif way == "copy_":
        with torch.no_grad():
            weight.copy_(torch.ones_like(weight))
    elif way == "load_state_dict":
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    else:

        def hook(module: nn.Module, inputs: Any) -> None:
            parameter = module.get_parameter("weight")
            if way == "data":
                parameter.data = parameter.detach() * 3
            else:
                with torch.no_grad():
                    parameter.mul_(2)

        handle = model.first.register_forward_pre_hook(hook)
        model.first(torch.zeros(1, WIDTH))
        handle.remove()
