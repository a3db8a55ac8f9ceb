"""torch.compile of offloaded models, with backends that keep eager's bits."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memd_client
from tests.unit.autocast_cases import LivingCasts
from tests.unit.compiled_models import (
    ASKS_FOR_GRADIENTS,
    COMPILE,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    Trained,
    assert_no_leases,
    assert_same,
    build,
    compiling_first,
    loss_of,
    tokens,
    train_offloaded,
    train_plain,
)
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session

pytestmark = ASKS_FOR_GRADIENTS
WAYS = [("whole", "eager"), ("blocks", "eager"), *((how, "aot_eager") for how in COMPILE)]


@cache
def eager() -> Trained:
    return train_plain("whole")


@pytest.fixture
def session() -> Iterator[Session]:
    torch._dynamo.reset()
    with FakeDaemon().session() as session:
        yield session


@pytest.fixture
def pair(session: Session) -> tuple[Model, Model]:
    """An offloaded model, and the same one in memory."""
    return memd_client.offload(build(), session), build()


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


class TestTraining:
    @pytest.mark.parametrize(("how", "backend"), WAYS)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_has_the_bits_of_eager_and_compiles_in_the_first_step_alone(
        self, how: str, when: str, backend: str, session: Session
    ) -> None:
        assert_same(train_offloaded(how, when, session, backend=backend), eager())

    def test_blocks_share_their_graphs_as_those_of_the_plain_model_do(
        self, session: Session
    ) -> None:
        """A graph a block would be too many after eight blocks, and torch would give up."""
        trained = train_offloaded("blocks", "after", session, backend="aot_eager")
        assert trained.graph_count == train_plain("blocks", backend="aot_eager").graph_count == 2

    def test_a_block_is_one_graph_with_fullgraph(self, pair: tuple[Model, Model]) -> None:
        model, reference = pair
        COMPILE["blocks"](model, backend="aot_eager", fullgraph=True)
        assert torch.equal(model(tokens(0)), reference(tokens(0)))

    def test_a_whole_model_is_no_one_graph_and_torch_says_what_to_do(
        self, pair: tuple[Model, Model]
    ) -> None:
        compiled = torch.compile(pair[0], backend="aot_eager", fullgraph=True)
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"memd moves parameters.*compile the blocks"
        ):
            compiled(tokens(0))

    def test_casts_leave_after_a_model_could_not_be_compiled(
        self, pair: tuple[Model, Model]
    ) -> None:
        """torch goes on evaluating frames by itself, with other counts of references."""
        compiled = torch.compile(pair[0], backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(tokens(0))
        layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        model = memd_client.offload(layers, FakeDaemon().session())
        with LivingCasts() as living:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(4, 8)).sum()
            assert living.made_count
            assert living.bytes == 0
            loss.backward()

    @pytest.mark.parametrize("compiled", ["model", "child"])
    def test_a_parameter_that_is_used_around_its_module_s_call(
        self, compiled: str, session: Session
    ) -> None:
        torch.manual_seed(0)
        reference = nn.Sequential(Around())
        model = memd_client.offload(copy.deepcopy(reference), session)
        (model if compiled == "model" else model[0]).compile(backend="aot_eager")
        for index in compiling_first(range(3)):
            losses = [loss_of(each, index) for each in (model, reference)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            assert_no_leases(session)
        assert_same_gradients(model, reference)

    def test_an_encoder_layer_is_compiled_again_while_it_has_gradients(
        self, session: Session
    ) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
        reference = nn.Sequential(layer)
        model = memd_client.offload(copy.deepcopy(reference), session)
        outputs = []
        for each in (model, reference):
            each[0].compile(backend="aot_eager")
            for length in (LENGTH, 3):
                outputs.append(each(torch.ones(2, length, WIDTH)))
                outputs[-1].square().mean().backward()
        assert torch.equal(outputs[0], outputs[2])
        assert torch.equal(outputs[1], outputs[3])
        assert_same_gradients(model, reference)

    @pytest.mark.parametrize("first", ["compiled", "offloaded"])
    def test_an_encoder_layer_in_evaluation_takes_its_one_kernel(
        self, session: Session, first: str
    ) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True).eval()
        reference = nn.Sequential(layer)
        model = copy.deepcopy(reference)
        padding = torch.arange(LENGTH).expand(2, LENGTH) >= torch.tensor([[4], [LENGTH]])
        for each in (model, reference):
            if each is model and first == "offloaded":
                memd_client.offload(model, session)
            each[0] = torch.compile(each[0], backend="aot_eager")  # type: ignore[assignment]
        if first == "compiled":
            memd_client.offload(model, session)
        for index in range(3):
            inputs = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(index))
            with torch.no_grad():
                found, expected = (
                    each[0](inputs, src_key_padding_mask=padding) for each in (model, reference)
                )
            assert torch.equal(found, expected)
        assert_no_leases(session)

    def test_gradients_accumulate(self, pair: tuple[Model, Model], session: Session) -> None:
        model, reference = pair
        COMPILE["blocks"](model, backend="aot_eager")
        for each in pair:
            for index in range(3):
                loss_of(each, index).backward()
        assert_no_leases(session)
        assert_same_gradients(model, reference)

    @pytest.mark.parametrize("how", ["whole", "blocks"])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpoints_of_compiled_blocks(
        self, how: str, use_reentrant: bool, pair: tuple[Model, Model], session: Session
    ) -> None:
        model, reference = pair
        for block in (*model.blocks, *reference.blocks):
            assert isinstance(block, Block)
            block.mlp = Checkpointed(block.mlp, use_reentrant)  # type: ignore[assignment]
        compiled = COMPILE[how](model, backend="aot_eager")
        for each in (compiled, reference):
            loss_of(each, 0).backward()
        assert_no_leases(session)
        assert_same_gradients(model, reference)

    def test_updates_begin_in_a_compiled_backward(self, pair: tuple[Model, Model]) -> None:
        model, reference = pair
        COMPILE["blocks"](model, backend="aot_eager")
        ours = memd_client.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            losses = []
            for each, optimizer in ((model, ours), (reference, torchs)):
                # A tied parameter has a second gradient, which step_in_backward refuses.
                loss = each.blocks[1](each.blocks[0](torch.ones(2, WIDTH) * step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(*losses)

    def test_a_function_that_is_a_whole_step(self, pair: tuple[Model, Model]) -> None:
        model, reference = pair
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
            loss = loss_of(model, index)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = torch.compile(step, backend="aot_eager")
        for _ in compiling_first(range(3)):
            assert torch.equal(compiled(model, ours, 0), step(reference, torchs, 0))

    def test_an_exception_in_a_compiled_block_leaves_nothing_behind(self, session: Session) -> None:
        model = memd_client.offload(nn.Sequential(Failing()), session)
        model[0].compile(backend="aot_eager")
        for _ in range(2):
            with pytest.raises(ValueError, match="positive"):
                model(torch.ones(2, WIDTH))
            assert_no_leases(session)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def test_a_copy_of_a_compiled_model_is_a_plain_model(self, pair: tuple[Model, Model]) -> None:
        model, reference = pair
        COMPILE["blocks"](model, backend="aot_eager")
        loss_of(model, 0)
        assert torch.equal(loss_of(copy.deepcopy(model), 1), loss_of(reference, 1))

    def test_a_block_below_a_unit_works_by_itself(
        self, pair: tuple[Model, Model], session: Session
    ) -> None:
        """Its hooks let graphs go through, once the block around it has been compiled."""
        model = pair[0]
        COMPILE["blocks"](model, backend="aot_eager")
        loss_of(model, 0)
        x = torch.randn(2, WIDTH)

        def apply(block: nn.Module) -> torch.Tensor:
            assert isinstance(block, Block)
            output: torch.Tensor = block.mlp(x)
            return output

        for call in (apply, torch.compile(apply, backend="aot_eager")):
            outputs = [call(each.blocks[0]) for each in pair]
            assert torch.equal(*outputs)
            assert_no_leases(session)


class Around(nn.Module):
    """Uses a child's parameter around the child's call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.linear(self.embedding(tokens)), self.embedding.weight)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if x.sum() > 0:
            raise ValueError("positive")
        return y


