"""Writes to parameters through tensors that share their bytes have torch's bits or are refused by
name. Run as `client_cases.py`.
"""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memd_client
from memd_client.errors import from_code
from tests.unit.client_cases import (
    WIDTH,
    Mlp,
    assert_same_gradients,
    assert_same_state,
    build,
    leases_held,
    loss_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session
    from tests.unit.client_cases import OpenSession


class Padded(nn.Module):
    """Sets a row of its weight to zero in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[0].zero_()
            self.bias.detach().clamp_(-0.5, 0.5)
        return functional.linear(inputs, self.weight, self.bias)


class Normed(nn.Module):
    """An embedding that shortens rows which are too long."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, max_norm=1.0)
        self.output = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs() * 8).long()[..., 0].clamp(max=63)
        output: torch.Tensor = self.output(self.embedding(tokens))
        return output


class Thresholded(nn.Module):
    """Forgets small weights, through a tensor with which torch counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.threshold = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.threshold:
            self.weight.data[self.weight.abs() < self.threshold] = 0.0
        return functional.linear(inputs, self.weight)


@torch.no_grad()
def view_of(weight: torch.Tensor) -> torch.Tensor:
    """All of it. Unlike `detach()`, it is a lease."""
    return weight[:].detach()


def write_detached(weight: torch.Tensor) -> object:
    view = weight.detach()
    view.mul_(0.5)
    return view


def write_and_forget(weight: torch.Tensor) -> object:
    weight.detach()[1].fill_(0.25)
    return None


@torch.no_grad()
def write_a_row(weight: torch.Tensor) -> object:
    row = weight[0]
    row.zero_()
    return row


def write_twice(weight: torch.Tensor) -> object:
    views = view_of(weight), view_of(weight)
    for view in views:
        view.add_(1.0)
    return views


WRITES = [write_detached, write_and_forget, write_a_row, write_twice]


def optimizers_of(*models: nn.Module) -> list[torch.optim.Optimizer]:
    """memd's for the first."""
    return [
        memd_client.AdamW(models[0].parameters(), lr=1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True),
    ]


