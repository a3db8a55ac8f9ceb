"""A step consumes gradients, which plain PyTorch keeps until zero_grad(): run as client_cases.py
is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from tests.unit.client_cases import Mlp, assert_same_state, build, loss_of
from tests.unit.track_cases import Kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

WARNED = "step() consumes gradients"


def both(session: Session) -> tuple[Mlp, Mlp, memd_client.AdamW, torch.optim.AdamW]:
    model, reference = memd_client.offload(build(Mlp), session), build(Mlp)
    assert isinstance(model, Mlp)
    assert isinstance(reference, Mlp)
    return (
        model,
        reference,
        memd_client.AdamW(model.parameters()),
        torch.optim.AdamW(reference.parameters(), fused=True),
    )


def by_attribute(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zeros_by_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model.zero_grad(set_to_none=False)


def zeros_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del model
    optimizer.zero_grad(set_to_none=False)


ZEROS = pytest.mark.parametrize("zero", [zeros_by_module, zeros_by_optimizer])


class TestZeroGrad:
    def test_a_loop_without_it_is_told_once_that_torch_adds(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, _, optimizer, _ = both(session)
        for index in range(4):
            loss_of(model, index).backward()
            optimizer.step()
        assert [record.getMessage() for record in caplog.records if WARNED in record.message] == [
            f"job {session.statistics().job!r}: step() consumes gradients, so this step does not "
            "add the gradient of 'layers.0.weight' that the last step took, and plain PyTorch "
            "does; call zero_grad() after each step() to have the same numbers"
        ]

    @pytest.mark.parametrize(
        "zero",
        [
            lambda model, optimizer: optimizer.zero_grad(),
            lambda model, optimizer: model.zero_grad(),
            lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
            by_attribute,
        ],
        ids=["optimizer", "module", "zeros", "attribute"],
    )
    def test_every_way_to_drop_gradients_is_seen(
        self,
        session: Session,
        zero: Callable[[nn.Module, torch.optim.Optimizer], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        model, reference, optimizer, expected = both(session)
        for index in range(3):
            for module, each in ((model, optimizer), (reference, expected)):
                zero(module, each)
                loss_of(module, index).backward()
                each.step()
        assert_same_state(model, reference)
        assert WARNED not in caplog.text

    @ZEROS
    def test_zeros_update_parameters_that_the_next_loss_does_not_reach(
        self, session: Session, zero: Callable[[nn.Module, torch.optim.Optimizer], None]
    ) -> None:
        model, reference, optimizer, expected = both(session)
        for module, each in ((model, optimizer), (reference, expected)):
            for index in range(2):
                loss_of(module, index).backward()
                each.step()
                zero(module, each)
                zero(module, each)
                module.first(torch.ones(1, module.first.in_features)).sum().backward()
                each.step()
                each.zero_grad()
        assert session.committed_step == 4
        assert_same_state(model, reference)

    @ZEROS
    @pytest.mark.parametrize("early", [False, True])
    def test_zeros_may_come_before_the_commit_of_the_step(
        self,
        session: Session,
        zero: Callable[[nn.Module, torch.optim.Optimizer], None],
        early: bool,
    ) -> None:
        model, reference = memd_client.offload(build(Mlp), session), build(Mlp)
        assert isinstance(model, Mlp)
        assert isinstance(reference, Mlp)
        optimizer = memd_client.AdamW(model.parameters(), step_in_backward=early)
        expected = torch.optim.AdamW(reference.parameters(), fused=True)
        session.track(kept=Kept(1))
        for index in range(3):
            for module, each in ((model, optimizer), (reference, expected)):
                if index == 1:
                    module.first(torch.ones(1, module.first.in_features)).sum().backward()
                else:
                    loss_of(module, index).backward()
                each.step()
                zero(module, each)
                zero(module, each)
            session.commit()
        assert_same_state(model, reference)

    def test_zeros_that_a_module_left_are_its_gradients(self, session: Session) -> None:
        model, _, optimizer, _ = both(session)
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        weight = model.first.weight
        assert weight.grad is not None
        assert not weight.grad.any()
        weight.grad += 1
        assert weight.grad.sum() == weight.numel()
        model.zero_grad()
        assert [parameter.grad for parameter in model.parameters()] == [None] * 4
        optimizer.step()
        assert session.committed_step == 1, "nothing is left to update with"

    @ZEROS
    def test_zeros_replace_gradients_that_no_step_took(
        self, session: Session, zero: Callable[[nn.Module, torch.optim.Optimizer], None]
    ) -> None:
        model, reference, optimizer, expected = both(session)
        for module, each in ((model, optimizer), (reference, expected)):
            loss_of(module, 0).backward()
            zero(module, each)
            gradient = module.second.weight.grad
            assert gradient is not None
            assert not gradient.any()
            del gradient
            each.step()
        assert_same_state(model, reference)

    def test_a_second_step_without_a_backward_is_told_that_torch_repeats(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, _, optimizer, _ = both(session)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert WARNED not in caplog.text
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
        assert "does not repeat the gradient" in caplog.text
        assert session.committed_step == 2

    def test_a_step_that_was_not_made_has_taken_nothing(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, _, optimizer, _ = both(session)
        loss_of(model).backward()
        with (
            memd_client.gather(model),
            pytest.raises(memd_client.MemdError, match="is in use"),
        ):
            optimizer.step()
        loss_of(model).backward()
        optimizer.step()
        assert WARNED not in caplog.text
        assert session.committed_step == 1
