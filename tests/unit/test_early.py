"""What the daemon is told while backward runs."""

from __future__ import annotations

import gc

import torch

import memd_client
from memd_client.parameters.parameter import streamed
from memd_proto.v1 import session_pb2
from tests.unit.client_cases import Mlp, assert_same_state, build, loss_of
from tests.unit.early_cases import early, plain
from tests.unit.fake_session import FakeDaemon


def test_settings_are_told_once_for_as_long_as_they_stay() -> None:
    daemon = FakeDaemon()
    with daemon.session() as session:
        model = memd_client.offload(build(Mlp), session)
        optimizer = early(model)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
        assert daemon.calls.count("expect_step") == 1
        names = dict(model.named_parameters())
        ids = {shard.shard_id for shard in daemon.shards if shard.spec.name in names}
        assert {id for group in daemon.expected for id in group.shard_ids} == ids
        assert sorted(daemon.final_gradients) == sorted([*ids] * 3)
        optimizer.param_groups[0]["lr"] = 0.5
        loss_of(model, 3).backward()
        assert daemon.calls.count("expect_step") == 2
        assert daemon.expected[0].settings.lr == 0.5


def test_what_a_first_step_decides_is_not_updated_before_it() -> None:
    """The daemon was told that there is a maximum, and amsgrad was switched off since."""
    daemon = FakeDaemon()
    with daemon.session() as session:
        model = memd_client.offload(build(Mlp), session)
        optimizer = memd_client.AdamW(model.parameters(), amsgrad=True, step_in_backward=True)
        optimizer.param_groups[0]["amsgrad"] = False
        for step in range(2):
            loss_of(model, step).backward()
            assert bool(daemon.expected[0].shard_ids) == bool(step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True
        loss_of(model, 2).backward()
        assert not daemon.expected[0].shard_ids


def test_the_next_daemon_is_told_again() -> None:
    daemon = FakeDaemon()
    with daemon.session() as session:
        model = memd_client.offload(build(Mlp), session)
        optimizer = early(model)
        loss_of(model).backward()
        optimizer.step()
        session.transaction.job._note_return(session_pb2.AttachResponse(kept=True), 2)
        loss_of(model).backward()
        assert daemon.calls.count("expect_step") == 2


def test_an_optimizer_that_is_gone_tells_nothing() -> None:
    daemon = FakeDaemon()
    with daemon.session() as session:
        model, reference = memd_client.offload(build(Mlp), session), build(Mlp)
        optimizer = early(model)
        del optimizer
        gc.collect()
        entry = streamed(next(model.parameters()))
        assert entry is not None
        assert entry.early is None
        ordinary = memd_client.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        expected = plain(reference)
        for each, its in ((model, ordinary), (reference, expected)):
            for step in range(2):  # accumulated
                loss_of(each, step).backward()
            its.step()
        assert daemon.final_gradients == []
        assert_same_state(model, reference)


def test_without_it_nothing_is_told() -> None:
    daemon = FakeDaemon()
    with daemon.session() as session:
        model = memd_client.offload(build(Mlp), session)
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        assert not getattr(optimizer, "_step_supports_amp_scaling", True)
        optimizer.step()
        assert "expect_step" not in daemon.calls
        assert daemon.final_gradients == []
        assert torch.isfinite(loss_of(model))
