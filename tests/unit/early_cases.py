"""What must hold of `step_in_backward=True`, whoever serves it: run as client_cases.py is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memd_client
from tests.unit.client_cases import (
    MODELS,
    Mlp,
    assert_same_gradients,
    assert_same_state,
    build,
    leases_held,
    loss_of,
)

if TYPE_CHECKING:
    from memd_client import Session


class Repeated(nn.Module):
    """One block that is used three times, each time in a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block = Mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x


def early(model: nn.Module, **settings: Any) -> memd_client.AdamW:
    return memd_client.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, step_in_backward=True, **settings
    )


def plain(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


class TestStepInBackward:
    @pytest.mark.parametrize("name", MODELS)
    def test_an_ordinary_loop_has_torchs_bits(self, session: Session, name: str) -> None:
        model, reference = memd_client.offload(build(MODELS[name]), session), build(MODELS[name])
        for module, optimizer in ((model, early(model)), (reference, plain(reference))):
            for step in range(4):
                loss_of(module, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert leases_held(session) == 0
        assert_same_state(model, reference)

    def test_a_module_that_is_checkpointed_several_times_has_torchs_bits(
        self, session: Session
    ) -> None:
        model = memd_client.offload(Repeated(use_reentrant=False), session)
        reference = Repeated(use_reentrant=False)
        reference.load_state_dict(model.state_dict())
        for module, optimizer in ((model, early(model)), (reference, plain(reference))):
            for step in range(3):
                loss_of(module, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model, reference)

    def test_a_gradient_of_each_reentrant_checkpoint_is_refused_with_what_to_do(
        self, session: Session
    ) -> None:
        model = memd_client.offload(Repeated(use_reentrant=True), session)
        optimizer = early(model)
        with pytest.raises(
            memd_client.InvalidArgument,
            match=r"second gradient of .*checkpoint.*use_reentrant=False",
        ):
            loss_of(model).backward()
        # Nothing of it is left in the way of a backward without them.
        optimizer.zero_grad()
        model.use_reentrant = False
        reference = Repeated(use_reentrant=False)
        reference.load_state_dict(model.state_dict())
        for module, its in ((model, optimizer), (reference, plain(reference))):
            loss_of(module).backward()
            its.step()
        assert_same_state(model, reference)

    def test_a_schedule_and_a_change_between_backward_and_step_count(
        self, gpt: tuple[nn.Module, nn.Module]
    ) -> None:
        model, reference = gpt
        for module, optimizer in ((model, early(model)), (reference, plain(reference))):
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
            for step in range(5):
                loss_of(module, step).backward()
                if step == 2:
                    optimizer.param_groups[0]["weight_decay"] = 0.3
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert_same_state(model, reference)

    def test_a_gradient_changed_through_grad_is_the_one_that_counts(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        for module, optimizer in ((model, early(model)), (reference, plain(reference))):
            for step in range(3):
                loss_of(module, step).backward()
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
                module.first.weight.grad = torch.full_like(module.first.weight, 0.25)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model, reference)

    def test_a_second_gradient_is_refused_and_zero_grad_makes_room_for_another(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer, expected = early(model), plain(reference)
        loss_of(model, 0).backward()
        with pytest.raises(
            memd_client.InvalidArgument,
            match=r"second gradient of 'layers\.\d\.\w+'.*accumulated.*zero_grad\(\).*"
            "step_in_backward=False",
        ):
            loss_of(model, 1).backward()
        # The first one is there as it was, and can be used.
        loss_of(reference, 0).backward()
        assert_same_gradients(model, reference)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        loss_of(model, 2).backward()
        optimizer.zero_grad()
        for each, its in ((model, optimizer), (reference, expected)):
            loss_of(each, 3).backward()
            its.step()
        assert session.committed_step == 2
        assert_same_state(model, reference)

    @pytest.mark.parametrize("has_stepped", [True, False])
    def test_zeros_that_somebody_has_looked_at_are_no_first_gradient(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, has_stepped: bool
    ) -> None:
        model, reference = mlp
        optimizer, expected = early(model), plain(reference)
        for each, its in ((model, optimizer), (reference, expected)):
            for index in range(3):
                loss_of(each, index).backward()
                if has_stepped:
                    its.step()
                its.zero_grad(set_to_none=False)
                for parameter in each.parameters():
                    assert parameter.grad is not None
                    assert not parameter.grad.any()
            loss_of(each, 3).backward()
            its.step()
        assert session.committed_step == (4 if has_stepped else 1)
        assert_same_state(model, reference)
        loss_of(model, 4).backward()
        with pytest.raises(memd_client.InvalidArgument, match="second gradient of"):
            loss_of(model, 5).backward()

    def test_a_backward_that_fails_half_way_is_done_again_after_zero_grad(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer, expected = early(model), plain(reference)

        def fail(gradient: torch.Tensor) -> None:
            raise RuntimeError("half way")

        hidden: list[torch.Tensor] = []
        watch = model.layers[1].register_forward_hook(lambda *args: hidden.append(args[2]))
        loss = loss_of(model)
        hidden[0].register_hook(fail)
        with pytest.raises(RuntimeError, match="half way"):
            loss.backward()
        watch.remove()
        assert model.second.weight.grad is not None
        optimizer.zero_grad()
        assert session.committed_step == 0
        for each, its in ((model, optimizer), (reference, expected)):
            loss_of(each).backward()
            its.step()
        assert_same_state(model, reference)

    def test_what_changes_gradients_after_backward_is_refused(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        optimizer = early(model)
        loss_of(model).backward()
        with pytest.raises(memd_client.InvalidArgument, match=r"clip_grad_norm_.*=False"):
            optimizer.clip_grad_norm_(1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        with pytest.raises(memd_client.InvalidArgument, match=r"GradScaler.*=False"):
            scaler.step(optimizer)
        optimizer.step()

    def test_commit_closes_the_step_that_backward_began(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer, expected = early(model), plain(reference)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        its_scheduler = torch.optim.lr_scheduler.StepLR(expected, 2)
        session.track(scheduler=scheduler)
        for step in range(5):
            for each, its in ((model, optimizer), (reference, expected)):
                loss_of(each, step).backward()
                its.step()
                its.zero_grad()
            scheduler.step()
            its_scheduler.step()
            session.commit()
        assert session.committed_step == 5
        assert_same_state(model, reference)

    def test_parameters_that_stay_in_the_process_are_updated_by_the_step(
        self, session: Session
    ) -> None:
        model, reference = build(Mlp), build(Mlp)
        for each, its in ((model, early(model, session=session)), (reference, plain(reference))):
            for step in range(3):
                loss_of(each, step).backward()
                its.step()
                its.zero_grad()
        session.commit(wait=True)
        assert_same_state(model, reference)
