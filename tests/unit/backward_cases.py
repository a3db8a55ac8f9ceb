"""Optimizers that step inside backward, as in torch's recipe with one optimizer for each parameter:
cases for the fake and for a real daemon, run as those of client_cases.py are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memd_client
from tests.unit.client_cases import (
    MODELS,
    Mlp,
    assert_same_state,
    batch,
    build,
    leases_held,
    loss_of,
)
from tests.unit.compiled_models import ASKS_FOR_GRADIENTS
from tests.unit.early_cases import Repeated
from tests.unit.track_cases import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

    from memd_client import Session
    from tests.unit.client_cases import OpenSession

_DEADLOCK_S = 20.0
RAISED = r"step\(\) has taken the gradient of .* in a backward that has raised.*zero_grad\(\)"
NOT_ENDED = r"step\(\) has taken the gradient of .* in a backward that has not ended"


# Python does not see the cycle of a parameter, its hook and what that refers to.
_handles: list[RemovableHandle] = []


def hook(parameters: Iterable[torch.Tensor], function: Callable[[torch.Tensor], Any]) -> None:
    _handles.extend(each.register_post_accumulate_grad_hook(function) for each in parameters)


class Recipe:
    """An optimizer for each parameter, stepped by a hook when its gradient is there."""

    def __init__(self, model: nn.Module, session: Session | None, **settings: Any) -> None:
        self.model = model
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for name, parameter in model.named_parameters():
            given: Any = [(name, parameter)]
            self.optimizers[parameter] = (
                torch.optim.AdamW([parameter], lr=1e-2, fused=True, **settings)
                if session is None
                else memd_client.AdamW(given, lr=1e-2, session=session, **settings)
            )
        hook(model.parameters(), self.step)

    def step(self, parameter: torch.Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()


def twins(
    session: Session, make: Callable[[], nn.Module] = Mlp, *, stays: bool = False, **settings: Any
) -> tuple[Recipe, Recipe]:
    model = build(make)
    if not stays:
        memd_client.offload(model, session)
    return Recipe(model, session, **settings), Recipe(build(make), None, **settings)


def train(recipes: tuple[Recipe, Recipe], steps: int, *, first: int = 0) -> None:
    for recipe in recipes:
        for step in range(first, first + steps):
            loss_of(recipe.model, step).backward()


def fail_once(model: nn.Module, error: BaseException) -> None:
    """In the next backward, at the last gradient but one."""
    parameter = list(model.parameters())[1]

    def fail(_: torch.Tensor) -> None:
        handle.remove()
        raise error

    handle = parameter.register_post_accumulate_grad_hook(fail)


def step_again(recipe: Recipe, parameter: torch.Tensor) -> None:
    parameter.grad = torch.ones(parameter.shape)
    recipe.step(parameter)


class DetachedFirst(nn.Module):
    """Backward needs the value of a parameter when its gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (self.other * self.weight.detach()).sum()
        return (first + (self.weight * 2).sum()) * x.mean()


