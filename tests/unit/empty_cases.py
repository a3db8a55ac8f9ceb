"""A parameter without elements trains as in plain PyTorch: run as client_cases.py is."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from tests.unit.client_cases import LENGTH, WIDTH, assert_same_moments, assert_same_state, build
from tests.unit.client_cases import loss_of as loss

if TYPE_CHECKING:
    from tests.unit.client_cases import OpenSession


class WithEmpties(nn.Module):
    """A layer without inputs, an adapter of rank 0, and a parameter of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Linear(0, WIDTH)
        self.down = nn.Linear(WIDTH, 0, bias=False)
        self.up = nn.Linear(0, WIDTH, bias=False)
        self.spare = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) + self.up(self.down(x)) + self.nothing(x[:, :, :0])
        return output + self.spare.sum()


def plain_optimizer(model: nn.Module, kind: type[memd_client.Adam]) -> torch.optim.Optimizer:
    make = torch.optim.AdamW if kind is memd_client.AdamW else torch.optim.Adam
    return make(model.named_parameters(), lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
class TestEmpty:
    @pytest.mark.parametrize("kind", [memd_client.Adam, memd_client.AdamW])
    @pytest.mark.parametrize("offloaded", [True, False])
    def test_empty_parameters_train_and_resume_with_plain_bits(
        self, job: OpenSession, kind: type[memd_client.Adam], offloaded: bool
    ) -> None:
        reference = build(WithEmpties)
        torchs = plain_optimizer(reference, kind)
        for start in (0, 2):
            with job() as session:
                model = build(WithEmpties)
                if offloaded:
                    memd_client.offload(model, session)
                ours = kind(model.named_parameters(), lr=1e-2, weight_decay=0.1, session=session)
                assert session.resume() == start
                for step in (start, start + 1):
                    losses, norms = [], []
                    for trained, optimizer in ((model, ours), (reference, torchs)):
                        losses.append(loss(trained, step))
                        losses[-1].backward()
                        clip = getattr(optimizer, "clip_grad_norm_", None)
                        norms.append(
                            clip(0.01)
                            if clip
                            else nn.utils.clip_grad_norm_(trained.parameters(), 0.01)
                        )
                        optimizer.step()
                        optimizer.zero_grad()
                    assert torch.equal(*losses)
                    assert torch.equal(*norms)
                assert_same_state(model, reference)
                state, expected = ours.state_dict(), copy.deepcopy(torchs.state_dict())
                for moments in expected["state"].values():
                    moments["exp_avg"] = moments["exp_avg"].float()  # of the bfloat16 one
                    moments["exp_avg_sq"] = moments["exp_avg_sq"].float()
                assert_same_moments(state, expected)

    def test_states_are_exchanged_with_torch(self, job: OpenSession) -> None:
        reference = build(WithEmpties)
        torchs = plain_optimizer(reference, memd_client.AdamW)
        for step in range(3):
            loss(reference, step).backward()
            torchs.step()
            torchs.zero_grad()
        with job() as session:
            model = memd_client.offload(copy.deepcopy(reference), session)
            ours = memd_client.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
            ours.load_state_dict(torchs.state_dict())
            assert {float(each["step"]) for each in ours.state_dict()["state"].values()} == {3.0}
            another = plain_optimizer(copy.deepcopy(reference), memd_client.AdamW)
            another.load_state_dict(ours.state_dict())
            ours.reset_state()
            assert {float(each["step"]) for each in ours.state_dict()["state"].values()} == {0.0}

    def test_a_step_that_is_dropped_counts_no_update(self, job: OpenSession) -> None:
        with job() as session:
            model = memd_client.offload(build(WithEmpties), session)
            ours = memd_client.AdamW(model.named_parameters())
            session.track(random=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
            session.resume()
            loss(model).backward()
            ours.step()
        with job() as session:
            model = memd_client.offload(build(WithEmpties), session)
            ours = memd_client.AdamW(model.named_parameters())
            assert {float(each["step"]) for each in ours.state_dict()["state"].values()} == {0.0}

    def test_positions_of_empty_parameters_match_nothing(self, job: OpenSession) -> None:
        """Only parameters that the daemon stores need names."""
        for _ in range(2):
            with job() as session:
                model = memd_client.offload(build(WithEmpties), session)
                memd_client.AdamW(model.parameters())

    def test_a_model_of_empty_parameters_alone_makes_no_step(self, job: OpenSession) -> None:
        with job() as session:
            model = nn.Linear(0, LENGTH, bias=False)
            ours = memd_client.AdamW(model.named_parameters(), session=session)
            model(torch.ones(2, 0)).sum().backward()
            ours.step()
            assert session.committed_step == 0
