"""amsgrad, with each daemon: run as client_cases.py is. The whole table of torch's is
tests/numerics/test_optimizer_table.py.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import memd_client
from memd_client.core.tensor_streams import TensorStreams
from tests.unit.client_cases import (
    WIDTH,
    Mlp,
    assert_same_moments,
    assert_same_state,
    copy_by_checkpoint,
    loss_of,
    train_one_step,
)
from tests.unit.empty_cases import WithEmpties
from tests.unit.lazy_cases import scaled_step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memd_client import Session
    from memd_client.core.tensor_streams import MomentPart
    from tests.unit.client_cases import OpenSession

MAXIMUM = "max_exp_avg_sq"


def seeded() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def both(
    pair: tuple[nn.Module, nn.Module], name: str = "AdamW", **settings: Any
) -> list[tuple[Any, Any]]:
    """memd's and torch's."""
    model, reference = pair
    plain = {key: value for key, value in settings.items() if key != "step_in_backward"}
    return [
        (model, getattr(memd_client, name)(model.parameters(), lr=0.01, **settings)),
        (
            reference,
            getattr(torch.optim, name)(reference.parameters(), lr=0.01, fused=True, **plain),
        ),
    ]


def expect_same(ours: tuple[Any, Any], plain: tuple[Any, Any]) -> dict[int, set[str]]:
    """The same values, and the same names in each state, which it returns."""
    assert_same_state(ours[0], plain[0])
    state, expected = ours[1].state_dict(), plain[1].state_dict()
    assert_same_moments(state, expected)
    names = {index: set(moments) for index, moments in state["state"].items()}
    assert names == {index: set(moments) for index, moments in expected["state"].items()}
    return names


def switch(optimizer: Any, *, amsgrad: bool) -> None:
    for group in optimizer.param_groups:
        group["amsgrad"] = amsgrad


class TestAmsgrad:
    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    @pytest.mark.parametrize("in_backward", [False, True])
    def test_it_has_torchs_bits_and_a_maximum_waits_while_it_is_switched_off(
        self, mlp: tuple[Mlp, Mlp], name: str, *, in_backward: bool
    ) -> None:
        ours, plain = both(mlp, name, weight_decay=0.1, amsgrad=True, step_in_backward=in_backward)
        for step in range(6):
            for module, optimizer in (ours, plain):
                loss = loss_of(module, step)
                # Gradients that shrink leave the maximum behind.
                (loss / 2**step).backward()
                if step in {2, 4}:
                    switch(optimizer, amsgrad=step == 4)
                optimizer.step()
                optimizer.zero_grad()
            names = expect_same(ours, plain)
            assert all(MAXIMUM in each for each in names.values())

    def test_each_group_has_it_or_not(self, mlp: tuple[Mlp, Mlp]) -> None:
        """All of them share one bucket."""
        pairs = []
        for module, kind in zip(mlp, (memd_client, torch.optim), strict=True):
            fused = {"fused": True} if kind is torch.optim else {}
            optimizer = kind.AdamW(
                [
                    {"params": [module.first.weight, module.second.bias], "amsgrad": True},
                    {"params": [module.first.bias, module.second.weight]},
                ],
                lr=0.01,
                **fused,
            )
            for step in range(3):
                train_one_step(module, optimizer, step)
            pairs.append((module, optimizer))
        names = expect_same(*pairs)
        assert [MAXIMUM in names[index] for index in range(4)] == [True, True, False, False]

    @pytest.mark.parametrize("in_backward", [False, True])
    @pytest.mark.parametrize("begins", [False, True])
    def test_the_first_update_of_each_parameter_decides(
        self, mlp: tuple[Mlp, Mlp], *, begins: bool, in_backward: bool
    ) -> None:
        """The group changes between backward and the first step, and again before the second
        layer is updated for the first time."""
        ours, plain = both(mlp, amsgrad=not begins, step_in_backward=in_backward)
        for module, optimizer in (ours, plain):
            module.second.requires_grad_(requires_grad=False)
            loss_of(module, 0).backward()
            switch(optimizer, amsgrad=begins)
            optimizer.step()
            optimizer.zero_grad()
            module.second.requires_grad_(requires_grad=True)
            if begins:
                switch(optimizer, amsgrad=False)
            train_one_step(module, optimizer, 1)
        names = expect_same(ours, plain)
        assert [MAXIMUM in names[index] for index in range(4)] == [begins, begins, False, False]

    @pytest.mark.parametrize("in_backward", [False, True])
    def test_switched_on_after_updates_without_it_no_step_is_made(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, in_backward: bool
    ) -> None:
        ours, plain = both(mlp, step_in_backward=in_backward)
        (model, optimizer), (reference, twin) = ours, plain
        train_one_step(model, optimizer, 0)
        train_one_step(reference, twin, 0)
        for each in (optimizer, twin):
            switch(each, amsgrad=True)
        loss_of(model, 1).backward()
        loss_of(reference, 1).backward()
        with pytest.raises(KeyError, match=MAXIMUM):
            twin.step()
        with pytest.raises(
            memd_client.InvalidArgument,
            match=r"'layers.0.weight' was updated without amsgrad.*False.*reset_state\(\)",
        ):
            optimizer.step()
        assert session.committed_step == 1
        for each in (optimizer, twin):
            switch(each, amsgrad=False)
            each.step()
            each.zero_grad()
        names = expect_same(ours, plain)
        assert all(MAXIMUM not in each for each in names.values())

    def test_a_reset_begins_anew_as_the_group_says(self, mlp: tuple[Mlp, Mlp]) -> None:
        (model, optimizer), (reference, twin) = both(mlp)
        train_one_step(model, optimizer, 0)
        train_one_step(reference, twin, 0)
        for amsgrad in (True, False, True):
            switch(optimizer, amsgrad=amsgrad)
            optimizer.reset_state()
            for state in optimizer.state_dict()["state"].values():
                assert (MAXIMUM in state) == amsgrad
                assert not any(bool(value.any()) for value in state.values())
            twin = torch.optim.AdamW(reference.parameters(), lr=0.01, amsgrad=amsgrad, fused=True)
            for step in range(2):
                train_one_step(model, optimizer, step)
                train_one_step(reference, twin, step)
            expect_same((model, optimizer), (reference, twin))

    def test_states_move_both_ways(self, mlp: tuple[Mlp, Mlp]) -> None:
        """The group comes with the state: the optimizer was made without amsgrad."""
        (model, optimizer), (reference, twin) = both(mlp)
        train_one_step(model, optimizer, 0)
        train_one_step(reference, twin, 0)
        other = seeded()
        theirs = torch.optim.AdamW(other.parameters(), lr=0.02, amsgrad=True, fused=True)
        train_one_step(other, theirs, 1)
        for each in (optimizer, twin):
            each.load_state_dict(theirs.state_dict())
            assert each.param_groups[0]["amsgrad"]
        for step in range(2):
            train_one_step(model, optimizer, step)
            train_one_step(reference, twin, step)
        names = expect_same((model, optimizer), (reference, twin))
        assert all(MAXIMUM in each for each in names.values())
        twin = torch.optim.AdamW(reference.parameters(), fused=True)
        twin.load_state_dict(optimizer.state_dict())
        twin.param_groups[0]["fused"] = True
        train_one_step(model, optimizer, 3)
        train_one_step(reference, twin, 3)
        expect_same((model, optimizer), (reference, twin))

    def test_a_loaded_state_keeps_its_maximum_in_a_group_without_amsgrad(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        ours, plain = both(mlp)
        other = seeded()
        theirs = torch.optim.AdamW(other.parameters(), lr=0.01, amsgrad=True, fused=True)
        train_one_step(other, theirs, 1)
        loaded = copy.deepcopy(theirs.state_dict())
        loaded["param_groups"][0]["amsgrad"] = False
        less = copy.deepcopy(loaded)
        del less["state"][1][MAXIMUM]
        for module, optimizer in (ours, plain):
            # torch's optimizers go on in the tensors that they are given.
            optimizer.load_state_dict(copy.deepcopy(loaded))
            train_one_step(module, optimizer, 2)
            optimizer.load_state_dict(copy.deepcopy(less))
            train_one_step(module, optimizer, 3)
        names = expect_same(ours, plain)
        assert [MAXIMUM in names[index] for index in range(4)] == [True, False, True, True]

    def test_a_loaded_state_without_a_maximum_makes_no_step_with_amsgrad(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        (model, optimizer), (reference, twin) = both(mlp, amsgrad=True)
        other = seeded()
        theirs = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
        train_one_step(other, theirs, 1)
        state = theirs.state_dict()
        state["param_groups"][0]["amsgrad"] = True
        for each in (optimizer, twin):
            each.load_state_dict(state)
        with pytest.raises(KeyError, match=MAXIMUM):
            train_one_step(reference, twin, 2)
        with pytest.raises(memd_client.InvalidArgument, match="updated without amsgrad"):
            train_one_step(model, optimizer, 2)
        assert session.committed_step == 0

    def test_maxima_of_a_large_parameter_are_loaded(self, session: Session) -> None:
        model = memd_client.offload(nn.Linear(400, 400, bias=False), session)
        optimizer = memd_client.AdamW(model.parameters())
        moments = {name: torch.rand(400, 400) for name in ("exp_avg", "exp_avg_sq", MAXIMUM)}
        state = optimizer.state_dict()
        state["state"] = {0: {"step": torch.tensor(3.0), **moments}}
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["state"][0]
        assert list(loaded) == ["step", *moments]
        for name, moment in moments.items():
            assert torch.equal(loaded[name], moment), name

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_a_distributed_checkpoint_goes_both_ways(
        self, mlp: tuple[Mlp, Mlp], tmp_path: Path
    ) -> None:
        (model, optimizer), (reference, twin) = both(mlp, amsgrad=True)
        form: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        assert form["state"]["layers.0.weight"][MAXIMUM].shape == (64, WIDTH)
        assert not any(state[MAXIMUM].any() for state in form["state"].values())
        train_one_step(reference, twin, 0)
        copy_by_checkpoint(reference, twin, model, optimizer, tmp_path / "first")
        train_one_step(reference, twin, 1)
        train_one_step(model, optimizer, 1)
        expect_same((model, optimizer), (reference, twin))
        last = seeded()
        torchs = torch.optim.AdamW(last.parameters(), amsgrad=True, fused=True)
        copy_by_checkpoint(model, optimizer, last, torchs, tmp_path / "second")
        torchs.param_groups[0]["fused"] = True
        train_one_step(last, torchs, 2)
        train_one_step(model, optimizer, 2)
        expect_same((model, optimizer), (last, torchs))

    def test_a_state_that_is_loaded_where_it_came_from_moves_nothing(
        self, job: OpenSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moved: list[str] = []
        names: dict[int, str] = {}
        begin = TensorStreams.begin_put_moments

        def note(streams: TensorStreams, parts: Sequence[MomentPart]) -> Any:
            moved.extend(names[part.shard_id] for part in parts)
            return begin(streams, parts)

        monkeypatch.setattr(TensorStreams, "begin_put_moments", note)
        reference = seeded()
        twin = torch.optim.AdamW(reference.parameters(), lr=0.01, amsgrad=True, fused=True)
        for first in (0, 2):
            with job() as session:
                model = memd_client.offload(seeded(), session)
                optimizer = memd_client.AdamW(model.parameters(), lr=0.01, amsgrad=True)
                for name in map(optimizer.shard_name, model.parameters()):
                    names[session.find_shard(name).shard_id] = name
                optimizer.load_state_dict(optimizer.state_dict())
                assert not moved
                for step in (first, first + 1):
                    train_one_step(model, optimizer, step)
                    train_one_step(reference, twin, step)
                if first:
                    expect_same((model, optimizer), (reference, twin))
                    # Less than it is: the rest has to go.
                    state = optimizer.state_dict()
                    del state["state"][0][MAXIMUM]
                    optimizer.load_state_dict(state)
                    assert moved == ["layers.0.weight"]
                    assert MAXIMUM not in optimizer.state_dict()["state"][0]

    @pytest.mark.parametrize("change", ["step", "load", "reset", "close"])
    def test_a_state_that_is_kept_is_of_its_moment(self, job: OpenSession, change: str) -> None:
        reference = seeded()
        session = job()
        model = memd_client.offload(seeded(), session)
        (_, optimizer), (_, twin) = both((model, reference), amsgrad=True)
        for step in range(2):
            train_one_step(model, optimizer, step)
            train_one_step(reference, twin, step)
        kept = optimizer.state_dict()
        if change == "step":
            train_one_step(model, optimizer, 2)
        if change == "load":
            state = optimizer.state_dict()
            for moments in state["state"].values():
                moments[MAXIMUM].zero_()
            optimizer.load_state_dict(state)
        if change == "reset":
            optimizer.reset_state()
        if change == "close":
            session.close()
        assert_same_moments(kept, twin.state_dict())
        assert MAXIMUM in kept["state"][0]
        session.close()

    @pytest.mark.parametrize("offloaded", [True, False])
    @pytest.mark.parametrize("says", [True, False])
    def test_a_job_goes_on_with_its_maxima_and_a_tracked_one_with_its_setting(
        self, job: OpenSession, *, offloaded: bool, says: bool
    ) -> None:
        reference = seeded()
        twin = torch.optim.AdamW(reference.parameters(), lr=0.01, amsgrad=True, fused=True)
        for first in (0, 3):
            with job() as session:
                model = seeded()
                if offloaded:
                    memd_client.offload(model, session)
                optimizer = memd_client.AdamW(
                    model.named_parameters(), lr=0.01, amsgrad=not first or says, session=session
                )
                session.track(rng=True)
                assert session.resume() == first
                assert optimizer.param_groups[0]["amsgrad"]
                for step in range(first, first + 3):
                    for module, its in ((model, optimizer), (reference, twin)):
                        train_one_step(module, its, step)
                    session.commit()
                expect_same((model, optimizer), (reference, twin))

    def test_a_job_without_maxima_goes_on_without_amsgrad_alone(self, job: OpenSession) -> None:
        reference = seeded()
        twin = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=True)
        train_one_step(reference, twin, 0)
        with job() as session:
            model = memd_client.offload(seeded(), session)
            train_one_step(model, memd_client.AdamW(model.parameters(), lr=0.01), 0)
        with job() as session:
            model = memd_client.offload(seeded(), session)
            optimizer = memd_client.AdamW(model.parameters(), lr=0.01, amsgrad=True)
            with pytest.raises(memd_client.InvalidArgument, match="updated without amsgrad"):
                train_one_step(model, optimizer, 1)
            assert session.committed_step == 1
            optimizer.zero_grad()
            assert_same_moments(optimizer.state_dict(), twin.state_dict())
            optimizer.reset_state()
            twin = torch.optim.AdamW(reference.parameters(), lr=0.01, amsgrad=True, fused=True)
            train_one_step(model, optimizer, 1)
            train_one_step(reference, twin, 1)
            expect_same((model, optimizer), (reference, twin))

    def test_between_step_and_commit_nothing_is_decided_anew(self, session: Session) -> None:
        model = seeded()  # stays in this process, with its gradients
        optimizer = memd_client.AdamW(
            model.named_parameters(), lr=0.01, amsgrad=True, session=session
        )
        session.track(rng=True)
        session.resume()
        loss_of(model, 0).backward()
        optimizer.step()
        switch(optimizer, amsgrad=False)
        with pytest.raises(memd_client.InvalidArgument, match="a second step"):
            optimizer.step()
        session.commit(wait=True)
        assert all(MAXIMUM in state for state in optimizer.state_dict()["state"].values())

    def test_an_optimizer_for_each_parameter_decides_in_backward(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        states = []
        for module, kind in zip(mlp, (memd_client, torch.optim), strict=True):
            fused = {"fused": True} if kind is torch.optim else {}
            optimizers = {
                name: kind.AdamW([parameter], lr=0.01, amsgrad=name.endswith("bias"), **fused)
                for name, parameter in module.named_parameters()
            }
            for name, parameter in module.named_parameters():
                # Another one than the optimizer was made with.
                switch(optimizers[name], amsgrad=name.endswith("weight"))

                def take(_: torch.Tensor, its: Any = optimizers[name]) -> None:
                    its.step()
                    its.zero_grad()

                parameter.register_post_accumulate_grad_hook(take)
            for step in range(3):
                loss_of(module, step).backward()
            states.append({name: each.state_dict() for name, each in optimizers.items()})
        assert_same_state(*mlp)
        for name, expected in states[1].items():
            assert_same_moments(states[0][name], expected)
            assert list(states[0][name]["state"][0]) == list(expected["state"][0])
            assert (MAXIMUM in expected["state"][0]) == name.endswith("weight")

    def test_a_scaler_skips_a_step_and_no_maximum_moves(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        ours, plain = both(mlp, amsgrad=True)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            for (module, optimizer), scaler in zip((ours, plain), scalers, strict=True):
                scaled_step(
                    module, optimizer, scaler, step, overflows=step in {0, 2}, max_norm=None
                )
            expect_same(ours, plain) if step else None
        assert session.committed_step == 4

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_parameters_without_elements_have_one_too(self, job: OpenSession) -> None:
        torch.manual_seed(0)
        reference = WithEmpties()
        del reference.spare  # bfloat16: torch's moments would be too
        reference.register_parameter("spare", nn.Parameter(torch.empty(0)))
        twin = torch.optim.AdamW(reference.parameters(), lr=0.01, amsgrad=True, fused=True)
        for first in (0, 1):
            with job() as session:
                torch.manual_seed(0)
                model = WithEmpties()
                del model.spare
                model.register_parameter("spare", nn.Parameter(torch.empty(0)))
                memd_client.offload(model, session)
                # The resumed job decides, not the setting of a new optimizer.
                optimizer = memd_client.AdamW(model.named_parameters(), lr=0.01, amsgrad=not first)
                switch(optimizer, amsgrad=True)
                train_one_step(model, optimizer, first)
                train_one_step(reference, twin, first)
                expect_same((model, optimizer), (reference, twin))
