"""Models that are built inside `init` have the numbers of plain PyTorch: run as client_cases.py is.

Parameters are smaller than what may stay at home, so most cases run twice: as they are, and with
nothing at home but what is in use.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memd_client
from memd_client.parameters import unnamed as unnamed_module
from memd_client.parameters.unnamed import unnamed
from memd_client.parameters.unnamed_parameter import UnnamedParameter
from tests.unit.client_cases import (
    LENGTH,
    MODELS,
    WIDTH,
    Gpt,
    Mlp,
    assert_same_state,
    build,
    compiled,
    loss_of,
)
from tests.unit.tied_cases import Twice, sharing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memd_client import Session
    from tests.unit.client_cases import OpenSession


@pytest.fixture(params=["at home", "away"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "away":
        empty_home(monkeypatch)
    where: str = request.param
    return where


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_home(monkeypatch)


def empty_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed_module, "_HOME_BYTES_MAX", 0)
    monkeypatch.setattr(unnamed_module, "_SMALL_BYTES", 0)


def built(make: Callable[[], nn.Module], session: Session, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    with memd_client.init(session, **settings):
        return make()


def names_in(session: Session) -> set[str]:
    names = {shard.spec.name for shard in session.transaction.job.shards.list_all()}
    return {name for name in names if not name.startswith("deleted ")}  # as the fake has them


def left_in(session: Session) -> set[str]:
    return {name for name in names_in(session) if name.startswith("@init/")}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Late(nn.Module):
    """Initialises its parameters after the constructors of its layers, by every means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.apply(self.initialise)
        self.post_init()

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def post_init(self) -> None:
        layers: list[Any] = list(self.layers)
        nn.init.uniform_(self.scale)
        nn.init.trunc_normal_(layers[0].weight)
        nn.init.orthogonal_(layers[1].weight)
        with torch.no_grad():
            layers[2].weight.mul_(0.5)
            layers[3].weight[:4].fill_(1.5)
            layers[4].weight.copy_(layers[0].weight.T)
            layers[4].weight += layers[5].weight
            layers[5].weight[0, 0] = 7
        layers[3].bias.data = torch.arange(WIDTH).float()
        rows = layers[2].weight.data
        layers[2].bias.data.copy_(rows.sum(1))
        rows.add_(1.0)  # after others were used
        for layer in layers[:2]:
            layer.bias.detach().fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        output: torch.Tensor = self.norm(x) * self.scale
        return output


