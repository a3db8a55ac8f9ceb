"""What must hold of offloaded models, whoever serves them: run against the fake daemon here,
against a real one in tests/integration.

Each module that imports these defines the fixture `job`: a function that opens a session of one
job, again after it was closed.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import memd_client
from memd_client import Session
from memd_client.base.sizes import TILE_ELEMENTS
from memd_client.core.job import Job
from memd_client.core.tensor_streams import TensorStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from memd_client.connection.shard import Shard
    from memd_client.core.tensor_streams import MomentPart
    from memd_proto.v1 import types_pb2

    OpenSession = Callable[[], Session]

# The tensors are small: more threads would only wait for each other.
torch.set_num_threads(1)
VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output

    @property
    def first(self) -> nn.Linear:
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def second(self) -> nn.Linear:
        layer = self.layers[2]
        assert isinstance(layer, nn.Linear)
        return layer


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    loss_of(model, index).backward()
    optimizer.step()
    optimizer.zero_grad()


def copy_by_checkpoint(
    source: nn.Module,
    source_optimizer: torch.optim.Optimizer,
    target: nn.Module,
    target_optimizer: torch.optim.Optimizer,
    folder: Path,
) -> None:
    """By torch's distributed checkpoint, which reads only what the target says that it has."""
    model_state, state = get_state_dict(source, source_optimizer)
    save({"model": model_state, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    model_state, state = get_state_dict(target, target_optimizer)
    loaded: dict[str, Any] = {"model": model_state, "optimizer": state}
    load(loaded, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        target,
        target_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )


def assert_same_moments(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["state"].keys() == expected["state"].keys()
    for index, moments in expected["state"].items():
        for name, value in moments.items():
            assert torch.equal(state["state"][index][name], value), (index, name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        normed = self.norm(x)
        x = x + scale * self.attention(normed, normed, normed, need_weights=False)[0]
        output: torch.Tensor = x + self.mlp(x)
        return output


class Gpt(nn.Module):
    """Tied embeddings, and positions of which a view is used; `checkpointing` is None or
    use_reentrant.
    """

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[:LENGTH]
        for block in self.blocks:
            if self.checkpointing is None or not self.training:
                x = block(x, scale=0.5)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        output: torch.Tensor = self.head(x)
        return output


class Branches(nn.Module):
    """Experts chosen by the input: some get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(4))
        self.gate = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (x.mean((0, 1)) @ self.gate).softmax(0)
        chosen = int(weights.argmax())
        output: torch.Tensor = weights[chosen] * self.experts[chosen](x)
        return output


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(functional.relu(self.norm(self.first(x))))
        return output


class Recurrent(nn.Module):
    """Calls `forward` of a child past its hooks, and a kernel that takes a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out.forward(self.lstm(x)[0]) * self.out.weight.mean()


class Encoder(nn.Module):
    """Evaluation runs in one kernel that takes the parameters of all children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


class Parametrized(nn.Module):
    """The weight is computed from the parameter in every use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Scaled(torch.autograd.Function):
    """Keeps a parameter that it was given, by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.scale = nn.Linear(1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Scaled.apply(  # type: ignore[no-untyped-call]  # torch's
            self.inner(x), self.scale.bias
        )
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "gpt with tied embeddings": Gpt,
    "gpt checkpointed": lambda: Gpt(checkpointing=False),
    "gpt checkpointed reentrantly": lambda: Gpt(checkpointing=True),
    "branches": Branches,
    "batch norm": BatchNorm,
    "recurrent": Recurrent,
    "encoder": Encoder,
    "parametrized": Parametrized,
    "custom function": Custom,
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def skip_without_kernel(model: nn.Module, dtype: torch.dtype) -> None:
    """oneDNN has an LSTM of low precision for some CPUs, and torch fails on the others."""
    if isinstance(model, Recurrent) and not _has_lstm(dtype):
        pytest.skip(f"torch has no LSTM kernel in {dtype} on this CPU")


@cache
def _has_lstm(dtype: torch.dtype) -> bool:
    try:
        with torch.autocast("cpu", dtype=dtype):
            nn.LSTM(8, 8)(torch.ones(1, 1, 8))
    except RuntimeError as error:
        assert "primitive" in str(error)  # noqa: PT017  # any other error is no lack of a kernel
        return False
    return True


def batch(model: nn.Module, index: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    if isinstance(model, Gpt):
        return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    return torch.randn(4, LENGTH, WIDTH, generator=generator)


def loss_of(model: nn.Module, index: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(batch(model, index)).float().square().mean()
    return loss


def leases_held(session: Session) -> int:
    return session.statistics().leases_held


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """All of them, bit for bit, one at a time."""
    for (name, parameter), (_, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        gradient = parameter.grad
        assert (gradient is None) == (expected.grad is None), name
        if gradient is not None and expected.grad is not None:
            assert torch.equal(gradient, expected.grad), name


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    state, expected = model.state_dict(), reference.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def session(job: OpenSession) -> Iterator[Session]:
    with job() as session:
        yield session


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, session: Session) -> tuple[nn.Module, nn.Module]:
    """An offloaded model, and the same one in memory."""
    make = MODELS[request.param]
    return memd_client.offload(build(make), session), build(make)


@pytest.fixture
def gpt(session: Session) -> tuple[nn.Module, nn.Module]:
    return memd_client.offload(build(Gpt), session), build(Gpt)


@pytest.fixture
def mlp(session: Session) -> tuple[Mlp, Mlp]:
    torch.manual_seed(0)
    reference = Mlp()
    return memd_client.offload(copy.deepcopy(reference), session), reference


class TestStreaming:
    def test_loss_and_gradients_have_the_bits_of_the_untouched_model(
        self, pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = pair
        loss, expected = loss_of(model), loss_of(reference)
        assert torch.equal(loss, expected)
        assert leases_held(session) == 0, "autograd keeps a parameter's bytes after forward"
        loss.backward()
        expected.backward()
        assert leases_held(session) == 0, "a parameter's bytes are alive after backward"
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_several_backward_calls_accumulate(
        self, pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        for model in pair:
            for index in range(3):
                loss_of(model, index).backward()
            loss = loss_of(model, 3)
            if not getattr(model, "checkpointing", None):  # which cannot run backward twice
                loss.backward(retain_graph=True)
            loss.backward()
        assert leases_held(session) == 0
        assert_same_gradients(*pair)

    def test_evaluation_has_the_bits_of_the_untouched_model(
        self, pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        outputs = []
        for model in pair:
            model.eval()
            with torch.no_grad():
                outputs.append(loss_of(model))
            with torch.inference_mode():
                outputs.append(loss_of(model, 1))
            outputs.append(loss_of(model.train(), 2).detach())
        half = len(outputs) // 2
        assert all(torch.equal(*pair) for pair in zip(outputs[:half], outputs[half:], strict=True))
        assert leases_held(session) == 0

    def test_training_has_the_bits_of_the_untouched_model(
        self, pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = pair
        ours = memd_client.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(4):
            losses = []
            for trained, optimizer in ((model, ours), (reference, torchs)):
                loss = loss_of(trained, step)
                loss.backward()
                if step != 2:  # a skipped step
                    optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():  # evaluation between the step and the next forward
                    losses += [loss.detach(), loss_of(trained.eval(), 50)]
                trained.train()
            assert torch.equal(losses[0], losses[2])
            assert torch.equal(losses[1], losses[3])
        assert leases_held(session) == 0
        assert_same_state(model, reference)

    def test_the_process_keeps_no_parameter_bytes(self, pair: tuple[nn.Module, nn.Module]) -> None:
        model, _ = pair
        for parameter in model.parameters():
            with (
                torch._C.DisableTorchFunctionSubclass(),
                pytest.raises(RuntimeError, match="data pointer"),
            ):
                parameter.untyped_storage().data_ptr()

    def test_an_exception_in_forward_leaves_nothing_behind(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        for _ in range(2):
            with pytest.raises(IndexError):
                model(torch.full((4, LENGTH), VOCABULARY))
        assert leases_held(session) == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)

    def test_hooks_of_others_see_the_values(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, reference = mlp
        seen = []
        layer = model.first
        layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.data.clone()))
        layer.register_forward_hook(lambda m, _, __: seen.append(m.weight.detach().clone()))
        loss_of(model)
        assert len(seen) == 2
        assert all(torch.equal(weight, reference.first.weight) for weight in seen)

    def test_a_failing_hook_of_others_leaves_nothing_behind(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("no")

        model, reference = mlp
        layer = model.first
        for register, settings in (
            (layer.register_forward_pre_hook, {}),
            (layer.register_forward_pre_hook, {"prepend": True}),
            (layer.register_forward_hook, {}),
        ):
            handle = register(fail, **settings)
            with pytest.raises(RuntimeError, match="no"):
                loss_of(model)
            handle.remove()
            assert leases_held(session) == 0
            assert torch.equal(loss_of(model), loss_of(reference))

    def test_an_interrupted_call_holds_nothing_beyond_the_next_step(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        model, reference = mlp
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        handle = model.second.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model)
        handle.remove()
        for _ in range(2):
            for trained, optimizer in ((model, ours), (reference, torchs)):
                loss_of(trained).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert leases_held(session) == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_same_state(model, reference)

    def test_backward_in_another_thread_has_the_same_bits(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        losses = [loss_of(model, 0), loss_of(model, 1)]
        threads = [threading.Thread(target=loss.backward) for loss in losses[:1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        losses[1].backward()
        del losses
        loss_of(reference, 0).backward()
        loss_of(reference, 1).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_forward_in_several_threads_at_once_has_the_same_bits(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        losses: dict[int, torch.Tensor] = {}

        def run(index: int) -> None:
            with torch.no_grad():
                losses[index] = loss_of(model, index)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(losses[index], loss_of(reference, index)) for index in range(4))
        assert leases_held(session) == 0

    def test_torch_autograd_grad_gives_the_gradients_of_parameters_that_are_away(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
        expected = torch.autograd.grad(loss_of(reference), list(reference.parameters()))
        assert all(torch.equal(*both) for both in zip(gradients, expected, strict=True))
        assert leases_held(session) == 0

    def test_gradients_of_gradients_have_the_same_bits(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            x = batch(module).requires_grad_()
            output = module(x).square().sum()
            (gradient,) = torch.autograd.grad(output, x, create_graph=True)
            (gradient.norm() + output).backward()
            del output, gradient
        assert_same_gradients(*mlp)
        assert leases_held(session) == 0

    def test_frozen_parameters_are_streamed_and_may_be_thawed(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        for module in (model, reference):
            module.first.requires_grad_(False)
            loss_of(module).backward()
        assert_same_gradients(model, reference)
        for module in (model, reference):
            module.zero_grad()
            module.first.requires_grad_(True)
            module.second.weight.requires_grad = False
            loss_of(module).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_a_module_offloaded_while_frozen_can_be_thawed(self, session: Session) -> None:
        torch.manual_seed(0)
        reference = Mlp()
        model = memd_client.offload(copy.deepcopy(reference).requires_grad_(False), session)
        model.requires_grad_()
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_backward_over_a_value_that_was_changed_since_is_an_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        loss = loss_of(model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_backward_over_an_input_that_was_changed_since_is_an_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        for model in mlp:
            inputs = batch(model)
            loss = model(inputs).square().mean()
            inputs.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_backward_through_a_part_of_a_parameter_uses_that_part(self, session: Session) -> None:
        class Parts(nn.Module):
            """Each half of the weight is a view that autograd saves, the second at an offset."""

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                first, second = self.weight.chunk(2)
                return nn.functional.linear(nn.functional.linear(inputs, first), second)

        model, reference = memd_client.offload(build(Parts), session), build(Parts)
        inputs = [batch(model).requires_grad_() for _ in range(2)]
        for each, own in zip((model, reference), inputs, strict=True):
            each(own).square().mean().backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert_same_gradients(model, reference)

    def test_a_change_in_forward_is_kept(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        def halve(module: nn.Module, _: Any) -> None:
            with torch.no_grad():
                module.get_parameter("weight").mul_(0.5)

        for module in mlp:
            module.first.register_forward_pre_hook(halve)
            with torch.no_grad():
                loss_of(module)
            loss_of(module).backward()
        assert_same_gradients(*mlp)
        assert_same_state(*mlp)
        assert leases_held(session) == 0


class TestAway:
    """What code outside of forward does with parameters that are away: right, or NotResident."""

    @pytest.mark.parametrize(
        "use",
        [
            torch.tensor,
            torch.ones(1).new_tensor,
            lambda weight: weight.as_subclass(torch.Tensor),
            lambda weight: torch.func.vmap(torch.sum)(weight),
            lambda weight: torch.func.grad(torch.sum)(weight),
            lambda weight: torch.nested.nested_tensor([weight]),
        ],
        ids=["tensor", "new_tensor", "as_subclass", "vmap", "grad", "nested_tensor"],
    )
    @pytest.mark.filterwarnings("ignore:To copy construct", "ignore:The PyTorch API of nested")
    def test_functions_that_ask_no_class_are_refused(
        self, mlp: tuple[Mlp, Mlp], session: Session, use: Callable[[torch.Tensor], Any]
    ) -> None:
        """They computed with a hole of NaN."""
        model, reference = mlp
        with pytest.raises(
            memd_client.NotResident, match=r"'layers\.0\.weight' are in memd.*gather"
        ):
            use(model.first.weight)
        with memd_client.gather(model):
            use(model.first.weight)
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_factories_take_form_and_dtype(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        for module in mlp:
            weight = module.first.weight
            assert torch.equal(weight.new_zeros(3), torch.zeros(3))
            assert torch.equal(weight.new_ones(2), torch.ones(2))
            assert torch.equal(weight.new_full((2,), 5.0), torch.full((2,), 5.0))
            assert weight.new_empty(2, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert torch.result_type(weight, 1) == torch.float32
            assert weight.stride() == (WIDTH, 1)
            assert not weight.is_pinned()
        assert leases_held(session) == 0

    def test_changes_that_torch_does_not_count_are_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            loss_of(module).backward()
            torch.optim.Adam(module.parameters(), fused=True).step()
            module.zero_grad()
            with torch.inference_mode():
                module.first.weight.mul_(2)
                module.second.weight[0] = 3.0
                weight = module.second.weight
                weight += 0.5
                torch.add(torch.ones(64, WIDTH), 1, out=module.first.weight)
                torch.zeros(64).add_(module.first.bias)
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_running_statistics_that_are_parameters_are_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """torch does not count their change."""
        first = torch.linspace(-1, 1, 8 * 64).view(8, 64)
        outputs = []
        for module in mlp:
            mean = module.first.bias.requires_grad_(False)
            variance = mean.detach().abs() + 1
            outputs.append(functional.batch_norm(first, mean, variance, training=True))
            outputs.append(functional.batch_norm(first, mean, variance))
            named: dict[str, Any] = {"running_mean": mean, "running_var": variance}
            outputs.append(functional.instance_norm(first.view(2, 64, 4), **named))
            torch.batch_norm(first, None, None, mean, variance, True, 0.1, 1e-5, False)
        for output, expected in zip(outputs[:3], outputs[3:], strict=True):
            assert torch.equal(output, expected)
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_an_encoder_drops_what_is_padded_as_torch_does(
        self, session: Session, *, grad: bool
    ) -> None:
        both = []
        for _ in range(2):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
            both.append(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval())
        model, reference = both
        memd_client.offload(model, session)
        inputs = torch.randn(3, LENGTH, WIDTH)
        padding = torch.arange(LENGTH).expand(3, LENGTH) >= torch.tensor([[4], [9], [LENGTH - 1]])
        with torch.set_grad_enabled(grad):
            output, expected = (
                module(inputs, src_key_padding_mask=padding) for module in (model, reference)
            )
        assert torch.equal(output, expected)
        assert bool(expected[padding].any()) is grad, "or torch did not drop it"
        assert leases_held(session) == 0

    def test_a_deep_copy_is_an_ordinary_module_of_its_own(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        duplicate = copy.deepcopy(model)
        assert all(type(parameter) is nn.Parameter for parameter in duplicate.parameters())
        assert duplicate.get_parameter("head.weight") is duplicate.get_parameter("embedding.weight")
        memd_client.AdamW(model.parameters(), lr=1.0)
        assert_same_state(duplicate, reference)
        loss_of(duplicate).backward()
        loss_of(reference).backward()
        assert_same_gradients(duplicate, reference)
        assert_same_gradients(model, build(Gpt))
        assert duplicate.double().get_parameter("positions").dtype == torch.float64
        assert leases_held(session) == 0

    def test_state_dict_holds_copies(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        state = model.state_dict()
        assert_same_state(model, reference)
        assert leases_held(session) == 0
        assert all(type(value) is torch.Tensor for value in state.values())
        optimizer = memd_client.AdamW(model.parameters(), lr=1.0)
        loss_of(model).backward()
        optimizer.step()
        assert torch.equal(state["positions"], reference.get_parameter("positions"))
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.equal(torch.load(file)["positions"], state["positions"])

    def test_load_state_dict_changes_what_is_in_memd(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        torch.manual_seed(7)
        other = Gpt()
        model.load_state_dict(other.state_dict())
        reference.load_state_dict(other.state_dict())
        assert leases_held(session) == 0
        assert_same_state(model, reference)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for trained, trainer in ((model, optimizer), (reference, expected)):
            loss_of(trained).backward()
            trainer.step()
        assert_same_state(model, reference)

    def test_conversions_that_change_nothing_pass(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        assert model.to("cpu").float().cpu() is model
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("convert", ["double", "half", "bfloat16"])
    def test_conversions_to_another_dtype_are_refused(
        self, gpt: tuple[nn.Module, nn.Module], convert: str
    ) -> None:
        model, reference = gpt
        with pytest.raises(memd_client.NotResident, match="convert before offload"):
            getattr(model, convert)()
        assert_same_state(model, reference)
        assert torch.equal(loss_of(model), loss_of(reference))

    def test_moving_to_a_device_without_bytes_leaves_none(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        assert all(parameter.is_meta for parameter in model.to("meta").parameters())
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    def test_any_function_of_a_parameter_sees_its_value(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        parameters, expected = list(model.parameters()), list(reference.parameters())
        vector = nn.utils.parameters_to_vector(parameters)
        assert torch.equal(vector, nn.utils.parameters_to_vector(expected))
        del vector
        weight, value = parameters[0], expected[0]
        assert repr(weight) == repr(value)
        assert torch.equal(weight.norm(), value.norm())
        assert torch.equal(weight.T @ weight, value.T @ value)
        assert torch.equal(torch.stack([weight, weight]), torch.stack([value, value]))
        assert weight[0, 0].item() == value[0, 0].item()
        assert weight.tolist() == value.tolist()
        assert bool((weight == value).all())
        assert torch.equal(copy.deepcopy(weight), value)
        assert torch.equal(weight.detach(), value)
        assert torch.equal(weight.half(), value.half())
        assert weight.stride() == value.stride()
        assert weight.is_contiguous()
        assert leases_held(session) == 0

    def test_metadata_needs_no_lease(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, reference = mlp
        leases = session.statistics().lease_count
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.shape, parameter.dtype, parameter.device, parameter.numel()) == (
                expected.shape,
                expected.dtype,
                expected.device,
                expected.numel(),
            )
            assert (parameter.ndim, parameter.nbytes, len(parameter)) == (
                expected.ndim,
                expected.nbytes,
                len(expected),
            )
            assert parameter.is_leaf
            assert parameter.requires_grad
            assert parameter.grad_fn is None
            assert parameter.grad is None
            assert isinstance(parameter, nn.Parameter)
            assert hash(parameter) == id(parameter)
        assert session.statistics().lease_count == leases

    def test_changes_in_place_are_kept(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        for module in mlp:
            first, bias, second = (
                module.first.weight,
                module.first.bias,
                module.second.weight,
            )
            torch.manual_seed(3)
            with torch.no_grad():
                first.mul_(2)
                first[0] = 7.0
                first += 1
                bias.copy_(torch.arange(64.0))
                torch._foreach_add_([first, bias], 0.5)
                torch.neg(second, out=second)
            nn.init.xavier_uniform_(module.first.weight)
            bias.data = torch.ones(64)
            vector = torch.linspace(0, 1, sum(p.numel() for p in module.parameters()))
            nn.utils.vector_to_parameters(vector, module.parameters())
        assert leases_held(session) == 0
        assert_same_state(*mlp)

    def test_a_change_in_place_that_needs_a_gradient_is_torchs_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model.first.weight.mul_(2)
        assert_same_state(model, reference)

    @pytest.mark.parametrize(
        "use",
        [
            lambda p: p.data_ptr(),
            lambda p: p.untyped_storage(),
            lambda p: p.requires_grad_(False).numpy(),
            lambda p: p.share_memory_(),
            pickle.dumps,
            lambda p: torch.save(p, io.BytesIO()),
            copy.copy,
        ],
        ids=["data_ptr", "storage", "numpy", "share_memory", "pickle", "save", "copy"],
    )
    def test_what_needs_the_memory_itself_is_refused(
        self, mlp: tuple[Mlp, Mlp], use: Callable[[torch.Tensor], object]
    ) -> None:
        model, reference = mlp
        with pytest.raises(memd_client.NotResident, match=r"layers\.0\.weight.*gather"):
            use(model.first.weight)
        model.requires_grad_()
        assert_same_state(model, reference)

    def test_saving_the_module_itself_is_refused(self, mlp: tuple[Mlp, Mlp]) -> None:
        with pytest.raises(memd_client.NotResident, match="state_dict"):
            torch.save(mlp[0], io.BytesIO())

    def test_torch_optimizers_and_clipping_work_on_what_is_away(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        norms = []
        for module in mlp:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            for index in range(2):
                loss_of(module, index).backward()
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.01))
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(norms[0], norms[2])
        assert torch.equal(norms[1], norms[3])
        assert leases_held(session) == 0
        assert_same_state(*mlp)

    def test_gradients_can_be_read_set_and_dropped(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        for module in mlp:
            loss_of(module).backward()
            module.first.bias.grad = torch.ones(64)
            module.first.bias.grad.mul_(3)
            module.second.bias.grad = None
        assert_same_gradients(model, reference)
        held = model.first.weight.grad
        assert held is not None
        before = held.clone()
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, 1).backward()
        assert torch.equal(held, before), (
            "a gradient that the user still holds is the user's after zero_grad"
        )
        reference.zero_grad()
        loss_of(reference, 1).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_layers_added_later_and_ties_made_later_work(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            torch.manual_seed(5)
            third, fourth = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
            fourth.weight = module.second.weight
            module.layers.extend([third, fourth])
            loss_of(module).backward()
        assert_same_gradients(*mlp)
        assert leases_held(session) == 0

    def test_functional_calls_take_other_parameters(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        values = {name: torch.ones_like(p) for name, p in reference.named_parameters()}
        x = batch(model)
        got, expected = (torch.func.functional_call(module, values, x) for module in mlp)
        assert torch.equal(got, expected)
        assert torch.equal(loss_of(model), loss_of(reference))
        gradients = torch.func.grad(lambda v: torch.func.functional_call(model, v, x).sum())(values)
        assert torch.isfinite(gradients["layers.0.weight"]).all()
        assert leases_held(session) == 0


class TestGather:
    def test_parameters_are_ordinary_inside(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        with memd_client.gather(model):
            for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert isinstance(parameter, nn.Parameter)
                assert torch.equal(parameter.data, expected)
                assert repr(parameter) == repr(expected)
            loss = loss_of(model)
        loss.backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_what_is_written_inside_is_kept(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        for module in gpt:
            with memd_client.gather(module, write=True), torch.no_grad():
                module.get_parameter("positions").data.fill_(0.25)
                module.get_parameter("blocks.0.norm.weight").copy_(torch.ones(WIDTH))
                loss_of(module)
        assert leases_held(session) == 0
        assert_same_state(model, reference)
        assert torch.equal(loss_of(model), loss_of(reference))

    def test_modules_train_inside_a_writing_context(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        with memd_client.gather(model.get_parameter("positions"), write=True):
            loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_contexts_nest(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, reference = mlp
        with memd_client.gather(model, write=True):
            with memd_client.gather([model.first.weight, model.first.weight]):
                assert torch.equal(model.first.weight.data, reference.first.weight)
            model.first.weight.data.zero_()
        reference.first.weight.data.zero_()
        assert_same_state(model, reference)
        with (
            memd_client.gather(model),
            pytest.raises(memd_client.MemdError, match="in use for reading"),
            memd_client.gather(model, write=True),
        ):
            pass
        assert leases_held(session) == 0
        assert_same_state(model, reference)

    def test_a_step_inside_is_refused(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        with (
            memd_client.gather(model.first.weight),
            pytest.raises(memd_client.MemdError, match=r"'layers\.0\.weight' is in use"),
        ):
            optimizer.step()
        optimizer.step()
        assert session.committed_step == 1

    def test_an_exception_inside_leaves_the_parameters_away(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        with pytest.raises(ZeroDivisionError), memd_client.gather(model, write=True):
            raise ZeroDivisionError
        assert leases_held(session) == 0
        assert_same_state(model, reference)

    @pytest.mark.parametrize("in_another_memory", [False, True])
    def test_data_that_is_assigned_inside_is_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, in_another_memory: bool
    ) -> None:
        for module in mlp:
            weight = module.first.weight
            with memd_client.gather(module, write=True):
                value = torch.full_like(weight, 0.5) if in_another_memory else weight.data
                weight.data = value
                value[0] = 2.0  # as in torch, the parameter has this memory now
                module.second.weight.data += 1.0  # a merge of adapters is written so
                assert torch.equal(weight, value)
                module(torch.ones(1, weight.shape[1]))
                del value  # it shares the bytes
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_a_module_may_assign_its_own_data(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        def double(module: nn.Module, inputs: Any) -> None:
            del inputs
            weight = module.get_parameter("weight")
            weight.data = weight.detach() * 2

        for module in mlp:
            handle = module.first.register_forward_pre_hook(double)
            loss_of(module).backward()
            handle.remove()
        assert_same_state(*mlp)
        assert_same_gradients(*mlp)
        assert leases_held(session) == 0

    def test_gradients_that_are_assigned_inside_are_memds(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        optimizers = [
            memd_client.AdamW(mlp[0].parameters(), lr=1e-2),
            torch.optim.AdamW(mlp[1].parameters(), lr=1e-2, fused=True),
        ]
        for module in mlp:
            with memd_client.gather(module, write=True):
                weight = module.first.weight
                weight.grad = torch.full_like(weight, 0.5)
                assert weight.grad is not None
                weight.grad[0] = 3.0
                module.second.weight.grad = torch.ones_like(module.second.weight)
                module.second.weight.grad = None
            loss_of(module).backward()  # adds to it
        assert_same_gradients(*mlp)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_zero_grad_inside_drops_what_was_assigned(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        with memd_client.gather(model, write=True):
            model.first.weight.grad = torch.ones_like(model.first.weight)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)

    @pytest.mark.parametrize("how", ["attribute", "method", "module"])
    def test_what_is_thawed_inside_is_trained(self, session: Session, how: str) -> None:
        model, reference = Mlp(), Mlp()
        reference.load_state_dict(model.state_dict())
        for module in (model, reference):
            module.requires_grad_(False)
        memd_client.offload(model, session)
        for module in (model, reference):
            with memd_client.gather(module, write=True):
                if how == "attribute":
                    module.first.weight.requires_grad = True
                elif how == "method":
                    assert module.first.weight.requires_grad_() is module.first.weight
                else:
                    module.first.requires_grad_()
                assert module.first.weight.requires_grad
            loss_of(module).backward()
        assert_same_gradients(model, reference)
        optimizers = [
            memd_client.AdamW(model.parameters(), lr=1e-2),
            torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(model, reference)

    def test_reading_refuses_what_is_assigned(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, reference = mlp
        weight = model.first.weight
        with memd_client.gather(model):
            for name, value in (("data", torch.zeros_like(weight)), ("grad", torch.ones(1))):
                with pytest.raises(
                    memd_client.MemdError, match=rf"'layers\.0\.weight'.*\.{name}.*write=True"
                ):
                    setattr(weight, name, value)
            weight.grad = None  # as zero_grad() does
            weight.data = weight.data
        with memd_client.gather(model, write=True), memd_client.gather(weight):
            weight.data = weight.detach().clone()  # the context around it writes
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize(
        "value",
        [torch.zeros(3), torch.zeros(2 * WIDTH, WIDTH).half(), torch.zeros(WIDTH, 2 * WIDTH).t()],
        ids=["shape", "dtype", "strides"],
    )
    def test_data_of_another_form_is_refused(
        self, mlp: tuple[Mlp, Mlp], session: Session, value: torch.Tensor, *, write: bool
    ) -> None:
        model, reference = mlp
        with pytest.raises(memd_client.NotResident, match=r"'layers\.0\.weight'.*(become|strides)"):
            model.first.weight.data = value
        with memd_client.gather(model, write=write), pytest.raises(memd_client.MemdError):
            model.first.weight.data = value
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_a_form_that_changed_unseen_is_an_error_and_the_value_stays(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        with (
            pytest.raises(memd_client.NotResident, match="cannot become"),
            memd_client.gather(model.first.weight, write=True),
            torch.no_grad(),
        ):
            model.first.weight.set_(torch.zeros(3))  # type: ignore[call-overload] # no stub takes tensors
        assert model.first.weight.shape == reference.first.weight.shape
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_copies_made_inside_are_ordinary(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, reference = mlp
        with memd_client.gather(model):
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model.first.weight))]
        assert type(copies[0].first.weight) is nn.Parameter
        assert type(copies[1]) is nn.Parameter
        assert torch.equal(copies[1], reference.first.weight)
        assert_same_state(copies[0], reference)
        assert leases_held(session) == 0

    def test_memory_that_is_set_outside_is_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        value = torch.full((64, WIDTH), 0.5)
        for module in mlp:
            with torch.no_grad():
                module.first.weight.set_(value.clone())  # type: ignore[call-overload] # no stub takes tensors
                module.second.weight.set_(module.second.weight)  # type: ignore[call-overload] # no stub takes tensors
                with pytest.raises((RuntimeError, memd_client.MemdError)):
                    module.second.weight.set_(torch.zeros(1).half())  # type: ignore[call-overload] # no stub takes tensors
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("how", ["assign=True", "new parameter"])
    def test_a_parameter_that_was_replaced_is_an_error_of_the_next_step(
        self, mlp: tuple[Mlp, Mlp], session: Session, how: str
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters())
        weight = model.first.weight
        loss_of(model).backward()
        if how == "assign=True":
            state = {"layers.0.weight": torch.zeros_like(reference.first.weight)}
            model.load_state_dict(state, strict=False, assign=True)
        else:
            model.first.weight = nn.Parameter(torch.zeros_like(reference.first.weight))
        with pytest.raises(memd_client.MemdError, match=r"'layers\.0\.weight' was replaced.*copy"):
            optimizer.step()
        assert session.committed_step == 0
        model.first.weight = weight
        optimizer.step()
        assert session.committed_step == 1

    def test_parameters_may_be_tied_moved_and_dropped(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module, kind in zip(mlp, (memd_client.AdamW, torch.optim.AdamW), strict=True):
            fused = {"fused": True} if kind is torch.optim.AdamW else {}
            optimizer: Any = kind(module.parameters(), lr=1e-2, **fused)
            train_one_step(module, optimizer, 0)
            parametrize.register_parametrization(module.first, "weight", Doubled())
            module.first.bias = None  # type: ignore[assignment] # torch allows it
            train_one_step(module, optimizer, 1)
            module.layers[2] = nn.Linear(64, WIDTH, bias=False)
            nn.init.constant_(module.second.weight, 0.5)
            train_one_step(module, optimizer, 2)
        assert_same_state(*mlp)
        assert session.committed_step == 3

    def test_parameters_that_are_not_offloaded_are_let_be(self) -> None:
        module = nn.Linear(2, 2)
        with memd_client.gather(module, write=True):
            module.weight.data.zero_()
        assert not module.weight.any()


class TestHooks:
    """Post-accumulate hooks, which torch calls in the order of their registration: before
    `offload()` means before memd has taken the gradient."""

    @pytest.mark.parametrize("when", ["before offload", "after offload"])
    def test_hooks_see_change_and_drop_the_gradient(self, session: Session, when: str) -> None:
        seen: dict[str, list[torch.Tensor]] = {"ours": [], "torchs": []}
        models: dict[str, nn.Module] = {}
        for which in seen:
            model = models[which] = build(Mlp)

            def note(parameter: torch.Tensor, which: str = which) -> None:
                assert parameter.grad is not None
                seen[which].append(parameter.grad.clone())
                parameter.grad.mul_(0.5)
                if parameter.ndim == 1:
                    parameter.grad = None

            if which == "ours" and when == "after offload":
                memd_client.offload(model, session)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(note)
            if which == "ours" and when == "before offload":
                memd_client.offload(model, session)
            for index in range(2):
                loss_of(model, index).backward()
        assert len(seen["ours"]) == len(seen["torchs"]) == 8
        for ours, torchs in zip(seen["ours"], seen["torchs"], strict=True):
            assert torch.equal(ours, torchs)
        assert_same_gradients(models["ours"], models["torchs"])
        assert leases_held(session) == 0

    @pytest.mark.parametrize("what", ["step()", "zero_grad()", "p.grad = None", "p.grad = ..."])
    @pytest.mark.parametrize("take", ["numpy", "untyped_storage"])
    @pytest.mark.parametrize("is_held", [False, True])
    def test_memory_of_a_gradient_that_is_kept_is_refused_by_name(
        self, mlp: tuple[Mlp, Mlp], session: Session, what: str, take: str, *, is_held: bool
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        weight = model.first.weight

        def end() -> None:
            if what == "step()":
                optimizer.step()
            elif what == "zero_grad()":
                optimizer.zero_grad()
            else:
                weight.grad = None if what == "p.grad = None" else torch.ones_like(weight)

        loss_of(model).backward()
        gradient = weight.grad
        assert gradient is not None
        memory = getattr(gradient, take)()
        if not is_held:
            del gradient
        with pytest.raises(
            memd_client.MemdError, match=rf"'layers\.0\.weight'.*{re.escape(what)}.*clone"
        ):
            end()
        assert session.committed_step == 0
        del memory
        end()
        if what == "step()":
            train_one_step(reference, torchs, 0)
            assert_same_state(model, reference)
        optimizer.zero_grad()
        train_one_step(model, optimizer, 1)
        assert leases_held(session) == 0

    def test_steps_inside_backward_from_such_hooks_have_torchs_bits(self, session: Session) -> None:
        """torch's recipe for optimizers in backward: one for each parameter."""
        pair = build(Mlp), build(Mlp)
        optimizers: list[dict[torch.Tensor, torch.optim.Optimizer]] = [{}, {}]
        memd_client.offload(pair[0], session)
        for model, owned in zip(pair, optimizers, strict=True):
            for parameter in model.parameters():
                owned[parameter] = (
                    memd_client.AdamW([parameter], lr=1e-2)
                    if model is pair[0]
                    else torch.optim.AdamW([parameter], lr=1e-2, fused=True)
                )

            def step(parameter: torch.Tensor, owned: Any = owned) -> None:
                owned[parameter].step()
                owned[parameter].zero_grad()

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
            for index in range(3):
                loss_of(model, index).backward()
        assert_same_state(*pair)


class TestOptimizer:
    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    def test_groups_schedulers_clipping_and_accumulation_have_torchs_bits(
        self, gpt: tuple[nn.Module, nn.Module], session: Session, name: str
    ) -> None:
        norms: list[list[torch.Tensor]] = [[], []]
        for which, module in enumerate(gpt):
            decayed = [p for p in module.parameters() if p.ndim > 1]
            others = [p for p in module.parameters() if p.ndim == 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
            kind: Any = getattr(memd_client if which == 0 else torch.optim, name)
            optimizer = kind(
                groups,
                lr=1e-2,
                betas=(0.8, 0.95),
                weight_decay=0.0,
                **({"fused": True} if which else {}),
            )
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
            for step in range(5):
                loss_of(module, 2 * step).backward()
                loss_of(module, 2 * step + 1).backward()
                max_norm = 1e-3 if step % 2 else 1e6
                norms[which].append(
                    optimizer.clip_grad_norm_(max_norm)
                    if which == 0
                    else nn.utils.clip_grad_norm_(decayed + others, max_norm)
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert all(torch.equal(*both) for both in zip(*norms, strict=True))
        assert leases_held(session) == 0
        assert_same_state(*gpt)

    def test_whatever_order_gradients_come_in_steps_have_torchs_bits(
        self, session: Session
    ) -> None:
        """Slots are asked for in the order of the backward before, which is another one here; and
        micro-batches leave layers out."""
        orders = [(0, 1, 2, 3, 4, 5), (0, 2, 3, 1, 5, 4), (3, 0, 1), (5, 4, 3, 2, 1, 0)]
        both = []
        for _ in range(2):
            torch.manual_seed(0)
            both.append(nn.ModuleList(nn.Linear(64, 64) for _ in range(6)))
        model, reference = both
        memd_client.offload(model, session)
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=1e-2, fused=True)
        for step in range(12):
            for layers, optimizer in ((model, ours), (reference, torchs)):
                torch.manual_seed(step)
                for order in (orders[step % 4], orders[step % 3], (5,)):
                    hidden = torch.randn(4, 64)
                    for index in order:
                        hidden = layers[index](hidden)
                    hidden.square().sum().backward()
                if step % 5 == 4:
                    optimizer.zero_grad()  # this batch is skipped
                    continue
                optimizer.step()
                optimizer.zero_grad()
        assert leases_held(session) == 0
        assert_same_state(model, reference)

    def test_clipping_gives_torchs_gradients(self, gpt: tuple[nn.Module, nn.Module]) -> None:
        model, reference = gpt
        loss_of(model).backward()
        loss_of(reference).backward()
        optimizer = memd_client.AdamW(model.parameters())
        norm = optimizer.clip_grad_norm_(1e-4)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1e-4))
        assert_same_gradients(model, reference)
        norm = optimizer.clip_grad_norm_(1e-5, norm_type=float("inf"))
        assert torch.equal(
            norm, nn.utils.clip_grad_norm_(reference.parameters(), 1e-5, float("inf"))
        )
        assert_same_gradients(model, reference)

    def test_norms_of_two_dtypes_add_up_in_torchs_order(self, session: Session) -> None:
        model = nn.ModuleList(
            nn.Linear(8, 8, bias=False, dtype=(torch.float32, torch.bfloat16)[index % 2])
            for index in range(12)
        )
        reference = copy.deepcopy(model)
        optimizer = memd_client.AdamW(memd_client.offload(model, session).parameters())
        order_matters = False
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            for ours, twin in zip(model.parameters(), reference.parameters(), strict=True):
                gradient = torch.randn(8, 8, generator=generator).exp().to(twin.dtype)
                ours.grad, twin.grad = gradient.clone(), gradient
            norms = [p.grad.norm() for p in reference.parameters() if p.grad is not None]
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
            order_matters |= not torch.equal(torch.stack(norms).norm(), expected)
            assert torch.equal(optimizer.clip_grad_norm_(1e-2), expected)
            assert_same_gradients(model, reference)
        assert order_matters, "or this test would pass whatever the order"

    def test_a_state_dict_travels_to_torch_and_back(
        self, gpt: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = gpt
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        empty = ours.state_dict()
        assert all(state["step"] == 0 for state in empty["state"].values())
        for index in range(3):
            loss_of(model, index).backward()
            ours.step()
            ours.zero_grad()
        state = ours.state_dict()
        reference.load_state_dict(model.state_dict())
        torchs = torch.optim.AdamW(reference.parameters(), lr=0.5, fused=True)
        torchs.load_state_dict(state)
        assert torchs.param_groups[0]["lr"] == 1e-2
        torchs.param_groups[0]["fused"] = True
        for trained, optimizer in ((model, ours), (reference, torchs)):
            loss_of(trained, 9).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(model, reference)
        loss_of(reference, 10).backward()
        torchs.step()
        expected = torchs.state_dict()
        ours.load_state_dict(expected)
        assert_same_moments(ours.state_dict(), expected)
        ours.load_state_dict(empty)
        assert all(not s["exp_avg"].any() for s in ours.state_dict()["state"].values())
        assert leases_held(session) == 0

    def test_moments_of_a_large_parameter_are_loaded(self, session: Session) -> None:
        model = memd_client.offload(nn.Linear(400, 400, bias=False), session)
        optimizer = memd_client.AdamW(model.parameters())
        moments = {name: torch.rand(400, 400) for name in ("exp_avg", "exp_avg_sq")}
        state = optimizer.state_dict()
        state["state"] = {0: {"step": torch.tensor(3.0), **moments}}
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["state"][0]
        assert loaded["step"] == 3
        for name, moment in moments.items():
            assert torch.equal(loaded[name], moment), name

    def test_parameters_that_stay_are_updated_in_place(self, session: Session) -> None:
        model, reference = build(BatchNorm), build(BatchNorm)
        ours = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        addresses = [p.data_ptr() for p in model.parameters()]
        for step in range(4):
            for trained, optimizer in ((model, ours), (reference, torchs)):
                loss_of(trained, step).backward()
                optimizer.step()
                if step % 2:
                    optimizer.zero_grad()
                if step == 2:
                    trained.get_parameter("second.weight").data.mul_(0.5)
            assert_same_gradients(model, reference)
        assert [p.data_ptr() for p in model.parameters()] == addresses
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_bf16_parameters_that_stay_are_trained_as_those_that_are_offloaded(
        self, session: Session
    ) -> None:
        """memd knows more bits of each than the parameter has."""
        offloaded = memd_client.offload(build(Mlp).bfloat16(), session)
        stays, untrained = build(Mlp).bfloat16(), build(Mlp).bfloat16()
        named = [(f"stays.{name}", parameter) for name, parameter in stays.named_parameters()]
        optimizers = [
            memd_client.AdamW(offloaded.parameters(), lr=1e-4),
            memd_client.AdamW(named, lr=1e-4, session=session),
        ]
        for _ in range(12):
            for model, optimizer in zip((offloaded, stays), optimizers, strict=True):
                for parameter in model.parameters():
                    parameter.grad = torch.ones(parameter.shape, dtype=torch.bfloat16)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(offloaded, stays)
        for parameter, before in zip(stays.parameters(), untrained.parameters(), strict=True):
            # Steps that are too small for bf16 add up.
            assert not torch.equal(parameter, before)

    def test_a_sign_of_zero_that_the_loop_changed_is_what_the_step_begins_with(
        self, session: Session
    ) -> None:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = memd_client.Adam([parameter], session=session)
        parameter.grad = torch.zeros(3)
        optimizer.step()
        parameter.data.neg_()
        optimizer.step()
        assert torch.signbit(parameter).all()

    def test_offloaded_parameters_and_others_share_an_optimizer(self, session: Session) -> None:
        model, reference = build(Gpt), build(Gpt)
        memd_client.offload(model.get_submodule("blocks"), session)
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            norms = []
            for trained, optimizer in ((model, ours), (reference, torchs)):
                loss_of(trained, step).backward()
                norms.append(
                    ours.clip_grad_norm_(0.01)
                    if optimizer is ours
                    else nn.utils.clip_grad_norm_(trained.parameters(), 0.01)
                )
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*norms)
        assert_same_state(model, reference)

    def test_a_closure_gives_its_loss(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        before = loss_of(model)
        assert torch.equal(optimizer.step(closure), before)
        assert not torch.equal(loss_of(model), before)

    def test_a_step_without_gradients_commits_nothing(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert session.committed_step == 0
        assert session.statistics().step_count == 0
        assert_same_state(model, reference)

    def test_a_gradient_that_no_optimizer_takes_is_an_error(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.first.parameters())
        loss_of(model).backward()
        with pytest.raises(memd_client.InvalidArgument, match=r"'layers\.2\.\w+' has a gradient"):
            optimizer.step()
        assert_same_state(model, reference)
        optimizer.add_param_group({"params": model.second.parameters()})
        optimizer.step()
        assert session.committed_step == 1

    def test_a_parameter_belongs_to_one_optimizer(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        first = memd_client.AdamW(model.first.parameters())
        with pytest.raises(
            memd_client.InvalidArgument, match=r"layers\.0\.weight.*another optimizer"
        ):
            memd_client.AdamW(model.parameters())
        with pytest.raises(memd_client.InvalidArgument, match="another optimizer"):
            memd_client.AdamW(model.second.parameters()).add_param_group(
                {"params": model.first.parameters()}
            )
        del first
        memd_client.AdamW(model.parameters())

    def test_what_is_not_there_yet_says_so(self, mlp: tuple[Mlp, Mlp]) -> None:
        with pytest.raises(memd_client.NotYet):
            memd_client.AdamW(mlp[0].parameters(), state_dtype=torch.bfloat16)
        memd_client.AdamW(mlp[0].parameters())

    @pytest.mark.parametrize(
        "settings",
        [
            {"lr": -1.0},
            {"betas": (1.0, 0.9)},
            {"eps": -1e-8},
            {"weight_decay": -0.1},
            {"tier": "tape"},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_bad_settings_are_refused(self, mlp: tuple[Mlp, Mlp], settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(settings))):
            memd_client.Adam(mlp[0].parameters(), **settings)

    def test_states_of_other_optimizers_are_refused(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(reference).backward()
        sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        sgd.step()
        state = {**optimizer.state_dict(), "state": sgd.state_dict()["state"]}
        with pytest.raises(memd_client.InvalidArgument, match="not one of Adam"):
            optimizer.load_state_dict(state)
        assert all(state["step"] == 0 for state in optimizer.state_dict()["state"].values())

    @pytest.mark.parametrize(
        "settings",
        [{"foreach": True}, {"fused": False}, {"capturable": True}, {"differentiable": True}],
        ids=lambda settings: next(iter(settings)),
    )
    def test_other_implementations_of_torch_are_refused(
        self, mlp: tuple[Mlp, Mlp], settings: dict[str, Any]
    ) -> None:
        model, reference = mlp
        with pytest.raises(memd_client.InvalidArgument, match=f"{next(iter(settings))}.*default"):
            memd_client.AdamW(model.parameters(), **settings)
        optimizer = memd_client.AdamW(model.parameters(), fused=True, foreach=False)
        loaded = torch.optim.AdamW(reference.parameters()).state_dict()
        loaded["param_groups"][0].update(settings)
        with pytest.raises(memd_client.InvalidArgument, match="fused CPU kernel"):
            optimizer.load_state_dict(loaded)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_copy_of_an_optimizer_is_refused(
        self, mlp: tuple[Mlp, Mlp], copied: Callable[[Any], Any]
    ) -> None:
        optimizer = memd_client.AdamW(mlp[0].parameters())
        with pytest.raises(memd_client.InvalidArgument, match=r"can't be copied.*state_dict\(\)"):
            copied(optimizer)

    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    @pytest.mark.parametrize("decoupled", [True, False, None])
    def test_a_loaded_group_decides_how_weights_decay_as_in_torch(
        self, mlp: tuple[Mlp, Mlp], name: str, *, decoupled: bool | None
    ) -> None:
        for module, kind in zip(mlp, (memd_client, torch.optim), strict=True):
            fused = {"fused": True} if kind is torch.optim else {}
            optimizer = getattr(kind, name)(module.parameters(), lr=0.1, weight_decay=0.5, **fused)
            state = optimizer.state_dict()
            if decoupled is None:
                del state["param_groups"][0]["decoupled_weight_decay"]
            else:
                state["param_groups"][0]["decoupled_weight_decay"] = decoupled
            optimizer.load_state_dict(state)
            for _ in range(2):
                loss_of(module).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(*mlp)


class TestOptimizerState:
    """Moments in a `state_dict()` are read when they are used."""

    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names of the parameters whose moments were read, and ids of those that got others."""
        names: list[str] = []
        moments, begin, put = (
            Job.moments,
            TensorStreams.begin_put_moments,
            TensorStreams.put_moments,
        )

        def read(job: Job, shard: Shard, *, with_master: bool) -> Any:
            names.append(shard.name)
            return moments(job, shard, with_master=with_master)

        def begin_noted(streams: TensorStreams, parts: Sequence[MomentPart]) -> Any:
            names.extend(str(part.shard_id) for part in parts)
            return begin(streams, parts)

        def put_noted(streams: TensorStreams, parts: Callable[[], Iterable[MomentPart]]) -> None:
            names.extend(str(part.shard_id) for part in parts())
            put(streams, parts)

        monkeypatch.setattr(Job, "moments", read)
        monkeypatch.setattr(TensorStreams, "begin_put_moments", begin_noted)
        monkeypatch.setattr(TensorStreams, "put_moments", put_noted)
        return names

    def test_state_lists_the_parameters_that_torchs_does(self, mlp: tuple[Mlp, Mlp]) -> None:
        listed: list[list[list[str]]] = []
        for model, kind in zip(mlp, (memd_client.AdamW, torch.optim.AdamW), strict=True):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            optimizer = kind(model.parameters(), lr=1e-2)
            seen: list[list[str]] = []

            def look(
                optimizer: torch.optim.Optimizer = optimizer,
                names: dict[int, str] = names,
                seen: list[list[str]] = seen,
            ) -> None:
                assert len(optimizer.state) == len(list(optimizer.state.items()))
                seen.append([names[id(each)] for each in optimizer.state])

            look()
            model.first(batch(model)).square().mean().backward()
            optimizer.step()
            look()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            look()
            optimizer.load_state_dict(optimizer.state_dict())
            look()
            listed.append(seen)
        assert listed[0] == listed[1]
        assert [len(names) for names in listed[0]] == [0, 2, 4, 4]

    @pytest.mark.parametrize("amsgrad", [False, True])
    def test_a_flattened_state_goes_both_ways(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, amsgrad: bool
    ) -> None:
        """torch asks the optimizer for the names of moments that it shall look for."""
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, amsgrad=amsgrad, fused=True)
        for module, each in ((model, optimizer), (reference, torchs)):
            train_one_step(module, each, 0)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        ours = get_optimizer_state_dict(model, optimizer, options=flat)
        theirs = get_optimizer_state_dict(reference, torchs, options=flat)
        assert ours.keys() >= theirs.keys()
        expected = copy.deepcopy(torchs.state_dict())
        optimizer.reset_state()
        set_optimizer_state_dict(model, optimizer, dict(theirs), options=flat)
        assert_same_moments(optimizer.state_dict(), expected)
        optimizer.reset_state()
        set_optimizer_state_dict(model, optimizer, ours, options=flat)
        assert_same_moments(optimizer.state_dict(), expected)
        assert session.committed_step == 1
        for module, each in ((model, optimizer), (reference, torchs)):
            train_one_step(module, each, 1)
        assert_same_state(model, reference)

    def test_what_a_call_names_is_filled_again_only_when_the_daemon_has_answered(
        self, session: Session
    ) -> None:
        """There are more tiles than one call takes, and the fake daemon reads late."""
        layer = nn.Linear(6 * 1024, TILE_ELEMENTS // 1024, bias=False)
        model = memd_client.offload(layer, session)
        optimizer = memd_client.AdamW(model.parameters())
        state = optimizer.state_dict()
        shape = next(model.parameters()).shape
        wanted = {name: torch.rand(shape) for name in ("exp_avg", "exp_avg_sq")}
        state["state"] = {0: {"step": torch.tensor(3.0), **wanted}}
        optimizer.load_state_dict(state)
        assert_same_moments(optimizer.state_dict(), state)

    def test_a_state_that_lists_parameters_and_no_moments_is_refused(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters())
        train_one_step(model, optimizer, 0)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=flat)
        without = {name: value for name, value in state.items() if not name.startswith("state.")}
        with pytest.raises(memd_client.InvalidArgument, match=r"begin anew.*reset_state\(\)"):
            set_optimizer_state_dict(model, optimizer, without, options=flat)
        moments = optimizer.state_dict()["state"].values()
        assert all(each["step"] == 1 and each["exp_avg"].any() for each in moments)

    def test_a_state_of_parameters_that_were_frozen_is_loaded(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        model.requires_grad_(False)
        state = optimizer.state_dict()
        assert state["state"] == {key: {} for key in range(4)}
        model.requires_grad_(True)
        optimizer.load_state_dict(state)
        for module, each in ((model, optimizer), (reference, torchs)):
            train_one_step(module, each, 0)
        assert_same_state(model, reference)
        with pytest.raises(memd_client.InvalidArgument, match=r"begin anew.*reset_state\(\)"):
            optimizer.load_state_dict(state)

    def test_a_distributed_checkpoint_makes_no_step(
        self, mlp: tuple[Mlp, Mlp], session: Session, reads: list[str]
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters())
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        assert session.committed_step == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        assert state["state"].keys() == dict(reference.named_parameters()).keys()
        for name, parameter in reference.named_parameters():
            moments = state["state"][name]
            assert moments["step"] == 0
            for each in ("exp_avg", "exp_avg_sq"):
                assert moments[each].shape == parameter.shape
                assert moments[each].dtype == torch.float32
        assert not reads
        assert all(not moments["exp_avg"].any() for moments in state["state"].values())
        assert_same_state(model, reference)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_a_distributed_checkpoint_of_torchs_optimizer_goes_on_in_memd_and_back(
        self, session: Session, tmp_path: Path
    ) -> None:
        plain, model, last = build(Gpt), build(Gpt), build(Gpt)
        torchs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        memd_client.offload(model, session)
        ours = memd_client.AdamW(model.parameters(), lr=0.5)
        train_one_step(plain, torchs, 0)
        copy_by_checkpoint(plain, torchs, model, ours, tmp_path / "first")
        assert session.committed_step == 0
        for trained, optimizer in ((plain, torchs), (model, ours)):
            train_one_step(trained, optimizer, 1)
        assert_same_state(model, plain)
        torchs = torch.optim.AdamW(last.parameters(), lr=0.5, fused=True)
        copy_by_checkpoint(model, ours, last, torchs, tmp_path / "second")
        torchs.param_groups[0]["fused"] = True
        for trained, optimizer in ((last, torchs), (model, ours)):
            train_one_step(trained, optimizer, 2)
        assert_same_state(model, last)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("step_count", [0, 2])
    def test_a_state_that_is_loaded_where_it_came_from_moves_nothing(
        self, job: OpenSession, reads: list[str], step_count: int
    ) -> None:
        """As `Accelerator.prepare()` does, on a resumed job too."""
        expected = build(Mlp)
        torchs = torch.optim.AdamW(expected.parameters(), fused=True)
        with job() as session:
            model = memd_client.offload(build(Mlp), session)
            optimizer = memd_client.AdamW(model.parameters())
            for index in range(step_count):
                train_one_step(model, optimizer, index)
                train_one_step(expected, torchs, index)
        with job() as session:
            model = memd_client.offload(build(Mlp), session)
            optimizer = memd_client.AdamW(model.parameters())
            state = optimizer.state_dict()
            state["state"] = {
                index: {name: value.to("cpu", non_blocking=True) for name, value in each.items()}
                for index, each in state["state"].items()
            }
            optimizer.load_state_dict(state)
            del state
            for index in range(step_count, step_count + 2):
                train_one_step(model, optimizer, index)
                train_one_step(expected, torchs, index)
            assert not reads
            assert_same_state(model, expected)

    @pytest.mark.parametrize("step_in_backward", [False, True])
    @pytest.mark.parametrize("change", ["step", "load", "reset", "close", "drop"])
    def test_a_state_that_is_kept_is_of_its_moment(
        self, job: OpenSession, change: str, *, step_in_backward: bool
    ) -> None:
        reference = build(Mlp)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        session = job()
        model = memd_client.offload(build(Mlp), session)
        optimizer = memd_client.AdamW(
            model.parameters(), lr=1e-2, step_in_backward=step_in_backward
        )
        for index in range(2):
            train_one_step(model, optimizer, index)
            train_one_step(reference, torchs, index)
        loss_of(model, 2).backward()  # with step_in_backward its updates begin
        kept = optimizer.state_dict()
        if change == "step":
            optimizer.step()
        optimizer.zero_grad()
        if change == "load":
            state = optimizer.state_dict()
            for moments in state["state"].values():
                moments["exp_avg"].zero_()
            optimizer.load_state_dict(state)
        if change == "reset":
            optimizer.reset_state()
        if change == "drop":
            session.drop_job()
        if change == "close":
            session.close()
        assert_same_moments(kept, torchs.state_dict())
        session.close()

    def test_moments_are_tensors_as_any(self, mlp: tuple[Mlp, Mlp], reads: list[str]) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        train_one_step(model, optimizer, 0)
        train_one_step(reference, torchs, 0)
        state, expected = optimizer.state_dict(), torchs.state_dict()
        moment, twin = state["state"][0]["exp_avg"], expected["state"][0]["exp_avg"]
        assert (moment.shape, moment.dtype, moment.device) == (twin.shape, twin.dtype, twin.device)
        assert isinstance(moment, torch.Tensor)
        assert not reads
        assert repr(moment) == repr(twin)
        assert reads == ["layers.0.weight"]
        assert torch.equal(moment + 1, twin + 1)
        assert moment.to(torch.float64).dtype == torch.float64
        assert moment.numpy().tobytes() == twin.numpy().tobytes()
        copied = moment.to("cpu", copy=True)
        copied.zero_()
        assert torch.equal(moment, twin)
        for changed in (moment, twin):
            changed[0].mul_(2)
            changed.add_(1)
        assert torch.equal(moment, twin)
        assert reads == ["layers.0.weight"]
        saved = io.BytesIO()
        torch.save(state, saved)
        saved.seek(0)
        copies = [copy.deepcopy(state), torch.load(saved, weights_only=True)]
        assert len(reads) == 4
        for each in copies:
            assert type(each["state"][0]["exp_avg"]) is torch.Tensor
            assert_same_moments(each, expected)
        optimizer.load_state_dict(state)
        assert_same_moments(optimizer.state_dict(), expected)

    def test_a_parameter_without_a_state_begins_anew(self, mlp: tuple[Mlp, Mlp]) -> None:
        for module, kind in zip(mlp, (memd_client.AdamW, torch.optim.AdamW), strict=True):
            fused = {"fused": True} if kind is torch.optim.AdamW else {}
            optimizer: Any = kind(module.parameters(), lr=1e-2, **fused)
            train_one_step(module, optimizer, 0)
            state = optimizer.state_dict()
            state["state"][0] = {}
            del state["state"][1]
            optimizer.load_state_dict(state)
            train_one_step(module, optimizer, 1)
        assert_same_state(*mlp)

    def test_reset_state_begins_anew_with_the_values_of_now(
        self, mlp: tuple[Mlp, Mlp], session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        train_one_step(model, optimizer, 0)
        train_one_step(reference, torchs, 0)
        del optimizer
        assert session.committed_step == 1
        with caplog.at_level("INFO", "memd_client"):
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        assert "AdamW goes on after update 1" in caplog.text
        optimizer.reset_state()
        assert all(state["step"] == 0 for state in optimizer.state_dict()["state"].values())
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        train_one_step(model, optimizer, 1)
        train_one_step(reference, torchs, 1)
        assert_same_state(model, reference)

    def test_hooks_see_the_states(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters())
        train_one_step(model, optimizer, 0)
        seen = []
        optimizer.register_state_dict_post_hook(
            lambda _, state: seen.append(sorted(state["state"][0]))
        )
        optimizer.state_dict()
        assert seen == [["exp_avg", "exp_avg_sq", "step"]]


class TestJobs:
    def test_a_job_goes_on_where_it_stood(self, job: OpenSession) -> None:
        reference = build(BatchNorm)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for attempt in range(3):
            with job() as session:
                assert session.committed_step == 2 * attempt
                torch.manual_seed(attempt)
                model = memd_client.offload(BatchNorm(), session)
                assert_same_state(model, reference) if attempt else reference.load_state_dict(
                    model.state_dict()
                )
                ours = memd_client.AdamW(model.parameters(), lr=1e-2)
                for step in range(2):
                    for trained, optimizer in ((model, ours), (reference, torchs)):
                        loss_of(trained, 10 * attempt + step).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                assert_same_state(model, reference)

    def test_a_job_with_parameters_that_stay_goes_on_where_it_stood(self, job: OpenSession) -> None:
        reference = build(Mlp)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for attempt in range(2):
            with job() as session:
                model = build(Mlp)
                ours = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
                assert_same_state(model, reference)
                for trained, optimizer in ((model, ours), (reference, torchs)):
                    loss_of(trained, attempt).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_state(model, reference)

    def test_parameters_that_stay_are_not_matched_by_position(self, job: OpenSession) -> None:
        with job() as session:
            model = build(Mlp)
            train_one_step(model, memd_client.AdamW(model.parameters(), session=session), 0)
        with job() as session:
            other = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
            before = copy.deepcopy(other)
            with pytest.raises(memd_client.InvalidArgument, match=r"position.*named_parameters"):
                memd_client.AdamW(other.parameters(), session=session)
            assert_same_state(other, before)

    def test_other_names_than_those_that_the_job_holds_are_refused(self, job: OpenSession) -> None:
        with job() as session:
            memd_client.offload(build(Mlp), session)
        with job() as session:
            renamed = nn.ModuleDict({"body": build(Mlp)})
            before = copy.deepcopy(renamed)
            with pytest.raises(
                memd_client.InvalidArgument,
                match=r"'body\.layers\.0\.weight'.*does not have.*'layers\.0\.bias'.*strict=False",
            ):
                memd_client.offload(renamed, session)
            assert_same_state(renamed, before)
            assert all(type(parameter) is nn.Parameter for parameter in renamed.parameters())
            memd_client.offload(build(Mlp), session)
        with job() as session:
            named = [("other", nn.Parameter(torch.zeros(3)))]
            with pytest.raises(memd_client.InvalidArgument, match="'other'"):
                memd_client.AdamW(named, session=session)

    def test_the_first_step_refuses_to_leave_parameters_of_the_job_behind(
        self, job: OpenSession
    ) -> None:
        with job() as session:
            session.put("blob", torch.zeros(3))
            both = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
            memd_client.offload(both, session)
        with job() as session:
            first = memd_client.offload(nn.ModuleDict({"a": nn.Linear(4, 4)}), session)
            optimizer = memd_client.AdamW(first.parameters())
            first["a"](torch.ones(1, 4)).sum().backward()
            with pytest.raises(memd_client.InvalidArgument, match=r"'b\.bias', 'b\.weight'"):
                optimizer.step()
            assert session.committed_step == 0
            memd_client.offload(nn.ModuleDict({"b": nn.Linear(4, 4)}), session)
            optimizer.step()
            assert session.committed_step == 1

    def test_adapters_join_a_job_that_is_not_strict(self, job: OpenSession) -> None:
        reference = build(Mlp)
        torchs = torch.optim.AdamW(reference.parameters(), fused=True)
        with job() as session:
            model = memd_client.offload(build(Mlp), session)
            train_one_step(model, memd_client.AdamW(model.parameters()), 0)
            train_one_step(reference, torchs, 0)
        both = [build(Mlp), reference]
        with job() as session:
            for module in both:
                module.requires_grad_(False)
                assert isinstance(module, Mlp)
                torch.manual_seed(1)
                module.layers.append(nn.Linear(WIDTH, WIDTH))
            memd_client.offload(both[0], session, strict=False)
            for module, kind in zip(both, (memd_client.AdamW, torch.optim.AdamW), strict=True):
                fused = {"fused": True} if kind is torch.optim.AdamW else {}
                trained = [p for p in module.parameters() if p.requires_grad]
                optimizer: Any = kind(trained, **fused)
                train_one_step(module, optimizer, 1)
            assert_same_state(*both)

    @pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper, compiled])
    def test_wrappers_of_torch_are_no_part_of_names(
        self, job: OpenSession, wrap: Callable[[nn.Module], nn.Module]
    ) -> None:
        with job() as session:
            model = memd_client.offload(build(BatchNorm), session)
            train_one_step(model, memd_client.AdamW(model.parameters()), 0)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        with job() as session:
            model = build(BatchNorm)
            memd_client.offload(wrap(model), session)
            got = model.state_dict()
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(got[name], value), name

    def test_a_module_of_ones_own_that_is_called_module_is_part_of_names(
        self, session: Session
    ) -> None:
        model = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})
        memd_client.offload(model, session)
        assert [p.shard.name for p in session.transaction.job.shards.parameters] == [
            "module.weight"
        ]

    def test_another_shape_under_a_stored_name_is_refused(self, job: OpenSession) -> None:
        with job() as session:
            memd_client.offload(nn.Linear(4, 4), session)
        with job() as session:
            wider = nn.Linear(5, 4)
            weight = wider.weight.detach().clone()
            with pytest.raises(memd_client.InvalidArgument, match="weight"):
                memd_client.offload(wider, session)
            assert type(wider.weight) is nn.Parameter
            assert torch.equal(wider.weight, weight)

    def test_two_modules_with_the_same_names_are_refused(self, session: Session) -> None:
        first = memd_client.offload(nn.Linear(4, 4), session)
        second = nn.Linear(4, 4)
        with pytest.raises(memd_client.InvalidArgument, match="another module of this session"):
            memd_client.offload(second, session)
        with pytest.raises(memd_client.InvalidArgument, match="offloaded already"):
            memd_client.offload(first, session)
        with pytest.raises(memd_client.InvalidArgument, match="offloaded already"):
            memd_client.offload(nn.Sequential(first), session)
        assert type(second.weight) is nn.Parameter

    def test_a_closed_session_says_so(self, job: OpenSession) -> None:
        session = job()
        model = memd_client.offload(build(Mlp), session)
        session.close()
        session.close()
        with pytest.raises(memd_client.MemdError, match="session is closed"):
            loss_of(model)
        with pytest.raises(memd_client.MemdError, match="session is closed"):
            session.get("x")


class TestBlobs:
    DTYPES = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (1000, 300)], ids=str)
    def test_get_gives_what_was_put(
        self, session: Session, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        tensor = (torch.rand(shape) * 100).to(dtype)
        session.put("x", tensor)
        got = session.get("x")
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(got, tensor)

    def test_what_is_not_contiguous_is_stored_in_its_order(self, session: Session) -> None:
        tensor = torch.arange(12).view(3, 4)
        session.put("transposed", tensor.T)
        session.put("strided", tensor[:, ::2])
        session.put("parameter", nn.Parameter(torch.ones(2)))
        assert torch.equal(session.get("transposed"), tensor.T)
        assert torch.equal(session.get("strided"), tensor[:, ::2])
        assert not session.get("parameter").requires_grad

    def test_putting_again_replaces_and_leaves_what_was_got(self, session: Session) -> None:
        session.put("x", torch.zeros(1000))
        before = session.get("x")
        session.put("x", torch.ones(1000))
        assert session.get("x").all()
        assert not before.any()

    def test_another_shape_or_dtype_is_refused_until_the_name_is_deleted(
        self, session: Session
    ) -> None:
        session.put("x", torch.zeros(3))
        for other in (torch.zeros(4), torch.zeros(3, dtype=torch.int32)):
            with pytest.raises(memd_client.InvalidArgument, match=r"\bx\b.*another shape or dtype"):
                session.put("x", other)
        session.delete("x")
        session.put("x", torch.ones(4))
        assert torch.equal(session.get("x"), torch.ones(4))

    def test_an_unknown_name_is_an_error_that_shows_what_is_close(self, session: Session) -> None:
        session.put("embedding", torch.zeros(3))
        for use in (session.get, session.delete, lambda name: session.prefetch([name])):
            with pytest.raises(
                KeyError, match="holds nothing under 'embedding1'; similar names: 'embedding'"
            ):
                use("embedding1")

    def test_a_deleted_name_is_unknown_though_another_tensor_took_its_place(
        self, session: Session
    ) -> None:
        session.put("x", torch.ones(2))
        session.delete("x")
        session.put("y", torch.zeros(2))
        with pytest.raises(memd_client.UnknownName, match="'x'"):
            session.prefetch(["x"])
        with pytest.raises(memd_client.UnknownName, match="'x'"):
            session.get("x")

    def test_a_name_that_another_thread_deletes_is_no_other_tensor_between_its_id_and_its_bytes(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.put("x", torch.ones(64))
        shards = session.transaction.job.shards
        find = shards.find
        is_found, is_replaced = threading.Event(), threading.Event()

        def find_and_pause(name: str) -> Shard:
            shard = find(name)
            if threading.current_thread() is getter:
                is_found.set()
                # Nobody replaces it meanwhile, or it is another tensor's when it is leased.
                is_replaced.wait(0.5)
            return shard

        def replace() -> None:
            session.delete("x")
            session.put("y", torch.zeros(64))
            is_replaced.set()

        got: list[torch.Tensor] = []
        getter = threading.Thread(target=lambda: got.append(session.get("x")))
        deleter = threading.Thread(target=replace)
        monkeypatch.setattr(shards, "find", find_and_pause)
        getter.start()
        assert is_found.wait(60)
        deleter.start()
        getter.join()
        deleter.join()
        assert len(got) == 1
        assert torch.equal(got[0], torch.ones(64))
        with pytest.raises(memd_client.UnknownName, match="'x'"):
            session.get("x")

    def test_a_list_of_names_brings_no_deleted_one_back(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.put("x", torch.ones(64))
        shards = session.transaction.job.shards
        list_all = shards.list_all
        pauses = iter([True])

        def list_and_replace() -> Iterable[types_pb2.Shard]:
            listed = list(list_all())
            if next(pauses, False):
                session.delete("x")
                session.put("y", torch.zeros(64))
            return listed

        monkeypatch.setattr(shards, "list_all", list_and_replace)
        with pytest.raises(memd_client.UnknownName, match="'z'"):
            session.prefetch(["z"])
        with pytest.raises(memd_client.UnknownName, match="'x'"):
            session.get("x")
        assert not session.get("y").any()

    def test_prefetch_takes_names(self, session: Session) -> None:
        session.put("a", torch.zeros(3))
        session.put("b", torch.ones(3))
        session.prefetch(["a", "b"])
        assert torch.equal(session.get("b"), torch.ones(3))
        with pytest.raises(memd_client.InvalidArgument, match="list"):
            session.prefetch("a")

    def test_what_cannot_be_stored_is_refused(self, session: Session) -> None:
        with pytest.raises(memd_client.InvalidArgument, match="complex64"):
            session.put("x", torch.zeros(3, dtype=torch.complex64))
        with pytest.raises(memd_client.InvalidArgument, match="to_dense"):
            session.put("x", torch.eye(3).to_sparse())
        with pytest.raises(memd_client.InvalidArgument, match="name"):
            session.put("", torch.zeros(3))
        with pytest.raises(memd_client.InvalidArgument, match="list"):
            session.put("x", [1.0])  # type: ignore[arg-type]  # what a user may do

    def test_a_parameter_can_be_got_but_not_put(self, session: Session) -> None:
        model = memd_client.offload(nn.Linear(3, 3), session)
        assert torch.equal(session.get("weight"), model.weight)
        with pytest.raises(memd_client.InvalidArgument, match=r"\bweight\b"):
            session.put("weight", torch.zeros(3, 3))
        with pytest.raises(memd_client.MemdError):
            session.delete("weight")