class TestViews:
    @pytest.mark.parametrize("make", [Padded, Normed])
    def test_a_module_that_changes_its_parameters_trains_with_torchs_bits(
        self, session: Session, make: Callable[[], nn.Module]
    ) -> None:
        model, reference = memd_client.offload(build(make), session), build(make)
        optimizers = optimizers_of(model, reference)
        for index in range(3):
            for module in (model, reference):
                loss_of(module, index).backward()
                loss_of(module, index + 10).backward()
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_a_module_changes_its_parameter_after_a_view_that_is_kept_has(
        self, session: Session
    ) -> None:
        model, reference = memd_client.offload(build(Padded), session), build(Padded)
        views = [view_of(module.get_parameter("weight")) for module in (model, reference)]
        for view in views:
            view.mul_(0.5)
        for index in range(2):
            assert torch.equal(loss_of(model, index), loss_of(reference, index))
            assert torch.equal(*views)
        assert_same_state(model, reference)

    def test_a_change_in_forward_reaches_another_session_after_the_call(
        self, job: OpenSession
    ) -> None:
        with job() as session, job() as other:
            reference = build(Padded)
            model = memd_client.offload(build(Padded), session)
            before = reference.get_parameter("weight").detach().clone()
            seen = []

            def look(*_: Any) -> None:
                seen.append(other.get("weight").clone())

            model.register_forward_hook(look, prepend=True)  # before the call is over
            for module in (model, reference):
                loss_of(module)
            assert torch.equal(seen[0], before)
            assert_same_state(model, reference)
            assert not other.get("weight")[0].any()

    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("when", ["before forward", "before backward", "before step"])
    def test_what_is_written_through_a_view_is_the_value_as_in_torch(
        self,
        mlp: tuple[Mlp, Mlp],
        session: Session,
        write: Callable[[torch.Tensor], object],
        when: str,
    ) -> None:
        optimizers = optimizers_of(*mlp)
        outcomes = []
        for module, optimizer in zip(mlp, optimizers, strict=True):
            for index in range(2):
                views = write(module.first.weight) if when == "before forward" else None
                loss = loss_of(module, index)
                if when == "before backward":
                    # torch counts the change, and backward has saved only the other weight.
                    views = write(module.first.weight)
                loss.backward()
                if when == "before step":
                    views = write(module.first.weight)
                optimizer.step()
                optimizer.zero_grad()
                del views, loss
            outcomes.append(loss_of(module, 5).detach())
        assert torch.equal(outcomes[0], outcomes[1])
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_backward_over_a_value_that_was_written_through_a_view_is_torchs_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        for module in mlp:
            loss = loss_of(module)
            module.second.weight.detach().zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_what_is_written_while_a_step_is_in_flight_comes_after_it(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        optimizers = optimizers_of(*mlp)
        for module, optimizer in zip(mlp, optimizers, strict=True):
            loss_of(module).backward()
            optimizer.step()
            view = view_of(module.first.weight)  # of the updated value
            view[0].zero_()
            assert session.committed_step == 1  # waits for the step
            assert not view[0].any()
        assert_same_state(*mlp)

    @pytest.mark.parametrize("is_counted", [True, False])
    @pytest.mark.parametrize("is_kept", [True, False])
    def test_what_is_written_between_step_and_commit_is_refused_by_name(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, is_counted: bool, is_kept: bool
    ) -> None:
        model, reference = mlp
        session.track(rng=True)
        optimizers = optimizers_of(model, reference)
        loss_of(model).backward()
        view = view_of(model.first.weight)
        optimizers[0].step()
        (view if is_counted else view.data).zero_()
        if not is_kept:
            del view
        with pytest.raises(memd_client.MemdError, match=r"'layers\.0\.weight' was written.*commit"):
            session.commit()
        session.commit()
        loss_of(reference).backward()
        optimizers[1].step()
        assert_same_state(model, reference)
        if is_kept:
            assert torch.equal(view, reference.first.weight)
            del view
        assert leases_held(session) == 0

    def test_a_view_of_an_older_place_and_the_parameter_change_at_once(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        optimizers = optimizers_of(model, reference)
        for module in mlp:
            loss_of(module).backward()
        view = view_of(model.first.weight)
        for optimizer in optimizers:
            optimizer.step()  # the update has another place

        def change(module: nn.Module, inputs: Any) -> None:
            del inputs
            with torch.no_grad():
                module.get_parameter("weight").mul_(0.5)
            if module is model.first:
                view[0] = 1.0

        for module in mlp:
            module.first.register_forward_pre_hook(change)
        with pytest.raises(
            memd_client.MemdError, match=r"'layers\.0\.weight' was written.*the former is lost"
        ):
            model(torch.ones(1, WIDTH))
        reference(torch.ones(1, WIDTH))
        assert_same_state(model, reference)
        assert torch.equal(view, reference.first.weight)

    def test_an_older_view_is_written_while_the_parameter_is_gathered_for_writing(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizers = optimizers_of(model, reference)
        for module in mlp:
            loss_of(module).backward()
        view = view_of(model.first.weight)
        for optimizer in optimizers:
            optimizer.step()  # the update has another place

        def write_both(view: torch.Tensor) -> None:
            with memd_client.gather(model.first, write=True), torch.no_grad():
                model.first.weight.mul_(0.5)
                view[0] = 1.0

        with pytest.raises(
            memd_client.MemdError, match=r"'layers\.0\.weight' was written.*the former is lost"
        ):
            write_both(view)
        with torch.no_grad():
            reference.first.weight.mul_(0.5)
        assert torch.equal(view, reference.first.weight)
        with memd_client.gather(model.first, write=True), torch.no_grad():
            view.zero_()  # as the parameter, and then nothing is lost
            model.first.weight.zero_()
        with torch.no_grad():
            reference.first.weight.zero_()
        assert_same_state(*mlp)

    def test_a_view_of_a_module_that_is_gone_holds_nothing_once_it_is_gone_too(
        self, session: Session
    ) -> None:
        model = memd_client.offload(build(Mlp), session)
        view, other = (view_of(model.get_parameter(f"layers.{index}.weight")) for index in (0, 2))
        other.zero_()
        del other
        view.zero_()
        del model
        gc.collect()
        assert leases_held(session) == 1, "that of the view"
        del view
        gc.collect()
        assert leases_held(session) == 0

    @pytest.mark.parametrize("failing", ["the value", "the write"])
    def test_what_was_written_outlives_a_lease_that_fails(
        self,
        mlp: tuple[Mlp, Mlp],
        session: Session,
        monkeypatch: pytest.MonkeyPatch,
        failing: str,
    ) -> None:
        model, reference = mlp
        for module in mlp:
            view_of(module.first.weight).mul_(0.5)
        lease = session.leases.value
        left = [None] if failing == "the write" else []

        def value(*arguments: Any) -> torch.Tensor:
            if not left:
                raise from_code(5, "no room")
            left.pop()
            return lease(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(session.leases, "value", value)
            for _ in range(2):
                with pytest.raises(memd_client.CapacityError, match="no room"):
                    loss_of(model)
        assert torch.equal(loss_of(model), loss_of(reference))
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("is_viewed", [False, True])
    @pytest.mark.parametrize("failing", ["leases_of", "write"])
    def test_a_change_in_place_outlives_a_lease_that_fails(
        self,
        mlp: tuple[Mlp, Mlp],
        session: Session,
        monkeypatch: pytest.MonkeyPatch,
        failing: str,
        is_viewed: bool,
    ) -> None:
        model, reference = mlp
        owner = session.leases if failing == "write" else session.transaction.job
        view: torch.Tensor | None = None

        def fail(*_: object) -> None:
            raise from_code(5, "no room")

        with monkeypatch.context() as patch:
            with ExitStack() as gathered:
                gathered.enter_context(memd_client.gather(model.first))
                with torch.no_grad():
                    model.first.weight.mul_(0.5)
                if is_viewed:
                    view = view_of(model.first.weight)
                patch.setattr(owner, failing, fail)
                with pytest.raises(memd_client.CapacityError, match="no room"):
                    gathered.close()
            with pytest.raises(memd_client.CapacityError, match="no room"):
                loss_of(model)
        with torch.no_grad():
            reference.first.weight.mul_(0.5)
        assert torch.equal(loss_of(model), loss_of(reference))
        assert_same_state(model, reference)
        if view is not None:
            assert torch.equal(view, reference.first.weight)
            view = None
        gc.collect()
        assert leases_held(session) == 0

    def test_a_value_that_is_assigned_covers_what_was_written_before(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            view_of(module.first.weight).mul_(0.5)
            module.first.weight.data = torch.full_like(module.first.weight, 0.125)
        assert torch.equal(loss_of(mlp[0]), loss_of(mlp[1]))
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_a_view_that_is_kept_follows_the_parameter_and_may_be_written(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        optimizers = optimizers_of(*mlp)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module, optimizer in zip(mlp, optimizers, strict=True):
            weight = module.first.weight
            view = view_of(weight)
            loss_of(module).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(view, weight)
            view[2] = 1.0  # on top of the update
            loss_of(module, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(view, weight)
            with torch.no_grad():
                weight.mul_(2)
            assert torch.equal(view, weight)
            with memd_client.gather(module, write=True):
                weight.data[1] = 5.0
            assert torch.equal(view, weight)
            kept.append((view, view_of(weight)))
        for ours, theirs in zip(*kept, strict=True):
            assert torch.equal(ours, theirs)
        del kept, view, ours, theirs
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    def test_a_view_that_showed_an_update_and_dies_during_the_next_one_is_no_write(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        session.track(rng=True)
        optimizers = optimizers_of(model, reference)
        view = view_of(model.first.weight)
        for index in range(2):
            for module, optimizer in zip(mlp, optimizers, strict=True):
                loss_of(module, index).backward()
                optimizer.step()
                optimizer.zero_grad()
            if index == 1:
                del view
            session.commit()
        assert torch.equal(loss_of(model), loss_of(reference))
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_a_view_that_showed_an_update_may_get_its_older_bytes_back(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        optimizers = optimizers_of(*mlp)
        for module, optimizer in zip(mlp, optimizers, strict=True):
            view = view_of(module.first.weight)
            before = view.clone()
            loss_of(module).backward()
            optimizer.step()
            view.copy_(before)
            del view
            loss_of(module, 1)
        assert_same_state(*mlp)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("inference", [False, True])
    def test_what_torch_does_not_count_is_refused_by_name(
        self, session: Session, *, inference: bool
    ) -> None:
        torch.manual_seed(0)
        reference = Thresholded()
        model = memd_client.offload(copy.deepcopy(reference), session)
        optimizers = optimizers_of(model, reference)
        loss_of(model, 0).backward()
        model.threshold = 0.5
        with (
            pytest.raises(memd_client.MemdError, match=r"'weight' was written.*gather\(write=True"),
            torch.inference_mode() if inference else nullcontext(),
        ):
            loss_of(model, 1)
        model.threshold = 0.0
        assert leases_held(session) == 0
        # Nothing else has changed, the gradient included.
        loss_of(reference, 0).backward()
        assert_same_state(model, reference)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(model, reference)

    @pytest.mark.parametrize("use", ["step", "forward", "close"])
    def test_a_late_write_that_torch_does_not_count_is_refused_by_name(
        self, job: OpenSession, use: str
    ) -> None:
        session = job()
        torch.manual_seed(0)
        reference = Mlp()
        before = {name: value.clone() for name, value in reference.state_dict().items()}
        model = memd_client.offload(reference, session)
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        with memd_client.gather(model):
            data = model.first.weight.data
        data[3] = 7.0
        uses: dict[str, Callable[[], object]] = {
            "step": optimizer.step,
            "forward": lambda: loss_of(model),
            "close": session.close,
        }
        with pytest.raises(
            memd_client.MemdError, match=r"'layers\.0\.weight' was written.*gather\(write=True"
        ):
            uses[use]()
        if use == "close":
            session = job()
            assert torch.equal(session.get("layers.0.weight"), before["layers.0.weight"])
        else:
            assert torch.equal(data, before["layers.0.weight"]), "it is undone"
            assert torch.equal(model.first.weight.detach(), before["layers.0.weight"])
            assert session.committed_step == 0
            optimizer.step()
            assert session.committed_step == 1
        session.close()

    def test_a_view_that_was_got_by_name_is_refused_too(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        got = session.get("layers.0.weight")
        got.zero_()
        del got
        with pytest.raises(memd_client.MemdError, match=r"'layers\.0\.weight' was written"):
            loss_of(model)
        assert_same_state(model, reference)

    def test_what_is_written_to_a_tensor_that_was_got_stays_in_it(self, job: OpenSession) -> None:
        with job() as session, job() as other:
            session.put("x", torch.zeros(1000))
            got = session.get("x")
            got.add_(1)
            assert not session.get("x").any()
            assert not other.get("x").any()
            assert got.all()
            session.put("x", got)
            assert other.get("x").all()
            got.zero_()
            del got
            assert session.get("x").all()
            assert leases_held(session) == 0

    def test_views_of_modules_at_once_leave_nothing_behind(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """Weights and biases share pages."""
        model, reference = mlp
        views = [view_of(parameter) for parameter in model.parameters()]
        views[1].zero_()
        with torch.no_grad():
            reference.first.bias.zero_()
        assert torch.equal(loss_of(model), loss_of(reference))
        views[3].fill_(2.0)
        del views[2:]
        with torch.no_grad():
            reference.second.bias.fill_(2.0)
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)
        views.clear()
        assert_same_state(model, reference)
        assert leases_held(session) == 0