class Aliased(nn.Module):
    """Has tensors that share the memory of parameters, and writes to those."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.empty(WIDTH, WIDTH)
        self.weight = nn.Parameter(weight)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        weight.normal_()
        self.rows = self.second.weight.data[:2]
        self.fourth = nn.Linear(WIDTH, WIDTH)
        self.rows.fill_(3.0)
        array = torch.zeros(WIDTH).numpy()
        self.bias = nn.Parameter(torch.from_numpy(array))
        self.fifth = nn.Linear(WIDTH, WIDTH)
        array[:] = 2
        self.same = nn.Parameter(self.third.weight.detach().clone())
        again = nn.Parameter(self.fourth.weight)
        nn.init.ones_(again)
        del self.rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.third(self.second(x)) @ self.weight + self.bias
        output: torch.Tensor = self.fifth(self.fourth(x)) @ self.same
        return output


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
        self.halves = nn.Parameter(torch.randn(3).to(torch.float8_e5m2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.second.bias.requires_grad = False
        self.register_buffer("counts", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(
            WIDTH, 4, 2, 2, dim_feedforward=48, dropout=0.0, batch_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x, x)
        return output


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(LENGTH, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.ConvTranspose1d(8, LENGTH, 3, padding=1),
        )
        self.bank = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        for row in self.bank:
            output = output * row
        return output


BUILT: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "late": Late,
    "aliased": Aliased,
    "frozen": Frozen,
    "tied twice": Twice,
    "transformer": Transformer,
    "convolutions": Convolutions,
}


class TestInitNumbers:
    @pytest.mark.parametrize("make", BUILT.values(), ids=BUILT)
    def test_values_names_and_random_numbers_are_those_of_the_plain_model(
        self, session: Session, room: str, make: Callable[[], nn.Module]
    ) -> None:
        del room
        reference = build(make)
        expected = torch.get_rng_state()
        model = built(make, session)
        assert torch.equal(torch.get_rng_state(), expected)
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in reference.named_parameters()
        ]
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert one.requires_grad == other.requires_grad
        assert_same_state(model, reference)
        assert left_in(session) == set()
        names = names_in(session)
        for name, parameter in reference.named_parameters():
            assert not parameter.numel() or any(each.startswith(name) for each in names)

    @pytest.mark.parametrize("make", [Mlp, Gpt, Late, Convolutions, Transformer])
    def test_it_trains_as_the_plain_model(
        self, session: Session, room: str, make: Callable[[], nn.Module]
    ) -> None:
        del room
        model, reference = built(make, session), build(make)
        found = train(model, memd_client.AdamW(model.parameters(), lr=1e-2))
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        assert found == train(reference, plain)
        assert_same_state(model, reference)

    def test_data_is_the_value_while_parameters_are_away(
        self, session: Session, away: None
    ) -> None:
        with memd_client.init(session):
            first, second = nn.Linear(4, 4), nn.Linear(4, 4)
            expected = first.weight.data.clone()
            nn.init.ones_(second.weight)
            assert type(first.weight) is UnnamedParameter
            assert torch.equal(first.weight.data, expected)
            assert type(first.weight) is nn.Parameter
            nn.init.ones_(second.weight)
            first.weight.data.mul_(2)
            assert torch.equal(first.weight, expected * 2)

    @pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
    def test_constructors_of_torch_need_it_gathered(self, session: Session, away: None) -> None:
        with memd_client.init(session):
            first, second = nn.Linear(4, 4), nn.Linear(4, 4)
            with pytest.raises(memd_client.NotResident, match=r"init\(\) has built.*gather"):
                torch.tensor(first.weight)
            with memd_client.gather(first, write=True):
                nn.init.ones_(second.weight)
                assert type(first.weight) is nn.Parameter
                torch.asarray(first.weight.detach()).zero_()
            first.third = nn.Linear(4, 4)
            assert type(first.weight) is UnnamedParameter
            assert not first.weight.any()

    def test_backward_never_computes_without_bytes(self, session: Session, away: None) -> None:
        with memd_client.init(session):
            first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        x = torch.ones(4, 4, requires_grad=True)
        loss = (x * first.weight * second.weight).sum()
        # A view that autograd keeps would keep the bytes here; it has saved the parameter itself.
        assert type(first.weight) is UnnamedParameter
        with pytest.raises(memd_client.NotResident, match=r"init\(\) has built"):
            loss.backward()

    def test_tied_parameters_stay_one(self, session: Session, away: None) -> None:
        model, reference = built(Twice, session), build(Twice)
        assert sharing(model.state_dict()) == sharing(reference.state_dict())

    def test_a_parameter_away_answers_for_its_form(self, session: Session, away: None) -> None:
        with memd_client.init(session):
            first = nn.Linear(4, 3)
            second = nn.Linear(4, 4)
            weight = first.weight
            assert type(weight) is UnnamedParameter
            assert (weight.shape, weight.dtype, weight.device.type) == (
                (3, 4),
                torch.float32,
                "cpu",
            )
            assert (weight.grad, weight.is_leaf, weight.requires_grad) == (None, True, True)
            first.requires_grad_(False)
            assert not weight.requires_grad
            assert type(weight) is UnnamedParameter
            del second

    def test_a_state_dict_comes_and_goes(self, session: Session, away: None) -> None:
        reference = build(Gpt)
        torch.manual_seed(1)
        with memd_client.init(session):
            model = Gpt()
            before = copy.deepcopy(model.state_dict())
            model.load_state_dict(reference.state_dict())
            del before
        assert_same_state(model, reference)

    def test_a_checkpoint_is_written(self, session: Session, away: None, tmp_path: Path) -> None:
        """Each has memory of its own only while it is written, and a name of its own."""
        expected, found = tmp_path / "expected.safetensors", tmp_path / "found.safetensors"
        memd_client.save_safetensors(build(Gpt), expected)
        torch.manual_seed(0)
        with memd_client.init(session):
            model = Gpt()
            memd_client.save_safetensors(model, found)
        assert found.read_bytes() == expected.read_bytes()


class TestInitCopies:
    def test_an_average_made_inside_is_one_of_its_own(self, session: Session, room: str) -> None:
        del room
        torch.manual_seed(0)
        with memd_client.init(session):
            model = Gpt()
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        memd_client.offload(model, session)
        reference = build(Gpt)
        expected = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            assert train(model, optimizer, 1) == train(reference, plain, 1)
            average.update_parameters(model)
            expected.update_parameters(reference)
        assert_same_state(average, expected)
        assert sharing(average.state_dict()) == sharing(expected.state_dict())

    def test_an_average_made_afterwards_is_an_ordinary_module(
        self, session: Session, room: str
    ) -> None:
        del room
        model = built(Gpt, session)
        average = AveragedModel(model)
        assert all(type(each) is nn.Parameter for each in average.parameters())
        assert_same_state(average, AveragedModel(build(Gpt)))

    def test_copies_of_a_template_leave_as_they_are_made(
        self, session: Session, away: None
    ) -> None:
        def make() -> tuple[nn.Module, nn.Module]:
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
            return layer, nn.TransformerEncoder(layer, 3)

        with memd_client.init(session):
            layer, encoder = make()
            copies = [copy.deepcopy(layer) for _ in range(3)]
            homes = [type(each) is nn.Parameter for one in copies for each in one.parameters()]
            assert sum(homes) <= 1
        memd_client.offload(encoder, session)
        template, reference = make()
        assert_same_state(encoder, reference)
        assert_same_state(layer, template)
        for each in copies:
            assert_same_state(each, template)
        # The template has no name, and goes with the session.
        assert not any(name.startswith("self_attn") for name in names_in(session))


class TestInitForms:
    @pytest.mark.parametrize("make", [Mlp, Gpt, Convolutions, Frozen])
    def test_dtype_converts_as_module_to_does(
        self, session: Session, room: str, make: Callable[[], nn.Module]
    ) -> None:
        del room
        model = built(make, session, dtype=torch.bfloat16)
        reference = build(make).to(torch.bfloat16)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert one.dtype == other.dtype
        assert_same_state(model, reference)

    def test_conversions_inside(self, session: Session, away: None) -> None:
        model = built(lambda: Mlp().double().to(torch.bfloat16), session)
        assert_same_state(model, build(lambda: Mlp().double().to(torch.bfloat16)))

    def test_a_model_on_meta_gets_bytes_inside(self, session: Session, away: None) -> None:
        with torch.device("meta"):
            model = Late()
        torch.manual_seed(0)
        with memd_client.init(session):
            model.to_empty(device="cpu")
            homes = [type(each) is nn.Parameter for each in model.parameters()]
            assert sum(homes) <= 1
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                    module.reset_parameters()
            nn.init.zeros_(model.scale)
        torch.manual_seed(0)
        with torch.device("meta"):
            reference = Late()
        reference.to_empty(device="cpu")
        for module in reference.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()
        nn.init.zeros_(reference.scale)
        assert_same_state(model, reference)

    def test_a_model_on_meta_takes_a_state_dict(self, session: Session, away: None) -> None:
        reference = build(Gpt)
        with memd_client.init(session):
            with torch.device("meta"):
                model = Gpt()
            model.load_state_dict(copy.deepcopy(reference.state_dict()), assign=True)
            model.head.weight = model.embedding.weight
        assert_same_state(model, reference)

    def test_a_model_that_stays_on_meta_is_left_alone(self, session: Session) -> None:
        with memd_client.init(session), torch.device("meta"):
            model = Mlp()
        assert all(each.is_meta for each in model.parameters())
        with pytest.raises(memd_client.NotYet, match=r"no bytes.*inside init\(session\)"):
            memd_client.offload(model, session)


class TestInitNames:
    def test_offload_afterwards_does_nothing_more(self, session: Session) -> None:
        model = built(Mlp, session)
        before = names_in(session)
        assert memd_client.offload(model, session) is model
        assert names_in(session) == before

    def test_offload_inside_names_the_model(self, session: Session, away: None) -> None:
        torch.manual_seed(0)
        with memd_client.init(session):
            model = memd_client.offload(Mlp(), session, strict=False)
        assert_same_state(model, build(Mlp))

    def test_several_models_get_their_names_by_offload(self, session: Session, away: None) -> None:
        torch.manual_seed(0)
        with memd_client.init(session):
            first, second = Mlp(), nn.Linear(4, 4)
        assert not {"weight", "layers.0.weight"} & names_in(session)
        with pytest.raises(memd_client.InvalidArgument, match=r"no name in memd yet.*offload\("):
            memd_client.AdamW(first.named_parameters(), session=session)
        memd_client.offload(first, session)
        memd_client.AdamW(first.parameters())
        torch.manual_seed(0)
        assert_same_state(first, Mlp())
        assert_same_state(second, nn.Linear(4, 4))
        memd_client.offload(second, session)
        assert left_in(session) == set()

    def test_lazy_modules_are_initialised_inside(self, session: Session, away: None) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))

        def initialised() -> nn.Module:
            model = make()
            model(torch.ones(1, 2))
            return model

        with pytest.raises(memd_client.InvalidArgument, match="initialise lazy modules"):
            built(make, session)
        model = built(initialised, session)
        assert "0.weight" in names_in(session)
        assert_same_state(model, build(initialised))

    def test_a_wrapped_model_has_the_names_of_the_plain_one(self, session: Session) -> None:
        built(lambda: compiled(Mlp()), session)
        assert "layers.0.weight" in names_in(session)

    def test_nothing_is_left_when_the_session_is_closed(self, job: OpenSession, away: None) -> None:
        with job() as session:
            with memd_client.init(session):
                models = nn.Linear(4, 4), nn.Linear(4, 4)
            assert left_in(session)
        with pytest.raises(memd_client.MemdError, match="the session is closed"):
            models[0].weight.sum()
        with job() as session:
            assert left_in(session) == set()


class TestInitJobs:
    def test_the_stored_values_win(self, job: OpenSession, room: str) -> None:
        del room
        with job() as session:
            model = built(Gpt, session)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
            train(model, optimizer)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            names = names_in(session)
        with job() as session:
            torch.manual_seed(7)
            with memd_client.init(session):
                model = Gpt()
            assert session.resume() == 2
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected[name]), name
            assert names_in(session) == names

    def test_a_model_with_other_names_is_refused_and_nothing_changes(
        self, job: OpenSession, away: None
    ) -> None:
        with job() as session:
            built(Mlp, session)
            names = names_in(session)
        with job() as session:
            with (
                pytest.raises(memd_client.InvalidArgument, match="holds other parameters"),
                memd_client.init(session),
            ):
                model = nn.Linear(4, 4)
            assert torch.isfinite(model.weight).all()
            memd_client.offload(model, session, strict=False)
            assert names_in(session) == {*names, "weight", "bias"}

    def test_what_a_killed_trainer_has_left_is_deleted(self, job: OpenSession, away: None) -> None:
        killed = job()
        with memd_client.init(killed):
            models = nn.Linear(4, 4), nn.Linear(4, 4)
        left = left_in(killed)
        assert left
        with job() as session:
            with memd_client.init(session):
                pass
            assert left_in(session) == left, "its session is there"
        killed.transaction.job.detach()
        killed.transaction.job.end()
        with job() as session:
            with memd_client.init(session):
                pass
            assert left_in(session) == set()
        del models


class TestInitErrors:
    def test_a_context_inside_another(self, session: Session) -> None:
        with memd_client.init(session):
            model = Mlp()
            with (
                pytest.raises(memd_client.InvalidArgument, match=r"init\(\) is open already"),
                memd_client.init(session),
            ):
                pytest.fail("it was entered")
            model.extra = nn.Linear(4, 4)
        assert "extra.weight" in names_in(session)

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"tier": "disk"}, memd_client.InvalidArgument, "tier is"),
            ({"dtype": torch.int8}, memd_client.InvalidArgument, "floating-point"),
        ],
    )
    def test_arguments(
        self, session: Session, settings: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            memd_client.init(session, **settings)

    def test_an_exception_leaves_the_job_as_it_was(self, session: Session, away: None) -> None:
        names = names_in(session)
        functions = nn.Module._apply, nn.Parameter.__deepcopy__
        environment = dict(os.environ)
        kept: list[nn.Module] = []

        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                kept.append(nn.Linear(4, 4))
                self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
                raise RuntimeError("broken")

        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="broken") as caught, memd_client.init(session):
            Broken()
        assert "the job is as it was" in caught.value.__notes__[0]
        assert (nn.Module._apply, nn.Parameter.__deepcopy__) == functions
        assert dict(os.environ) == environment
        torch.manual_seed(0)
        assert_same_state(kept[0], nn.Linear(4, 4))
        del caught
        kept.clear()
        model = built(Mlp, session)
        assert_same_state(model, build(Mlp))
        assert left_in(session) == names

    def test_modules_built_outside_are_ordinary(self, session: Session, away: None) -> None:
        with memd_client.init(session):
            pass
        model = Mlp()
        with memd_client.init(session):
            model.double()
            inside = nn.Linear(4, 4)
        assert all(type(each) is nn.Parameter for each in model.parameters())
        assert all(unnamed(each) is None for each in model.parameters())
        assert "weight" in names_in(session)
        del inside