class TestUnits:
    def test_a_block_that_is_compiled_is_leased_as_one(
        self, pair: tuple[Model, Model], session: Session
    ) -> None:
        model, _ = pair
        held: list[int] = []
        note = torch.compiler.disable(lambda *_: held.append(session.statistics().leases_held))
        for block in model.blocks:
            block.register_forward_pre_hook(note)
        COMPILE["blocks"](model, backend="eager")
        loss_of(model, 0)
        # The model's own, and those of a block.
        assert held == [1 + 7] * 2

    def test_a_whole_model_is_leased_module_by_module(
        self, pair: tuple[Model, Model], session: Session
    ) -> None:
        model, _ = pair
        held: list[int] = []
        note = torch.compiler.disable(lambda *_: held.append(session.statistics().leases_held))
        for module in model.modules():
            module.register_forward_pre_hook(note)
        COMPILE["whole"](model, backend="eager")(tokens(0))
        assert max(held) == 4

    def test_a_block_that_does_not_fit_is_refused(self) -> None:
        session = FakeDaemon(host_bytes=9 << 20).session()
        model = nn.Sequential(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
        memd_client.offload(model, session)
        model[0].compile(backend="eager")
        with pytest.raises(
            memd_client.CapacityError,
            match=r"this Sequential needs.*'0\.0\.weight'.*smaller modules.*9 MiB < 10",
        ):
            model(torch.ones(2, 512))
        assert_no_leases(session)


class TestFunctions:
    """Compiled functions that use parameters outside of any module call."""

    def test_computes_with_a_parameter(self, pair: tuple[Model, Model]) -> None:
        def double(model: Model) -> torch.Tensor:
            return (model.positions * 2).sum() + model.positions.shape[0]

        outputs = [torch.compile(double, backend="aot_eager")(pair[0]), double(pair[1])]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward()
        assert pair[0].positions.grad is not None
        assert pair[1].positions.grad is not None
        assert torch.equal(pair[0].positions.grad, pair[1].positions.grad)

    def test_reads_and_drops_gradients(self, pair: tuple[Model, Model]) -> None:
        model, reference = pair
        for each in pair:
            loss_of(each, 0).backward()
        assert reference.positions.grad is not None

        def total(model: Model) -> torch.Tensor:
            assert model.positions.grad is not None
            found: torch.Tensor = model.positions.grad.sum()
            return found

        def clear(model: Model) -> None:
            model.positions.grad = None

        assert torch.equal(
            torch.compile(total, backend="aot_eager")(model), reference.positions.grad.sum()
        )
        torch.compile(clear, backend="aot_eager")(model)
        assert model.positions.grad is None

    def test_changes_a_parameter(self, pair: tuple[Model, Model], session: Session) -> None:
        @torch.no_grad()
        def halve(model: Model) -> None:
            model.positions.mul_(0.5)

        def gathered(model: Model) -> None:
            with memd_client.gather(model.positions, write=True):
                halve(model)

        torch.compile(halve, backend="aot_eager")(pair[0])
        torch.compile(gathered, backend="aot_eager")(pair[0])
        assert torch.equal(pair[0].positions, pair[1].positions * 0.25)
        assert_no_leases(session)

    def test_data_is_that_of_each_time(self, pair: tuple[Model, Model]) -> None:
        for _ in range(2):
            found = [
                torch.compile(lambda model: model.positions.data.sum(), backend="aot_eager")(model)
                for model in pair
            ]
            assert torch.equal(*found)
            for model in pair:
                model.positions.data.mul_(0.5)


class TestExport:
    def test_is_refused_in_one_sentence(self, pair: tuple[Model, Model]) -> None:
        with pytest.raises(memd_client.NotResident, match=r"^job 'fake'.*'positions'.*gather"):
            torch.export.export(pair[0], (tokens(0),))

    def test_works_inside_gather(self, pair: tuple[Model, Model], session: Session) -> None:
        model, reference = pair
        with memd_client.gather(model):
            program = torch.export.export(model, (tokens(0),))
        assert torch.equal(program.module()(tokens(0)), reference(tokens(0)))
        del program
        assert_no_leases(session)
