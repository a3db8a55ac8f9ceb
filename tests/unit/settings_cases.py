"""Adam's settings, with each daemon: run as client_cases.py is. The whole
table of torch's is tests/numerics/test_optimizer_table.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from tests.unit.client_cases import (
    Mlp,
    assert_same_moments,
    assert_same_state,
    loss_of,
    train_one_step,
)

if TYPE_CHECKING:
    from torch import nn

    from memd_client import Session
    from tests.unit.client_cases import OpenSession


def optimizers(
    pair: tuple[Mlp, Mlp], name: str = "AdamW", **settings: Any
) -> list[tuple[Mlp, torch.optim.Optimizer]]:
    """memd's and torch's, with settings of their own: each may change its tensors."""
    made: list[tuple[Mlp, torch.optim.Optimizer]] = []
    for module, kind in zip(pair, (memd_client, torch.optim), strict=True):
        own = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in settings.items()
        }
        if kind is torch.optim:
            own = {**own, "fused": True}
            own.pop("step_in_backward", None)
        made.append((module, getattr(kind, name)(module.parameters(), **own)))
    return made


def seeded() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


class TestSettings:
    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    @pytest.mark.parametrize("in_backward", [False, True])
    def test_maximize_has_torchs_bits_and_may_change_between_backward_and_step(
        self, mlp: tuple[Mlp, Mlp], name: str, *, in_backward: bool
    ) -> None:
        for module, optimizer in optimizers(
            mlp, name, lr=0.01, weight_decay=0.1, maximize=True, step_in_backward=in_backward
        ):
            for step in range(5):
                loss_of(module, step).backward()
                if step in {2, 4}:
                    optimizer.param_groups[0]["maximize"] = step == 4
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(*mlp)

    def test_each_group_maximizes_or_not(self, mlp: tuple[Mlp, Mlp]) -> None:
        for module, kind in zip(mlp, (memd_client, torch.optim), strict=True):
            fused = {"fused": True} if kind is torch.optim else {}
            optimizer = kind.AdamW(
                [
                    {"params": [module.first.weight, module.second.bias], "maximize": True},
                    {"params": [module.first.bias, module.second.weight]},
                ],
                lr=0.01,
                **fused,
            )
            for step in range(3):
                train_one_step(module, optimizer, step)
        assert_same_state(*mlp)

    @pytest.mark.parametrize("in_backward", [False, True])
    def test_a_tensor_that_is_changed_in_place_counts_from_the_next_step_on(
        self, mlp: tuple[Mlp, Mlp], *, in_backward: bool
    ) -> None:
        for module, optimizer in optimizers(
            mlp,
            lr=torch.tensor([0.01]),
            weight_decay=torch.tensor(0.1, dtype=torch.float64),
            step_in_backward=in_backward,
        ):
            (group,) = optimizer.param_groups
            group["betas"] = (torch.tensor(0.7), torch.tensor([[0.9]]))
            for step in range(5):
                loss_of(module, step).backward()
                group["lr"].mul_(0.7)
                group["betas"][1].fill_(0.9 + 0.01 * step)
                group["weight_decay"].add_(0.1)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(*mlp)

    def test_tensor_betas_are_numbers_in_the_group_as_in_torch(self, mlp: tuple[Mlp, Mlp]) -> None:
        betas = (torch.tensor([[0.8]]), torch.tensor(0.95, dtype=torch.float64))
        groups = [
            optimizer.param_groups[0]["betas"]
            for _, optimizer in optimizers(mlp, lr=0.01, betas=betas)
        ]
        assert groups[0] == groups[1]
        assert all(type(beta) is float for beta in groups[0])

    @pytest.mark.parametrize("in_backward", [False, True])
    def test_layers_that_join_later_have_torchs_bits_on_a_running_and_on_a_resumed_job(
        self, job: OpenSession, *, in_backward: bool
    ) -> None:
        """Gradual unfreezing. In the second session each layer goes on with what the job has of
        it, whether its group is there at the start or comes later."""
        reference = seeded()
        reference.second.requires_grad_(False)
        twin = torch.optim.AdamW(reference.first.parameters(), lr=0.01, fused=True)
        for steps in (range(4), range(4, 8)):
            with job() as session:
                model = seeded()
                model.second.requires_grad_(False)
                memd_client.offload(model, session)
                assert session.committed_step == steps.start
                optimizer = memd_client.AdamW(
                    model.first.parameters(), lr=0.01, step_in_backward=in_backward
                )
                if steps.start:
                    reference.second.requires_grad_(False)
                for step in steps:
                    if step == steps.start + 2:
                        late = {"lr": torch.tensor(0.03), "maximize": True}
                        model.second.requires_grad_()
                        optimizer.add_param_group({"params": model.second.parameters(), **late})
                        reference.second.requires_grad_()
                        if not steps.start:
                            twin.add_param_group({"params": reference.second.parameters(), **late})
                    train_one_step(model, optimizer, step)
                    train_one_step(reference, twin, step)
                assert_same_state(model, reference)
                assert_same_moments(optimizer.state_dict(), twin.state_dict())

    def test_a_tensor_learning_rate_and_a_late_group_come_back_with_resume(
        self, job: OpenSession
    ) -> None:
        reference = seeded()
        twin = torch.optim.AdamW(
            reference.first.parameters(), lr=torch.tensor(0.01), maximize=True, fused=True
        )
        twin.add_param_group({"params": list(reference.second.parameters()), "lr": 0.02})
        for steps in (range(3), range(3, 6)):
            with job() as session:
                model = memd_client.offload(seeded(), session)
                rate = torch.tensor(0.01)
                optimizer = memd_client.AdamW(
                    model.first.parameters(), lr=rate, maximize=steps.start == 0
                )
                optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.02})
                session.track(rng=True)
                assert session.resume() == steps.start
                assert optimizer.param_groups[0]["lr"] is rate
                assert optimizer.param_groups[0]["maximize"], "of the commit"
                for step in steps:
                    for module, its in ((model, optimizer), (reference, twin)):
                        loss_of(module, step).backward()
                        its.step()
                        its.zero_grad()
                        its.param_groups[0]["lr"].mul_(0.5)
                        its.param_groups[1]["lr"] *= 0.5
                    session.commit()
                assert_same_state(model, reference)

    def test_the_state_of_an_optimizer_that_maximizes_moves_both_ways(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        (model, optimizer), (reference, twin) = optimizers(mlp, lr=0.01)
        other = torch.optim.AdamW(seeded().parameters(), lr=0.02, maximize=True, fused=True)
        (theirs,) = other.param_groups
        for parameter in theirs["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        for each in (optimizer, twin):
            each.load_state_dict(other.state_dict())
            assert each.param_groups[0]["maximize"]
        train_one_step(model, optimizer, 0)
        train_one_step(reference, twin, 0)
        twin.load_state_dict(optimizer.state_dict())
        train_one_step(model, optimizer, 1)
        train_one_step(reference, twin, 1)
        assert_same_state(model, reference)
        assert_same_moments(optimizer.state_dict(), twin.state_dict())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"betas": (0.9, torch.tensor(0.9))}, "both floats or both tensors"),
            ({"betas": (torch.tensor(0.9), 0.9)}, "both floats or both tensors"),
            ({"betas": (torch.tensor([0.9, 0.8]), torch.tensor(0.9))}, r"betas\[0\].*1 element"),
            ({"betas": (torch.tensor(0.9), torch.tensor(1.0))}, r"betas\[1\].*below 1"),
            ({"lr": torch.tensor([0.1, 0.2])}, "lr must have 1 element, not 2"),
            ({"lr": torch.tensor(-0.1)}, "lr must be at least 0"),
            ({"weight_decay": torch.zeros(0)}, "weight_decay must have 1 element, not 0"),
            ({"maximize": 1}, "maximize must be a bool, not int: 1"),
            ({"amsgrad": "no"}, "amsgrad must be a bool, not str: 'no'"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_settings_that_torch_refuses_are_refused_by_name(
        self, mlp: tuple[Mlp, Mlp], settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(memd_client.MemdError, match=message):
            memd_client.AdamW(mlp[0].parameters(), **settings)
        memd_client.AdamW(mlp[0].parameters())

    def test_a_group_that_was_changed_to_what_is_refused_makes_no_step(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        (model, optimizer), (reference, twin) = optimizers(mlp, lr=0.01)
        loss_of(model).backward()
        loss_of(reference).backward()
        wrong: dict[str, Any] = {
            "lr": torch.tensor([0.1, 0.2]),
            "betas": (1.0, 0.9),
            "capturable": True,
            "eps": "1e-8",
            "weight_decay": None,
            "maximize": "no",
            "amsgrad": 0,
        }
        (group,) = optimizer.param_groups
        for name, value in wrong.items():
            kept, group[name] = group[name], value
            with pytest.raises(memd_client.MemdError, match=name):
                optimizer.step()
            group[name] = kept
        assert session.committed_step == 0
        optimizer.step()
        twin.step()
        assert_same_state(model, reference)

    def test_capturable_is_ignored_beside_fused_as_torchs_cpu_kernel_ignores_it(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        modules: list[tuple[nn.Module, Any]] = [(model, memd_client), (reference, torch.optim)]
        for module, kind in modules:
            optimizer = kind.AdamW(module.parameters(), lr=0.01, fused=True, capturable=True)
            for step in range(2):
                train_one_step(module, optimizer, step)
        assert_same_state(model, reference)

    def test_adam_with_decoupled_decay_is_adamw(self, mlp: tuple[Mlp, Mlp]) -> None:
        for module, optimizer in optimizers(
            mlp, "Adam", lr=0.1, weight_decay=0.5, decoupled_weight_decay=True
        ):
            for step in range(2):
                train_one_step(module, optimizer, step)
        assert_same_state(*mlp)