class Checkpointed(nn.Module):
    """Nothing but a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
        return output


class TestStepsCalledInBackward:
    @pytest.fixture(autouse=True)
    def _without_hooks_at_the_end(self) -> Iterator[None]:
        yield
        while _handles:
            _handles.pop().remove()

    @pytest.mark.parametrize("name", MODELS)
    def test_those_of_one_backward_are_one_commit_with_torchs_bits(
        self, session: Session, name: str
    ) -> None:
        recipes = twins(session, MODELS[name], weight_decay=0.1)
        train(recipes, 3)
        assert leases_held(session) == 0
        assert session.committed_step == 3
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_of_parameters_that_stay_in_this_process(self, session: Session) -> None:
        recipes = twins(session, stays=True)
        train(recipes, 3)
        assert session.committed_step == 3
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_of_a_model_of_which_a_part_is_offloaded(self, session: Session) -> None:
        model = build(Mlp)
        assert isinstance(model, Mlp)
        memd_client.offload(model.second, session)
        recipes = Recipe(model, session), Recipe(build(Mlp), None)
        train(recipes, 3)
        assert session.committed_step == 3
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_a_new_session_resumes_at_the_number_of_backwards(self, job: OpenSession) -> None:
        with job() as session:
            recipes = twins(session)
            assert session.resume() == 0
            train(recipes, 2)
        with job() as session:
            model = memd_client.offload(build(Mlp), session)
            recipe = Recipe(model, session)
            assert session.resume() == 2
            train((recipe, recipes[1]), 2, first=2)
            assert_same_state(model, recipes[1].model)
            assert session.committed_step == 4

    def test_optimizers_of_several_groups_step_when_their_last_gradient_comes(
        self, session: Session
    ) -> None:
        models = memd_client.offload(build(Mlp), session), build(Mlp)
        for model, kind in zip(models, (memd_client.AdamW, torch.optim.AdamW), strict=True):
            assert isinstance(model, Mlp)
            for layer in (model.first, model.second):
                weight, bias = layer.parameters()
                groups = [{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 3e-2}]
                optimizer: Any = kind(groups, lr=1e-2, fused=True)
                came: list[torch.Tensor] = []

                def step(
                    p: torch.Tensor, optimizer: Any = optimizer, came: list[torch.Tensor] = came
                ) -> None:
                    came.append(p)
                    if len(came) == 2:
                        came.clear()
                        optimizer.step()
                        optimizer.zero_grad()

                hook([weight, bias], step)
            for index in range(3):
                loss_of(model, index).backward()
        assert session.committed_step == 3
        assert_same_state(*models)

    def test_hooks_that_leave_zeros(self, session: Session) -> None:
        models = memd_client.offload(build(Mlp), session), build(Mlp)
        for model in models:
            kind: Any = memd_client.AdamW if model is models[0] else torch.optim.AdamW
            owned: dict[torch.Tensor, Any] = {
                p: kind([p], lr=1e-2, fused=True) for p in model.parameters()
            }

            def step(p: torch.Tensor, owned: dict[torch.Tensor, Any] = owned) -> None:
                owned[p].step()
                owned[p].zero_grad(set_to_none=False)

            hook(model.parameters(), step)
            for index in range(3):
                loss_of(model, index).backward()
            for optimizer in owned.values():
                optimizer.step()  # with the zeros
        assert session.committed_step == 3 + 4
        assert_same_state(*models)

    def test_updates_that_begin_early_have_the_same_bits(self, session: Session) -> None:
        model = memd_client.offload(build(Mlp), session)
        recipes = Recipe(model, session, step_in_backward=True), Recipe(build(Mlp), None)
        train(recipes, 3)
        assert session.committed_step == 3
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_schedulers_count_from_one_backward_to_the_next(self, session: Session) -> None:
        recipes = twins(session)
        for recipe in recipes:
            schedulers = [
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                for optimizer in recipe.optimizers.values()
            ]
            for index in range(3):
                loss_of(recipe.model, index).backward()
                for scheduler in schedulers:
                    scheduler.step()
        assert_same_state(recipes[0].model, recipes[1].model)

    @ASKS_FOR_GRADIENTS
    def test_a_compiled_model(self, session: Session) -> None:
        recipes = twins(session)
        for recipe in recipes:
            compiled = torch.compile(recipe.model, backend="aot_eager")
            for index in range(3):
                loss: torch.Tensor = compiled(batch(recipe.model, index)).square().mean()
                loss.backward()
        assert session.committed_step == 3
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_a_hook_from_before_offload_runs_before_memds_and_sees_the_gradient(
        self, session: Session
    ) -> None:
        model, reference = build(Mlp), build(Mlp)
        owned: dict[torch.Tensor, torch.optim.Optimizer] = {}

        def step(parameter: torch.Tensor) -> None:
            owned[parameter].step()
            owned[parameter].zero_grad()

        hook(model.parameters(), step)
        memd_client.offload(model, session)
        owned |= {p: memd_client.AdamW([p], lr=1e-2) for p in model.parameters()}
        twin = Recipe(reference, None)
        for index in range(2):
            loss_of(model, index).backward()
            loss_of(twin.model, index).backward()
        assert session.committed_step == 2
        assert_same_state(model, reference)

    def test_steps_under_a_scaler_are_one_commit_if_they_update_nothing_too(
        self, session: Session
    ) -> None:
        models = memd_client.offload(build(Mlp), session), build(Mlp)
        for model in models:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
            kind: Any = memd_client.AdamW if model is models[0] else torch.optim.AdamW
            owned: dict[torch.Tensor, Any] = {
                p: kind([p], lr=1e-2, fused=True) for p in model.parameters()
            }

            def step(
                p: torch.Tensor,
                owned: dict[torch.Tensor, Any] = owned,
                scaler: torch.amp.GradScaler = scaler,
            ) -> None:
                scaler.step(owned[p])
                owned[p].zero_grad()

            hook(model.parameters(), step)
            for index in range(4):
                factor = float("inf") if index == 1 else 1.0
                scaled: Any = scaler.scale(loss_of(model, index) * factor)
                scaled.backward()
                scaler.update()
        assert session.committed_step == 4
        assert_same_state(*models)

    def test_a_step_in_the_backward_of_autograd_grad_closes_with_that(
        self, session: Session
    ) -> None:
        models = memd_client.offload(build(Mlp), session), build(Mlp)
        for model in models:
            kind: Any = memd_client.AdamW if model is models[0] else torch.optim.AdamW
            optimizer = kind(model.parameters(), lr=1e-2, fused=True)
            loss_of(model).backward()
            x = torch.ones(3, requires_grad=True)
            y = x * 2
            y.register_hook(lambda _, optimizer=optimizer: optimizer.step())
            torch.autograd.grad(y.sum(), x)
        assert session.committed_step == 1
        assert_same_state(*models)

    @pytest.mark.parametrize("stays", [False, True])
    def test_a_graph_that_is_kept_is_out_of_date(self, session: Session, stays: bool) -> None:
        recipes = twins(session, stays=stays)
        loss = loss_of(recipes[0].model)
        loss.backward(retain_graph=True)
        # As torch says of its optimizers, but for the fused kernels, whose changes it does not see.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        recipes[0].zero_grad()
        loss_of(recipes[1].model).backward()
        assert_same_state(recipes[0].model, recipes[1].model)
        train(recipes, 1, first=1)
        assert session.committed_step == 2
        assert_same_state(recipes[0].model, recipes[1].model)

    @pytest.mark.parametrize("stays", [False, True])
    def test_a_value_that_was_saved_before_the_step_is_out_of_date(
        self, session: Session, stays: bool
    ) -> None:
        recipe, _ = twins(session, DetachedFirst, stays=stays)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(recipe.model).backward()
        assert session.committed_step == 0

    @pytest.mark.parametrize("stays", [False, True])
    @pytest.mark.parametrize(
        "use",
        [
            lambda recipe, p: p.sum(),
            lambda recipe, p: p.detach().sum(),
            lambda recipe, p: p.data.sum(),
            lambda recipe, p: torch.stack([p, p]),
            lambda recipe, p: loss_of(recipe.model, 1),
            lambda recipe, p: recipe.optimizers[p].state_dict(),
            step_again,
        ],
        ids=["value", "detach", "data", "list", "forward", "state", "second step"],
    )
    def test_the_value_cannot_be_used_between_its_step_and_the_end(
        self, session: Session, stays: bool, use: Callable[[Recipe, torch.Tensor], Any]
    ) -> None:
        recipes = twins(session, stays=stays)
        seen: list[str] = []

        def use_it(parameter: torch.Tensor) -> None:
            assert parameter.shape == parameter.size()
            assert parameter.requires_grad
            try:
                use(recipes[0], parameter)
            except memd_client.MemdError as error:
                seen.append(str(error))
            parameter.grad = None

        hook(recipes[0].model.parameters(), use_it)
        train(recipes, 1)
        assert len(seen) == 4
        for each in seen:
            assert ("in a backward" in each and "ended" in each) or "are in memd" in each
        assert session.committed_step == 1
        assert_same_state(recipes[0].model, recipes[1].model)
        if stays:
            assert all(type(parameter) is nn.Parameter for parameter in recipes[0].optimizers)

    @pytest.mark.parametrize("view", [torch.Tensor.detach, lambda p: p.data])
    def test_a_view_of_a_parameter_that_stays_cannot_be_written_between_its_step_and_the_end(
        self, session: Session, view: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        recipes = twins(session, stays=True)
        views = {id(each): view(each) for each in recipes[0].model.parameters()}

        def write(parameter: torch.Tensor) -> None:
            views[id(parameter)].mul_(0.5)

        hook(list(recipes[0].model.parameters())[:1], write)
        with pytest.raises(
            memd_client.MemdError, match=r"parameter .* was written through .*change is lost"
        ):
            loss_of(recipes[0].model).backward()
        assert session.committed_step == 0
        _handles.pop().remove()
        recipes[0].zero_grad()
        train(recipes, 2)
        assert session.committed_step == 2
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_a_module_that_is_used_in_two_reentrant_checkpoints_is_refused(
        self, session: Session
    ) -> None:
        model = memd_client.offload(Repeated(use_reentrant=True), session)
        recipe = Recipe(model, session)
        with pytest.raises(memd_client.InvalidArgument, match="use_reentrant=False"):
            loss_of(model).backward()
        assert session.committed_step == 0
        recipe.zero_grad()
        model.use_reentrant = False
        reference = Repeated(use_reentrant=False)
        reference.load_state_dict(model.state_dict())
        train((recipe, Recipe(reference, None)), 2)
        assert session.committed_step == 2
        assert_same_state(model, reference)

    def test_a_reentrant_checkpoint_around_parameters_that_stay_is_refused(
        self, session: Session
    ) -> None:
        recipes = twins(session, Checkpointed, stays=True)
        before = build(Checkpointed)
        with pytest.raises(
            memd_client.InvalidArgument, match=r"backward inside another.*use_reentrant=False"
        ):
            loss_of(recipes[0].model).backward()
        assert session.committed_step == 0
        assert_same_state(recipes[0].model, before)

    @pytest.mark.parametrize("stays", [False, True])
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_a_backward_that_raises_commits_nothing_and_says_so_until_zero_grad(
        self, session: Session, stays: bool, error: type[BaseException]
    ) -> None:
        recipes = twins(session, stays=stays)
        train(recipes, 1)
        model, reference = recipes[0].model, recipes[1].model
        fail_once(model, error("a hook"))
        with pytest.raises(error):
            loss_of(model, 7).backward()
        assert session.committed_step == 1
        with pytest.raises(memd_client.InvalidArgument, match=RAISED):
            loss_of(model, 1)
        with pytest.raises(memd_client.InvalidArgument, match="raised after step"):
            next(iter(recipes[0].optimizers.values())).state_dict()
        recipes[0].zero_grad()
        assert session.committed_step == 1
        assert_same_state(model, reference)
        assert all(parameter.grad is None for parameter in model.parameters())
        train(recipes, 2, first=1)
        assert session.committed_step == 3
        assert_same_state(model, reference)

    def test_zero_grad_of_one_optimizer_drops_all_gradients_of_the_step(
        self, session: Session
    ) -> None:
        recipes = twins(session)
        model = recipes[0].model
        fail_once(model, ValueError("a hook"))
        with pytest.raises(ValueError, match="a hook"):
            loss_of(model, 7).backward()
        *others, last = model.parameters()
        recipes[0].optimizers[others[0]].zero_grad()  # its gradient has not come
        with pytest.raises(memd_client.InvalidArgument, match=RAISED):
            loss_of(model)
        recipes[0].optimizers[last].zero_grad()
        train(recipes, 2)
        assert_same_state(model, recipes[1].model)

    def test_a_session_can_be_closed_after_a_backward_that_raised(
        self, job: OpenSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        with job() as session:
            recipes = twins(session)
            train(recipes, 1)
            fail_once(recipes[0].model, ValueError("a hook"))
            with pytest.raises(ValueError, match="a hook"):
                loss_of(recipes[0].model, 1).backward()
        assert "the gradients of 3 parameters are dropped" in caplog.text
        with job() as session:
            model = memd_client.offload(build(Mlp), session)
            assert_same_state(model, recipes[1].model)
            assert session.committed_step == 1

    def test_a_session_that_is_closed_in_backward_has_made_no_step(self, job: OpenSession) -> None:
        with job() as session:
            recipes = twins(session)
            last = next(iter(recipes[0].model.parameters()))
            hook([last], lambda _: session.close())
            loss_of(recipes[0].model).backward()
        with job() as session:
            assert session.committed_step == 0
            assert_same_state(memd_client.offload(build(Mlp), session), build(Mlp))

    def test_a_gradient_that_no_optimizer_takes_is_refused_at_the_end(
        self, session: Session
    ) -> None:
        model = memd_client.offload(build(Mlp), session)
        assert isinstance(model, Mlp)
        recipe = Recipe(model.second, session)
        with pytest.raises(memd_client.InvalidArgument, match="belongs to no memd optimizer"):
            loss_of(model).backward()
        assert session.committed_step == 0
        recipe.zero_grad()
        model.first.requires_grad_(False)
        model.first.weight.grad = model.first.bias.grad = None
        reference = build(Mlp)
        assert isinstance(reference, Mlp)
        reference.first.requires_grad_(False)
        twin = Recipe(reference.second, None)
        del twin
        for each in (model, reference):
            loss_of(each, 1).backward()
        assert session.committed_step == 1
        assert_same_state(model, reference)

    @pytest.mark.parametrize("stays", [False, True])
    def test_commit_closes_what_was_tracked_with_what_backward_stepped(
        self, session: Session, stays: bool
    ) -> None:
        recipes = twins(session, stays=stays)
        numbers: list[int] = []
        session.track(kept=Kept(1))
        session.after_commit(numbers.append)
        for index in range(3):
            train(recipes, 1, first=index)
            assert session.committed_step == index
            with pytest.raises(memd_client.InvalidArgument, match=r"call session.commit\(\)"):
                loss_of(recipes[0].model)
            session.commit()
        assert numbers == [1, 2, 3]
        assert_same_state(recipes[0].model, recipes[1].model)

    @pytest.mark.parametrize("tracks", [False, True])
    def test_a_commit_in_backward_is_refused(self, session: Session, tracks: bool) -> None:
        recipes = twins(session)
        if tracks:
            session.track(kept=Kept(1))
        refused: list[str] = []

        def commit(_: torch.Tensor) -> None:
            with pytest.raises(memd_client.InvalidArgument) as caught:
                session.commit()
            refused.append(str(caught.value))

        hook(recipes[0].model.parameters(), commit)
        train(recipes, 1)
        assert len(refused) == 4
        assert "commit() is not possible in a backward after step()" in refused[0]
        session.commit()
        assert session.committed_step == 1
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_a_half_made_step_is_in_no_commit(self, session: Session) -> None:
        recipes = twins(session)
        session.track(kept=Kept(1))
        fail_once(recipes[0].model, ValueError("a hook"))
        with pytest.raises(ValueError, match="a hook"):
            loss_of(recipes[0].model, 7).backward()
        with pytest.raises(memd_client.InvalidArgument, match="raised after step"):
            session.commit()
        recipes[0].zero_grad()
        train(recipes, 1)
        session.commit()
        assert session.committed_step == 1
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_a_step_in_another_thread_closes_by_itself(self, session: Session) -> None:
        models = memd_client.offload(build(Mlp), session), build(Mlp)
        twin = Recipe(models[1], None)
        owned: dict[torch.Tensor, memd_client.AdamW] = {
            p: memd_client.AdamW([p], lr=1e-2) for p in models[0].parameters()
        }

        def step(parameter: torch.Tensor) -> None:
            thread = threading.Thread(target=owned[parameter].step)
            thread.start()
            thread.join(_DEADLOCK_S)
            assert not thread.is_alive()
            owned[parameter].zero_grad()

        hook(models[0].parameters(), step)
        for model in models:
            loss_of(model).backward()
        del twin
        assert session.committed_step == 4
        assert_same_state(*models)

    def test_backwards_of_two_threads_are_two_commits(self, session: Session) -> None:
        ours = [build(Mlp), build(Mlp)]
        memd_client.offload(nn.ModuleList(ours), session)
        recipes = [Recipe(model, session) for model in ours]
        references = [Recipe(build(Mlp), None) for _ in ours]
        # Each has stepped two of its parameters before either ends.
        meet = threading.Barrier(2)

        def wait(_: torch.Tensor) -> None:
            meet.wait(_DEADLOCK_S)

        for recipe in recipes:
            hook(list(recipe.model.parameters())[2:3], wait)
        raised: list[BaseException] = []

        def run(index: int) -> None:
            try:
                loss_of(ours[index], index).backward()
            except BaseException as error:  # noqa: BLE001 handed to the test
                raised.append(error)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DEADLOCK_S)
            assert not thread.is_alive()
        assert not raised
        for index, reference in enumerate(references):
            loss_of(reference.model, index).backward()
            assert_same_state(ours[index], reference.model)
        assert session.committed_step == 2
