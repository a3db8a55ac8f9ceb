"""Under what waits are counted, and what is asked for together: the daemon is faked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memd_client
from memd_client.base.stalls import module_group
from memd_client.errors import from_code
from memd_client.parameters.parameter import streamed
from memd_native import (
    PART_GRADIENT,
    PART_VALUE,
    PHASE_BACKWARD,
    PHASE_FORWARD,
    PHASE_OTHER,
    PHASE_STEP,
    STALL_GRADIENT,
    STALL_STEP,
    StatusError,
)
from tests.unit.client_cases import Mlp, build, loss_of
from tests.unit.fake_session import FakeDaemon, status_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client import Session


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def session(daemon: FakeDaemon) -> Session:
    return daemon.session()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("h.0.attn.c_attn.weight", "h.*.attn"),
        ("transformer.h.11.mlp.c_fc.bias", "transformer.h.*.mlp"),
        ("model.layers.3.block.experts.7.w1.weight", "model.layers.*.block"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("encoder.embed.tokens.weight", "encoder.embed"),
        ("lm_head.weight", "lm_head"),
        ("0.weight", "*"),
        ("scale", "scale"),
    ],
)
def test_the_layers_of_a_model_are_one_group(name: str, group: str) -> None:
    assert module_group(name) == group


def test_all_that_a_module_lacks_is_asked_for_at_once(daemon: FakeDaemon, session: Session) -> None:
    model = memd_client.offload(build(Mlp), session)
    daemon.asked.clear()
    loss_of(model)
    names = [asked.names for asked in daemon.asked]
    modules = [
        name for name, child in model.named_modules() if list(child.parameters(recurse=False))
    ]
    assert sorted(names) == sorted([[f"{name}.weight", f"{name}.bias"] for name in modules])
    daemon.asked.clear()
    with memd_client.gather(model, write=True):
        pass
    assert [len(asked.names) for asked in daemon.asked] == [len(list(model.parameters()))]


def refusing_the_last(daemon: FakeDaemon, code: int) -> Callable[..., list[Any]]:
    """In place of `lease_together`."""
    ask = daemon.lease_together

    def refuse_last(
        shards: Sequence[tuple[int, int, Sequence[int], int]],
        part: int,
        mode: int,
        timeout_s: float,
        phase: int,
        follows: bool = True,
    ) -> list[torch.Tensor | StatusError]:
        answers = ask(shards, part, mode, timeout_s, phase, follows)
        return [*answers[:-1], status_error(code, "not this one")]

    return refuse_last


def test_none_is_kept_while_the_outcome_of_the_step_before_is_waited_for(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memd_client.offload(build(Mlp), session)
    optimizer = memd_client.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    entry = streamed(next(model.parameters()))
    assert entry is not None
    settle = entry.job.steps.settle_for_lease
    held: list[int] = []

    def settle_and_look() -> None:
        held.append(len(daemon.leases))
        settle()

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "lease_together", refusing_the_last(daemon, 5))
        patch.setattr(entry.job.steps, "settle_for_lease", settle_and_look)
        with pytest.raises(memd_client.CapacityError, match=r"bias.*not this one"):
            loss_of(model)
    assert held == [0]


@pytest.mark.parametrize("code", [5, 9])
def test_where_one_of_them_cannot_be_had_none_is_kept(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    model = memd_client.offload(build(Mlp), session)
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "lease_together", refusing_the_last(daemon, code))
        with pytest.raises(type(from_code(code, "")), match=r"bias.*not this one"):
            loss_of(model)
    assert daemon.leases == {}
    loss_of(model)


def test_a_wait_is_counted_in_the_phase_that_its_thread_is_in(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(build(Mlp), session)
    optimizer = memd_client.AdamW(model.parameters())
    daemon.asked.clear()
    loss = loss_of(model)
    assert {asked.phase for asked in daemon.asked} == {PHASE_FORWARD}
    assert {group for asked in daemon.asked for group in asked.groups} <= set(daemon.groups[1:])
    daemon.asked.clear()
    loss.backward()
    found = {(asked.part, asked.phase) for asked in daemon.asked}
    assert found == {(PART_VALUE, PHASE_BACKWARD), (PART_GRADIENT, PHASE_BACKWARD)}
    optimizer.step()
    daemon.asked.clear()
    with memd_client.gather(model):
        pass
    assert {asked.phase for asked in daemon.asked} == {PHASE_OTHER}
    optimizer.clip_grad_norm_(1.0)
    loss = torch.stack([checkpoint(lambda: loss_of(model), use_reentrant=False)]).sum()
    daemon.asked.clear()
    loss.backward()
    assert {asked.phase for asked in daemon.asked} == {PHASE_BACKWARD}, "computed again there"


def test_values_that_stay_are_compared_in_the_phase_of_the_step(
    daemon: FakeDaemon, session: Session
) -> None:
    model = build(Mlp)
    optimizer = memd_client.AdamW(model.named_parameters(), session=session)
    loss_of(model).backward()
    daemon.asked.clear()
    optimizer.step()
    assert {asked.phase for asked in daemon.asked} == {PHASE_STEP}


def test_the_wait_for_a_steps_answer_is_counted_by_who_needs_it(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(build(Mlp), session)
    optimizer = memd_client.AdamW(model.parameters())
    loss_of(model).backward()
    assert daemon.stalls == [], "nothing is on its way"
    optimizer.zero_grad()
    name, parameter = next(model.named_parameters())
    entry = streamed(parameter)
    assert entry is not None

    def stall_of(use: Callable[[], object]) -> tuple[int, str, int]:
        loss_of(model).backward()
        optimizer.step()
        daemon.stalls.clear()
        use()
        (stall,) = daemon.stalls
        return stall

    group = module_group(name)
    gradient = stall_of(lambda: entry.job.gradient_leases_of(entry.shard))
    assert gradient == (PHASE_OTHER, group, STALL_GRADIENT)
    assert stall_of(lambda: session.committed_step) == (PHASE_OTHER, "other", STALL_STEP)
    loss_of(model).backward()
    optimizer.step()
    daemon.stalls.clear()
    session.put("x", torch.ones(1))
    session.commit(wait=True)
    assert daemon.stalls == [(PHASE_STEP, "other", STALL_STEP)]


def test_steps_are_timed_from_end_to_end(daemon: FakeDaemon, session: Session) -> None:
    model = memd_client.offload(build(Mlp), session)
    optimizer = memd_client.AdamW(model.parameters())
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
    assert len(daemon.step_walls) == 2
    assert min(daemon.step_walls) > 0


def test_two_threads_take_the_same_parameters_in_any_order(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(build(Mlp), session)
    parameters = list(model.parameters())

    def take(which: list[torch.Tensor]) -> None:
        for _ in range(50):
            with memd_client.gather(which):
                pass

    threads = [
        threading.Thread(target=take, args=(which,), daemon=True)
        for which in (parameters, parameters[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert daemon.leases == {}
