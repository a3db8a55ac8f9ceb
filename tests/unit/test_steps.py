"""Steps of which nobody knows at first what became of them: the daemon is faked."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client.connection.reattach import RepeatedStep
from memd_client.errors import from_code
from memd_proto.v1 import session_pb2
from tests.unit.backward_cases import RAISED, Recipe, hook
from tests.unit.client_cases import Mlp, assert_same_state, batch, build, loss_of
from tests.unit.fake_session import FakeDaemon
from tests.unit.track_cases import Kept
from tests.unit.view_cases import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

ROOT = Path(__file__).parents[2]
NOT_FOUND, PERMISSION, DEADLINE, UNAVAILABLE = 2, 4, 9, 10


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def session(daemon: FakeDaemon) -> Session:
    return daemon.session()


def lost(code: int = UNAVAILABLE) -> Exception:
    return from_code(code, "the daemon has not come back")


class Pair:
    """One model in memd, or beside it (`stays`), and a twin that torch trains."""

    def __init__(self, session: Session, *, stays: bool = False) -> None:
        self.session = session
        self.model, self.twin = build(Mlp), build(Mlp)
        if not stays:
            memd_client.offload(self.model, session)
        self.ours = memd_client.AdamW(self.model.parameters(), lr=1e-2, session=session)
        self.torchs = torch.optim.AdamW(self.twin.parameters(), lr=1e-2, fused=True)

    def backward(self, step: int) -> None:
        loss_of(self.model, step).backward()
        loss_of(self.twin, step).backward()

    def step_twin(self) -> None:
        self.torchs.step()
        self.torchs.zero_grad()

    def expect_the_same(self, steps: int) -> None:
        assert self.session.committed_step == steps
        assert_same_state(self.model, self.twin)


class TestUnknownOutcome:
    @pytest.mark.parametrize("code", [DEADLINE, UNAVAILABLE, PERMISSION, NOT_FOUND])
    def test_a_step_without_an_answer_is_asked_for_again_and_no_gradient_is_lost(
        self, daemon: FakeDaemon, session: Session, code: int
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        pair.ours.step()
        pair.step_twin()
        daemon.lost_answers += [lost(code), lost(code)]
        for _ in range(2):
            with pytest.raises(
                type(lost(code)), match="step 1: it is not known whether it is committed"
            ):
                loss_of(pair.model, 1)
        pair.ours.zero_grad()
        pair.backward(1)
        pair.ours.step()
        pair.step_twin()
        pair.expect_the_same(2)
        assert daemon.calls.count("step") == 2

    def test_one_that_was_not_made_is_made_when_it_is_asked_for_again(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        pair.ours.step()
        pair.step_twin()
        daemon.step_failures.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            _ = session.committed_step
        pair.expect_the_same(1)

    def test_one_that_fails_when_it_is_asked_for_again_gives_its_gradients_back(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        pair.ours.step()
        pair.step_twin()
        daemon.step_failures += [lost(), from_code(5, "the disk is full")]
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            _ = session.committed_step
        with pytest.raises(memd_client.CapacityError, match="step 1 was not committed"):
            _ = session.committed_step
        pair.ours.step()
        pair.expect_the_same(1)

    def test_gradients_that_come_back_take_the_place_of_zeros(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        pair.ours.step()
        pair.step_twin()
        pair.model.zero_grad(set_to_none=False)
        daemon.step_failures.append(from_code(5, "the disk is full"))
        with pytest.raises(memd_client.CapacityError, match="step 1 was not committed"):
            _ = session.committed_step
        pair.ours.step()
        pair.expect_the_same(1)

    def test_a_commit_whose_outcome_is_learned_later_is_followed_once(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        session.track(kept=Kept(1))
        numbers: list[int] = []
        session.after_commit(numbers.append)
        pair.backward(0)
        pair.ours.step()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            session.commit()
        pair.ours.zero_grad()
        pair.backward(1)  # its forward learns that the commit was made
        pair.ours.step()
        assert numbers == [1]
        session.commit()
        assert numbers == [1, 2]

    def test_a_commit_that_is_repeated_counts_once_though_a_view_is_kept(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        session.track(kept=Kept(1))
        numbers: list[int] = []
        session.after_commit(numbers.append)
        view = view_of(pair.model.get_parameter("layers.0.weight"))
        pair.backward(0)
        pair.ours.step()
        pair.step_twin()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            session.commit()
        session.commit()
        assert numbers == [1]
        pair.expect_the_same(1)
        assert torch.equal(view, pair.twin.get_parameter("layers.0.weight"))

    def test_gradients_from_before_a_step_are_refused_though_a_view_is_kept(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        """The view is of another model of the session."""
        other = memd_client.offload(build(Mlp), session)
        view = view_of(other.get_parameter("layers.0.weight"))
        pair = Pair(session, stays=True)
        pair.backward(0)
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            pair.ours.step()
        pair.step_twin()
        pair.ours.zero_grad()
        loss_of(pair.model, 1).backward()  # with the values before the step
        with pytest.raises(memd_client.InvalidArgument, match=r"call zero_grad\(\)"):
            pair.ours.step()
        pair.expect_the_same(1)
        del view

    def of_two(self, session: Session) -> tuple[Mlp, list[memd_client.AdamW]]:
        """A model whose layers stay in this process, and an optimizer for each."""
        model = build(Mlp)
        assert isinstance(model, Mlp)
        return model, [
            memd_client.AdamW(
                [(f"{name}.{key}", p) for key, p in layer.named_parameters()],
                lr=1e-2,
                session=session,
            )
            for name, layer in (("first", model.first), ("second", model.second))
        ]

    def twin_of_two(self) -> tuple[Mlp, list[torch.optim.Optimizer]]:
        """The same in plain PyTorch."""
        twin = build(Mlp)
        assert isinstance(twin, Mlp)
        layers = (twin.first, twin.second)
        return twin, [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in layers]

    def lose_first_step(self, daemon: FakeDaemon, model: Mlp, optimizer: memd_client.AdamW) -> None:
        """Its answer is lost, and gradients are computed with the first layer's old values."""
        loss_of(model).backward()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            optimizer.step()
        model.zero_grad()
        loss_of(model, 1).backward()

    @pytest.mark.parametrize(
        "look",
        [
            lambda session, _: session.committed_step,
            lambda session, _: session.durable_step,
            lambda _, optimizer: optimizer.state_dict(),
        ],
        ids=["committed_step", "durable_step", "state_dict()"],
    )
    def test_a_look_that_learns_of_new_values_that_stay_says_so_once(
        self,
        daemon: FakeDaemon,
        session: Session,
        look: Callable[[Session, memd_client.AdamW], object],
    ) -> None:
        model, ours = self.of_two(session)
        twin, torchs = self.twin_of_two()
        self.lose_first_step(daemon, model, ours[0])
        with pytest.raises(
            memd_client.MemdError, match=r"step 1, for which an error.*is committed.*zero_grad\(\)"
        ):
            look(session, ours[0])
        look(session, ours[0])
        model.zero_grad()
        loss_of(twin).backward()
        torchs[0].step()
        twin.zero_grad()
        for its, optimizers in ((model, ours), (twin, torchs)):
            loss_of(its, 1).backward()
            optimizers[1].step()
        assert session.committed_step == 2
        assert_same_state(model, twin)

    def test_gradients_from_before_another_optimizers_step_are_refused(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        model, ours = self.of_two(session)
        twin, torchs = self.twin_of_two()
        self.lose_first_step(daemon, model, ours[0])
        with pytest.raises(memd_client.InvalidArgument, match=r"'first.* computed with the values"):
            ours[1].step()
        model.zero_grad()
        loss_of(twin).backward()
        torchs[0].step()
        twin.zero_grad()
        for its, optimizers in ((model, ours), (twin, torchs)):
            loss_of(its, 1).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert session.committed_step == 3
        assert_same_state(model, twin)

    def half(self, daemon: FakeDaemon, session: Session) -> tuple[Mlp, memd_client.AdamW]:
        """A model of which the second layer is offloaded, after a step without an answer."""
        model = build(Mlp)
        assert isinstance(model, Mlp)
        memd_client.offload(model.second, session)
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2)
        loss_of(model).backward()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            optimizer.step()
        return model, optimizer

    def test_a_lease_that_learns_of_new_values_that_stay_says_so_once(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        model, optimizer = self.half(daemon, session)
        optimizer.zero_grad()
        with pytest.raises(
            memd_client.MemdError, match=r"step 1, for which an error.*is committed.*zero_grad\(\)"
        ):
            loss_of(model, 1)  # its first layer has computed with the values before the step
        twin = build(Mlp)
        torchs = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
        loss_of(twin).backward()
        torchs.step()
        for its, kind in ((model, optimizer), (twin, torchs)):
            kind.zero_grad()
            loss_of(its, 1).backward()
            kind.step()
        assert session.committed_step == 2
        assert_same_state(model, twin)

    def test_gradients_from_before_a_step_are_refused_though_zeros_have_to_be_stored(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        """Zeros come into memd under a lease, which would be the first to learn of the step."""
        model, optimizer = self.half(daemon, session)
        model.zero_grad(set_to_none=False)
        model.first(batch(model, 1)).square().mean().backward()  # with the values before the step
        with pytest.raises(memd_client.InvalidArgument, match="computed with the values from"):
            optimizer.step()
        assert session.committed_step == 1

    def test_what_is_tracked_is_stored_once(self, daemon: FakeDaemon, session: Session) -> None:
        kept = Kept(1)
        pair = Pair(session)
        session.track(kept=kept)
        pair.backward(0)
        pair.ours.step()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            session.commit(wait=True)
        pair.step_twin()
        # The whole step over again, as a loop would that tries it once more.
        pair.ours.step()
        session.commit(wait=True)
        assert session.committed_step == 1
        kept.state = 2
        pair.backward(1)
        pair.ours.step()
        session.commit()
        pair.step_twin()
        pair.expect_the_same(2)
        again = daemon.session()
        again.track(kept=(found := Kept()))
        model = memd_client.offload(build(Mlp), again)
        optimizer = memd_client.AdamW(model.parameters())
        assert again.resume() == 2
        assert found.state == 2
        del optimizer

    @pytest.mark.parametrize("tracks", [False, True])
    def test_gradients_that_stay_are_taken_once_though_step_is_called_again(
        self, daemon: FakeDaemon, session: Session, tracks: bool
    ) -> None:
        pair = Pair(session, stays=True)
        if tracks:
            session.track(kept=Kept())

        def step() -> None:
            pair.ours.step()
            if tracks:
                session.commit()

        pair.backward(0)
        daemon.lost_answers += [lost(), lost()]
        for _ in range(2):
            with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
                step()
        step()
        pair.torchs.step()
        pair.expect_the_same(1)
        step()  # once it is known, the same gradients are another step's
        pair.torchs.step()
        pair.expect_the_same(2)

    def test_gradients_from_values_before_a_step_that_was_made_are_refused(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session, stays=True)
        pair.backward(0)
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            pair.ours.step()
        pair.step_twin()
        pair.ours.zero_grad()
        loss_of(pair.model, 1).backward()  # with the values before the step
        with pytest.raises(memd_client.InvalidArgument, match=r"call zero_grad\(\)"):
            pair.ours.step()
        pair.expect_the_same(1)
        pair.ours.zero_grad()
        pair.backward(1)
        pair.ours.step()
        pair.step_twin()
        pair.expect_the_same(2)

    def test_closing_asks_once_more_and_says_that_it_is_not_known(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        pair.ours.step()
        daemon.lost_answers += [lost(), lost()]
        with pytest.raises(memd_client.DaemonUnavailable, match="not known"):
            _ = session.committed_step
        with pytest.raises(memd_client.DaemonUnavailable, match="after connecting again"):
            session.close()
        assert daemon.calls[-2:] == ["detach", "close"]
        assert session.committed_step == 0, "a closed session asks nobody"
        assert daemon.session().committed_step == 1


class TestInBackward:
    """Steps that are called in backward, which is over when they are sent."""

    def recipe(self, session: Session, *, stays: bool = False) -> tuple[Recipe, Recipe]:
        model = build(Mlp)
        if not stays:
            memd_client.offload(model, session)
        return Recipe(model, session), Recipe(build(Mlp), None)

    @pytest.mark.parametrize("stays", [False, True])
    def test_a_step_that_cannot_be_sent_at_the_end_is_not_made(
        self,
        daemon: FakeDaemon,
        session: Session,
        stays: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        ours, torchs = self.recipe(session, stays=stays)

        def refuse(request: session_pb2.StepRequest) -> Any:
            del request
            raise RuntimeError("can't create new thread")

        with monkeypatch.context() as patch:
            patch.setattr(daemon, "begin_step", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                loss_of(ours.model).backward()
        assert session.committed_step == 0
        with pytest.raises(memd_client.InvalidArgument, match=RAISED):
            loss_of(ours.model)
        ours.zero_grad()
        for recipe in (ours, torchs):
            loss_of(recipe.model).backward()
        assert session.committed_step == 1
        assert_same_state(ours.model, torchs.model)

    def test_one_without_an_answer_is_asked_for_by_the_next_use(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        recipes = self.recipe(session)
        loss_of(recipes[0].model).backward()
        loss_of(recipes[1].model).backward()
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable, match="step 1: it is not known"):
            loss_of(recipes[0].model, 1)
        for recipe in recipes:
            loss_of(recipe.model, 1).backward()
        assert session.committed_step == 2
        assert daemon.calls.count("step") == 2
        assert_same_state(recipes[0].model, recipes[1].model)

    def test_gradients_of_values_from_before_a_late_answer_are_refused_whichever_comes_first(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        model = build(Mlp)
        assert isinstance(model, Mlp)
        memd_client.offload(model.second, session)
        ours = Recipe(model, session)
        daemon.lost_answers += [lost(), lost()]
        with pytest.raises(memd_client.DaemonUnavailable, match="it is not known"):
            loss_of(model).backward()
        with pytest.raises(memd_client.DaemonUnavailable, match="it is not known"):
            loss_of(model, 1)
        daemon.lost_answers.clear()
        # This forward used none of memd's values, so that the first step learns of the answer.
        loss = model.first(batch(model, 1)).square().mean()
        with pytest.raises(memd_client.InvalidArgument, match="computed with the values from"):
            loss.backward()
        ours.zero_grad()
        assert session.committed_step == 1

    def test_a_late_answer_that_a_later_call_of_step_learns_counts_for_its_gradients(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        """Another thread makes a step, whose answer is lost, while backward has one open."""
        model = build(Mlp)
        assert isinstance(model, Mlp)
        first, second = (
            memd_client.AdamW(
                [(f"{name}.{key}", p) for key, p in layer.named_parameters()], session=session
            )
            for name, layer in (("first", model.first), ("second", model.second))
        )
        loss_of(model).backward()
        second.zero_grad()
        errors: list[str] = []

        def step_and_lose_the_answer() -> None:
            daemon.lost_answers.append(lost())
            with pytest.raises(memd_client.DaemonUnavailable) as lost_one:
                first.step()
            errors.append(str(lost_one.value))

        def step_second(_: torch.Tensor) -> None:
            second.step()
            thread = threading.Thread(target=step_and_lose_the_answer)
            thread.start()
            thread.join()

        hook([model.second.weight], step_second)
        hook([model.first.weight], lambda _: first.step())
        with pytest.raises(memd_client.InvalidArgument, match="computed with the values from"):
            loss_of(model, 1).backward()
        assert "it is not known" in errors[0]
        first.zero_grad()
        second.zero_grad()
        assert session.committed_step == 1

    def test_slots_are_reserved_ahead_though_each_gradient_is_stepped_at_once(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        ours, _ = self.recipe(session)
        loss_of(ours.model).backward()
        assert not daemon.asked_ahead
        loss_of(ours.model).backward()
        asked = [name for names in daemon.asked_ahead for name in names]
        assert len(asked) == len(set(asked)) >= 3


class TestValuesThatStay:
    @pytest.mark.parametrize("tracks", [False, True])
    @pytest.mark.parametrize("failing", [0, 1, 3])
    def test_what_could_not_be_put_in_place_is_put_there_by_the_next_use(
        self,
        daemon: FakeDaemon,
        session: Session,
        monkeypatch: pytest.MonkeyPatch,
        tracks: bool,
        failing: int,
    ) -> None:
        pair = Pair(session, stays=True)
        if tracks:
            session.track(kept=Kept())

        def step() -> None:
            pair.ours.step()
            if tracks:
                session.commit()

        pair.backward(0)
        with monkeypatch.context() as patch:
            patch.setattr(session.leases, "value", FailingValues(daemon, session, failing))
            with pytest.raises(
                memd_client.CapacityError,
                match=f"step 1 is committed; new values are not in place yet for {4 - failing} ",
            ):
                step()
            with pytest.raises(memd_client.CapacityError, match="step 1 is committed"):
                _ = session.committed_step
        step()  # over the same gradients: the step is made already
        pair.step_twin()
        pair.ours.zero_grad()
        pair.expect_the_same(1)
        pair.backward(1)
        step()
        pair.step_twin()
        pair.expect_the_same(2)

    def test_a_lease_that_puts_the_rest_in_place_says_only_what_is_so(
        self, daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The outcome of the step was known all the time."""
        model = build(Mlp)
        assert isinstance(model, Mlp)
        memd_client.offload(model.second, session)
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2)
        loss_of(model).backward()
        with monkeypatch.context() as patch:
            patch.setattr(session.leases, "value", FailingValues(daemon, session, 1))
            with pytest.raises(memd_client.CapacityError, match="committed; new values are not in"):
                optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(memd_client.MemdError, match="all in place only now") as error:
            loss_of(model, 1)
        assert "not known" not in str(error.value)
        loss_of(model, 1)

    def test_an_interrupted_step_is_finished_by_the_next_use(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session, stays=True)
        pair.backward(0)
        daemon.lost_answers.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            pair.ours.step()
        pair.ours.step()
        pair.step_twin()
        pair.expect_the_same(1)

    def test_a_parameter_that_is_gone_holds_nobody_up(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session, stays=True)
        pair.backward(0)
        daemon.lost_answers.append(lost())
        with pytest.raises(memd_client.DaemonUnavailable):
            pair.ours.step()
        del pair.model, pair.ours
        gc.collect()
        assert session.committed_step == 1


class FailingValues:
    """Leases of values, of which there is no room for those after the first `left` of a step that
    is committed."""

    def __init__(self, daemon: FakeDaemon, session: Session, left: int) -> None:
        self.daemon = daemon
        self.lease = session.leases.value
        self.left = left

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if self.daemon.committed_step:
            if not self.left:
                raise from_code(5, "no room")
            self.left -= 1
        return self.lease(*arguments)


class TestDisk:
    FULL = "job fake is at step 1 in memory, but the disk is full"

    def test_a_step_in_memory_alone_counts_and_its_error_is_told_once(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session)
        pair.backward(0)
        daemon.disk_error = self.FULL
        pair.ours.step()
        pair.step_twin()
        with pytest.raises(
            memd_client.NotDurable,
            match=r"step 1 is committed in memory.*step 0 is on disk.*is full",
        ):
            loss_of(pair.model, 1)
        with pytest.raises(memd_client.CapacityError, match="is full"):
            session.commit(wait=True)
        for step in range(1, 4):
            if step == 3:
                daemon.disk_error = ""
            pair.backward(step)
            pair.ours.step()
            pair.step_twin()
        pair.expect_the_same(4)
        assert session.durable_step == 4
        daemon.disk_error = self.FULL
        pair.backward(4)
        pair.ours.step()
        with pytest.raises(memd_client.NotDurable, match="step 5"):
            _ = session.committed_step

    @pytest.mark.parametrize("stays", [False, True])
    def test_a_commit_that_is_waited_for_says_it_every_time_and_counts_once(
        self, daemon: FakeDaemon, session: Session, stays: bool
    ) -> None:
        pair = Pair(session, stays=stays)
        session.track(kept=Kept())
        daemon.disk_error = self.FULL
        for step in range(2):
            pair.backward(step)
            pair.ours.step()
            with pytest.raises(memd_client.NotDurable, match=f"step {step + 1} is committed"):
                session.commit(wait=True)
            pair.step_twin()
            pair.ours.zero_grad()
            for _ in range(2):
                with pytest.raises(memd_client.CapacityError, match="is full"):
                    session.commit(wait=True)
        daemon.disk_error = ""
        session.commit(wait=True)
        pair.expect_the_same(2)
        assert session.durable_step == 2
        session.commit()
        assert session.committed_step == 3

    @pytest.mark.parametrize("is_retried", [False, True])
    def test_a_commit_that_the_disk_failed_is_followed_once(
        self, daemon: FakeDaemon, session: Session, *, is_retried: bool
    ) -> None:
        pair = Pair(session)
        session.track(kept=Kept())
        numbers: list[int] = []
        session.after_commit(numbers.append)
        daemon.disk_error = self.FULL
        pair.backward(0)
        pair.ours.step()
        with pytest.raises(memd_client.NotDurable):
            session.commit()
        if is_retried:
            session.commit()
        assert numbers == [1]
        daemon.disk_error = ""
        pair.backward(1)
        pair.ours.step()
        session.commit()
        assert numbers == [1, 2]

    def test_gradients_that_stay_are_taken_once_where_the_disk_failed(
        self, daemon: FakeDaemon, session: Session
    ) -> None:
        pair = Pair(session, stays=True)
        pair.backward(0)
        daemon.disk_error = self.FULL
        with pytest.raises(memd_client.NotDurable):
            pair.ours.step()
        pair.ours.step()
        pair.step_twin()
        pair.expect_the_same(1)

    def test_closing_tries_the_disk_again(self, daemon: FakeDaemon) -> None:
        def closed_after_a_step(disk_error: str) -> None:
            session = daemon.session()
            pair = Pair(session)
            pair.backward(0)
            daemon.disk_error = self.FULL
            pair.ours.step()
            loss: list[torch.Tensor] = []
            with pytest.raises(memd_client.NotDurable):
                loss.append(loss_of(pair.model, 0))
            daemon.disk_error = disk_error
            session.close()

        closed_after_a_step("")
        assert daemon.durable_step == daemon.committed_step == 1
        with pytest.raises(memd_client.CapacityError, match="is full"):
            closed_after_a_step(self.FULL)


def test_a_sync_does_not_take_a_session_past_anothers_steps(
    daemon: FakeDaemon, session: Session
) -> None:
    other = daemon.session()
    pair = Pair(session)
    model = memd_client.offload(build(Mlp), other)
    optimizer = memd_client.AdamW(model.parameters())
    pair.backward(0)
    loss_of(model).backward()
    optimizer.step()
    assert other.committed_step == 1
    session.put("x", torch.ones(2))
    session.commit()
    assert (session.committed_step, session.durable_step) == (0, 1)
    pair.ours.step()
    with pytest.raises(memd_client.SessionFenced, match=r"step 1 was not acknowledged.*at step 1"):
        _ = session.committed_step
    assert daemon.committed_step == 1


_EXITS = """
import atexit
import torch
import memd_client
from tests.unit.client_cases import Mlp, build, loss_of
from tests.unit.fake_session import FakeDaemon

class Daemon(FakeDaemon):
    def _make_step(self, request):
        super()._make_step(request)
        print("step made")

# Sets hold them in any order: the steps of three sessions, one in the middle of which fails.
daemons = [Daemon() for _ in range(3)]
sessions = []
for daemon in daemons:
    atexit.register(print, "daemon stopped")
    sessions.append(daemon.session())
optimizers = []
for session in sessions:
    model = memd_client.offload(build(Mlp), session)
    optimizers.append(memd_client.AdamW(model.parameters()))
    loss_of(model).backward()
    optimizers[-1].step()
daemons[1].step_failures.append(RuntimeError("can't create new thread at interpreter shutdown"))
"""


def test_a_process_that_ends_sees_its_steps_through_before_its_daemons_stop() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _EXITS], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["step made"] * 2 + ["daemon stopped"] * 3
    assert "can't create new thread" in answer.stderr


class FakeControl:
    """Answers of a daemon, in their order; an exception is raised."""

    def __init__(self, *answers: Exception | session_pb2.StepResponse) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    def begin_step(self, request: session_pb2.StepRequest) -> FakeControl:
        self.calls.append(f"begin {request.step}")
        return self

    def step(self, request: session_pb2.StepRequest) -> session_pb2.StepResponse:
        self.calls.append(f"wait {request.step}")
        return self.result()

    def result(self) -> session_pb2.StepResponse:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeReattach:
    epoch = 0

    def calling(self, call: Callable[[], Any], *, epoch: int) -> Any:
        assert epoch == self.epoch
        return call()


@pytest.mark.parametrize("code", [DEADLINE, UNAVAILABLE, PERMISSION, NOT_FOUND])
def test_a_step_without_an_answer_is_sent_again_without_a_thread(code: int) -> None:
    control = FakeControl(lost(code), lost(code), session_pb2.StepResponse(committed_step=7))
    request = session_pb2.StepRequest(step=7)
    call = RepeatedStep(control, FakeReattach(), request)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(type(lost(code))):
            call.result()
    for _ in range(2):
        assert call.result().committed_step == 7
    assert control.calls == ["begin 7", "wait 7", "wait 7"]
