"""What must hold of track(), commit() and resume(), whoever serves them: as client_cases.py."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

import memd_client
from tests.unit.client_cases import BatchNorm, Mlp, leases_held, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session
    from tests.unit.client_cases import OpenSession

Scheduler = torch.optim.lr_scheduler.LRScheduler


class Kept:
    """Tracked state that is whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def batch_norm() -> BatchNorm:
    torch.manual_seed(0)
    return BatchNorm()


def assert_draws_equal(first: list[Any], second: list[Any]) -> None:
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)


def draw() -> list[Any]:
    return [random.random(), np.random.random(3), torch.randn(3).numpy()]


class TestCommit:
    def test_a_step_is_made_by_commit_and_has_torchs_bits(self, session: Session) -> None:
        model, reference = memd_client.offload(mlp(), session), mlp()
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        session.track(kept=Kept(1))
        for step in range(3):
            for trained, optimizer in ((model, ours), (reference, torchs)):
                loss = loss_of(trained, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session.committed_step == step
            session.commit(wait=step == 1)
            assert session.committed_step == step + 1
        for (name, parameter), (_, value) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            assert torch.equal(parameter, value), name
        assert leases_held(session) == 0

    def test_between_step_and_commit_what_was_taken_cannot_be_used(self, session: Session) -> None:
        model = memd_client.offload(mlp(), session)
        first = memd_client.AdamW(model.first.parameters())
        second = memd_client.AdamW(model.second.parameters())
        session.track(kept=Kept())
        loss_of(model).backward()
        first.step()
        assert torch.isfinite(model.second.weight).all()  # another optimizer's
        uses: dict[str, Callable[[], object]] = {
            "a module call": lambda: loss_of(model),
            "gather": lambda: memd_client.gather(model).__enter__(),
            "a value": lambda: model.first.weight + 1,
            "state_dict": model.state_dict,
            "get": lambda: session.get("layers.0.weight"),
            "a gradient": lambda: setattr(model.first.weight, "grad", torch.ones(64, 32)),
            "the optimizer's state": first.state_dict,
            "resume": session.resume,
        }
        for use in uses.values():
            with pytest.raises(memd_client.InvalidArgument, match=r"session\.commit\(\) first"):
                use()
        assert model.first.weight.grad is None
        first.zero_grad()
        first.step()  # has no gradients any more
        second.step()
        session.commit()
        assert session.committed_step == 1
        assert first.state_dict()["state"].keys() == {0, 1}
        assert second.state_dict()["state"].keys() == {0, 1}

    def test_between_step_and_commit_a_parameter_that_stays_cannot_be_used(
        self, session: Session
    ) -> None:
        model, reference = mlp(), mlp()
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        session.track(kept=Kept())
        for trained in (model, reference):
            loss_of(trained).backward()
        optimizer.step()
        torchs.step()
        weight = model.first.weight
        uses: dict[str, Callable[[], object]] = {
            "a module call": lambda: loss_of(model),
            "a value": lambda: weight + 1,
            "an average of weights": lambda: torch.zeros_like(weight).lerp_(weight, 0.1),
            "a change": lambda: weight.data.mul_(2),
            "state_dict": model.state_dict,
            "a constructor": lambda: torch.Tensor(weight),
            "another class": lambda: torch.Tensor._make_subclass(torch.Tensor, weight) + 1,
            "a transform": lambda: torch.func.vmap(torch.square)(weight),
        }
        for use in uses.values():
            with pytest.raises(memd_client.InvalidArgument, match=r"session\.commit\(\) first"):
                use()
        assert weight.shape == (64, 32)
        assert weight.grad is not None
        optimizer.zero_grad()
        session.commit()
        assert type(weight) is nn.Parameter
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, value)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_between_step_and_commit_a_scripted_module_that_stays_is_refused(
        self, session: Session
    ) -> None:
        """It runs without Python, and so without the class that its parameters have."""
        model = torch.jit.script(nn.Linear(3, 3))
        optimizer = memd_client.AdamW(model.parameters(), session=session)
        session.track(kept=Kept())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"session\.commit\(\) first"):
            model(torch.ones(2, 3))
        session.commit()
        model(torch.ones(2, 3))

    def test_a_parameter_that_stays_is_itself_again_where_no_commit_follows(
        self, session: Session
    ) -> None:
        model, untrained = nn.Linear(3, 3), nn.Linear(3, 3)
        model.load_state_dict(untrained.state_dict())
        optimizer = memd_client.AdamW(model.parameters(), session=session)
        session.track(kept=Kept())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        session.close()
        assert torch.equal(model.weight, untrained.weight)

    def test_a_view_of_a_parameter_that_stays_cannot_be_written_between_step_and_commit(
        self, session: Session
    ) -> None:
        model, reference = mlp(), mlp()
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        session.track(kept=Kept())
        view = model.first.weight.detach()
        for trained in (model, reference):
            loss_of(trained).backward()
        optimizer.step()
        torchs.step()
        view.mul_(0.5)
        with pytest.raises(memd_client.MemdError, match=r"was written through .*change is lost"):
            session.commit()
        session.commit()
        assert session.committed_step == 1
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, value)
        assert torch.equal(view, reference.first.weight)

    def test_a_second_step_over_new_gradients_waits_for_commit(self, session: Session) -> None:
        model = nn.Linear(3, 3)
        optimizer = memd_client.AdamW(model.parameters(), session=session)
        session.track(kept=Kept())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with pytest.raises(memd_client.InvalidArgument, match=r"a second step\(\).*commit"):
            optimizer.step()
        session.commit()
        optimizer.step()

    def test_parameters_that_stay_change_in_commit(self, session: Session) -> None:
        model, reference = mlp(), mlp()
        ours = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        session.track(kept=Kept())
        for step in range(2):
            for trained in (model, reference):
                loss_of(trained, step).backward()
            ours.step()
            ours.zero_grad()
            session.commit()
            torchs.step()
            torchs.zero_grad()
            assert torch.equal(model.first.weight, reference.first.weight)

    def test_a_commit_without_a_step_counts(self, job: OpenSession) -> None:
        with job() as session:
            session.track(kept=Kept({"a": 1}))
            session.commit()
            session.commit(wait=True)
            assert session.committed_step == 2
        with job() as session:
            session.track(kept=(kept := Kept()))
            assert session.resume() == 2
            assert kept.state == {"a": 1}

    def test_without_track_commit_makes_durable_and_does_not_count(self, session: Session) -> None:
        model = memd_client.offload(mlp(), session)
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        optimizer.step()
        session.put("x", torch.ones(3))
        session.commit(wait=True)
        assert session.committed_step == 1

    def test_closing_between_step_and_commit_drops_the_gradients(
        self, job: OpenSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        with job() as session:
            model = memd_client.offload(mlp(), session)
            optimizer = memd_client.AdamW(model.parameters())
            session.track(kept=Kept())
            session.commit()
            loss_of(model).backward()
            optimizer.step()
        assert "between step() and commit()" in caplog.text
        with job() as session:
            model = memd_client.offload(mlp(), session)
            assert session.committed_step == 1
            assert session.get("layers.0.weight").equal(mlp().first.weight)

    def test_what_is_not_plain_data_is_refused_by_its_path_and_nothing_is_lost(
        self, session: Session
    ) -> None:
        model = memd_client.offload(mlp(), session)
        optimizer = memd_client.AdamW(model.parameters())
        kept = Kept({"a": [1, {"f": print}]})
        session.track(sampler=kept)
        loss_of(model).backward()
        optimizer.step()
        with pytest.raises(
            memd_client.InvalidArgument,
            match=r"\['objects'\]\['sampler'\]\['a'\]\[1\]\['f'\] is a builtins\.builtin_function",
        ):
            session.commit()
        assert session.committed_step == 0
        kept.state = None
        session.commit()
        assert session.committed_step == 1

    def test_state_may_grow_and_shrink(self, job: OpenSession) -> None:
        sizes = (0, 5000, 3_000_000, 100_000, 3_100_000, 17)
        for commits in range(1, len(sizes) + 1):
            with job() as session:
                session.track(kept=(kept := Kept()))
                assert session.resume() == commits - 1
                if commits > 1:
                    assert kept.state == bytes(sizes[commits - 2])
                kept.state = bytes(sizes[commits - 1])
                session.commit()


class TestResume:
    def test_everything_comes_back(self, job: OpenSession) -> None:
        def make(session: Session) -> tuple[BatchNorm, torch.optim.Optimizer, Scheduler]:
            model = memd_client.offload(batch_norm(), session)
            optimizer = memd_client.AdamW(
                [
                    {"params": [model.second.weight], "lr": 1e-2},
                    {"params": [*model.first.parameters(), *model.norm.parameters()]},
                    {"params": [model.second.bias], "lr": torch.tensor(0.5)},
                ]
            )
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
            session.track(scheduler=scheduler, rng=True)
            return model, optimizer, scheduler

        with job() as session:
            model, optimizer, scheduler = make(session)
            assert session.resume() == 0
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                session.commit()
            model.eval()
            drawn, loss = draw(), loss_of(model)
            groups = [{**group, "params": None} for group in optimizer.param_groups]
            state = scheduler.state_dict()
        with job() as session:
            model, optimizer, scheduler = make(session)
            loss_of(model)  # changes batch norm's statistics
            draw()
            assert session.resume() == 3
            assert_draws_equal(draw(), drawn)
            model.eval()
            assert torch.equal(loss_of(model), loss)
            assert [{**group, "params": None} for group in optimizer.param_groups] == groups
            assert scheduler.state_dict() == state

    def test_settings_of_optimizers_win_over_what_objects_set_while_they_load(
        self, job: OpenSession
    ) -> None:
        class Warmup(Kept):
            """Begins with a learning rate of its own whenever it is loaded."""

            def __init__(self, optimizer: torch.optim.Optimizer) -> None:
                super().__init__("warm")
                self.optimizer = optimizer

            def load_state_dict(self, state: Any) -> None:
                super().load_state_dict(state)
                self.optimizer.param_groups[0]["lr"] = 9.0

        def make(session: Session) -> torch.optim.Optimizer:
            model = memd_client.offload(mlp(), session)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
            session.track(warmup=Warmup(optimizer))
            return optimizer

        with job() as session:
            optimizer = make(session)
            optimizer.param_groups[0]["lr"] = 0.25
            session.commit()
        with job() as session:
            optimizer = make(session)
            assert session.resume() == 1
            assert optimizer.param_groups[0]["lr"] == 0.25

    def test_an_object_that_draws_when_it_is_next_asked_leaves_generators_as_they_were(
        self, job: OpenSession
    ) -> None:
        class Loader(Kept):
            """Restores itself when it is next asked, and draws then: a StatefulDataLoader does."""

            is_due = False

            def load_state_dict(self, state: Any) -> None:
                super().load_state_dict(state)
                self.is_due = True

            def state_dict(self) -> Any:
                if self.is_due:
                    self.is_due = False
                    torch.rand(3)
                return super().state_dict()

        with job() as session:
            session.track(loader=Loader(), rng=True)
            session.commit()
            drawn = draw()
        with job() as session:
            loader = Loader()
            session.track(loader=loader, rng=True)
            assert session.resume() == 1
            loader.state_dict()
            assert_draws_equal(draw(), drawn)

    def test_a_buffer_comes_back_with_its_bits_where_only_the_sign_of_zero_changed(
        self, job: OpenSession
    ) -> None:
        def make(session: Session) -> nn.Module:
            module = nn.Linear(2, 2)
            module.register_buffer("offset", torch.zeros(3))
            session.track(kept=Kept())
            return memd_client.offload(module, session)

        with job() as session:
            module = make(session)
            session.commit()
            module.get_buffer("offset").neg_()
            session.commit()
        with job() as session:
            module = make(session)
            assert session.resume() == 2
            assert torch.signbit(module.get_buffer("offset")).all()

    def test_objects_that_differ_are_named_and_nothing_changes(self, job: OpenSession) -> None:
        with job() as session:
            session.track(one=Kept(1), two=Kept(2), rng=True)
            session.commit()
        with job() as session:
            one = Kept(0)
            session.track(one=one, three=Kept())
            torch.manual_seed(5)
            with pytest.raises(
                memd_client.InvalidArgument, match=r"then and not now: 'rng', 'two'.*then: 'three'"
            ):
                session.resume()
            assert one.state == 0
            assert torch.initial_seed() == 5
        with job() as session, pytest.raises(memd_client.InvalidArgument, match="'one', 'rng'"):
            session.resume()

    def test_other_groups_are_refused(self, job: OpenSession) -> None:
        with job() as session:
            model = memd_client.offload(mlp(), session)
            optimizer = memd_client.AdamW(model.parameters())
            session.track(kept=Kept())
            session.commit()
            del optimizer
        with job() as session:
            model = memd_client.offload(mlp(), session)
            optimizer = memd_client.AdamW(reversed(list(model.parameters())))
            session.track(kept=Kept())
            with pytest.raises(memd_client.InvalidArgument, match="other optimizers or groups"):
                session.resume()
            del optimizer

    def test_calls_in_the_wrong_order_are_refused(self, job: OpenSession) -> None:
        with job() as session:
            model = memd_client.offload(mlp(), session)
            optimizer = memd_client.AdamW(model.parameters())
            assert session.resume() == 0
            with pytest.raises(memd_client.InvalidArgument, match="called once"):
                session.resume()
            with pytest.raises(memd_client.InvalidArgument, match="call track\\(\\) before it"):
                session.track(kept=Kept())
            loss_of(model).backward()
            optimizer.step()
        with job() as session:
            session.track(kept=Kept())
            with pytest.raises(memd_client.InvalidArgument, match="commit 1 stored no tracked"):
                session.resume()
            session.commit()
        with job() as session:
            session.track(kept=Kept())
            with pytest.raises(
                memd_client.InvalidArgument, match=r"session\.resume\(\) before the first step"
            ):
                session.commit()
            assert session.resume() == 2
            session.commit()
            with pytest.raises(memd_client.InvalidArgument, match="called once"):
                session.resume()

    def test_without_track_it_counts_steps(self, job: OpenSession) -> None:
        for attempt in range(2):
            with job() as session:
                model = memd_client.offload(mlp(), session)
                optimizer = memd_client.AdamW(model.parameters())
                assert session.resume() == 2 * attempt
                for _ in range(2):
                    loss_of(model).backward()
                    optimizer.step()


class TestTrack:
    def test_what_has_no_state_is_refused(self, session: Session) -> None:
        model = memd_client.offload(mlp(), session)
        data = torch.arange(8)
        refused: dict[str, tuple[Any, str]] = {
            "sampler": (RandomSampler(range(8)), "StatefulDataLoader"),
            "loader": (DataLoader(data), "StatefulDataLoader"),  # type: ignore[arg-type]
            "generator": (torch.Generator(), "get_state"),
            "number": (3, r"int without state_dict\(\)"),
            "model": (model, "part of every commit"),
            "optimizer": (memd_client.AdamW(model.parameters()), "part of every commit"),
        }
        for name, (value, match) in refused.items():
            with pytest.raises(memd_client.InvalidArgument, match=match) as caught:
                session.track(kept=Kept(), **{name: value})
            assert repr(name) in str(caught.value)
        with pytest.raises(memd_client.InvalidArgument, match="rng=True"):
            session.track()
        session.track(kept=Kept())
        with pytest.raises(memd_client.InvalidArgument, match="'kept' already"):
            session.track(kept=Kept())
        session.track(more=Kept())
        session.commit()

    def test_counters_and_the_like_come_back(self, job: OpenSession) -> None:
        state: dict[Any, Any] = {
            1: Counter("aab"),
            "t": (1.5, None, -(1 << 70)),
            "array": np.arange(6.0).reshape(2, 3),
        }
        with job() as session:
            session.track(kept=Kept(state))
            session.commit()
        with job() as session:
            session.track(kept=(kept := Kept()))
            session.resume()
            assert kept.state.pop("array").tolist() == state.pop("array").tolist()
            assert kept.state == state
            assert type(kept.state[1]) is Counter


def train_averaged(
    model: nn.Module, averaged: AveragedModel, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    """In plain PyTorch, where the average follows each odd step."""
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 2:
            averaged.update_parameters(model)


def averaged_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class TestAfterCommit:
    def test_an_average_that_was_lost_is_made_again_with_torchs_bits(
        self, job: OpenSession
    ) -> None:
        """The process ends before or after the average of commits 3 and 4."""
        reference = mlp()
        expected = averaged_of(reference)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        ends = [(2, "before"), (3, "before"), (4, "after"), (7, "after")]
        resumed = []
        for end, moment in ends:
            with job() as session:
                model = memd_client.offload(mlp(), session)
                ours = memd_client.AdamW(model.parameters(), lr=1e-2)
                averaged = averaged_of(model)
                session.track(averaged=averaged)
                numbers: list[int] = []

                def average(
                    number: int,
                    averaged: AveragedModel = averaged,
                    model: nn.Module = model,
                    numbers: list[int] = numbers,
                    last: tuple[int, str] = (end, moment),
                ) -> None:
                    numbers.append(number)
                    if number % 2 and (number, "before") != last:
                        averaged.update_parameters(model)

                session.after_commit(average)
                start = session.resume()
                resumed.append(start)
                for step in range(start, end):
                    loss_of(model, step).backward()
                    ours.step()
                    ours.zero_grad()
                    session.commit(wait=step == 1)
                assert numbers == list(range(max(start, 1), end + 1))
        train_averaged(reference, expected, torchs, range(7))
        assert resumed == [0, 2, 3, 4]
        for (name, value), (_, other) in zip(
            averaged.state_dict().items(), expected.state_dict().items(), strict=True
        ):
            assert torch.equal(value, other), name

    def test_an_average_in_the_loop_is_refused(self, session: Session) -> None:
        model = memd_client.offload(mlp(), session)
        optimizer = memd_client.AdamW(model.parameters())
        averaged = averaged_of(model)
        session.track(ema=averaged)
        loss_of(model).backward()
        optimizer.step()
        with pytest.raises(memd_client.InvalidArgument, match=r"update_parameters\) after it"):
            averaged.update_parameters(model)
        assert averaged.n_averaged == 0
        with pytest.raises(memd_client.InvalidArgument, match=r"'ema'.*session\.after_commit"):
            session.commit()
        assert session.committed_step == 0

    def test_it_comes_before_resume(self, session: Session) -> None:
        session.resume()
        with pytest.raises(memd_client.InvalidArgument, match=r"call after_commit\(\) before"):
            session.after_commit(lambda _: None)

    def test_it_does_not_follow_a_commit_that_was_not_made(self, session: Session) -> None:
        kept = Kept(print)
        numbers: list[int] = []
        session.track(kept=kept)
        session.after_commit(numbers.append)
        with pytest.raises(memd_client.InvalidArgument, match="plain data"):
            session.commit()
        assert not numbers
        kept.state = None
        session.commit()
        session.commit(wait=True)
        assert numbers == [1, 2]
