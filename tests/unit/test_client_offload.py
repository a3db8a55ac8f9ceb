"""offload(): what it refuses, what it leaves when it fails, and what it bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from memd_client.core.leases import NoStep
from memd_client.errors import from_code
from memd_client.parameters.away import AwayParameter
from memd_native import MODE_READ, PART_VALUE
from tests.unit.client_cases import Gpt, Mlp, assert_same_gradients, build, loss_of
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def session(daemon: FakeDaemon) -> Session:
    return daemon.session()


def with_parameter(make: Callable[[], torch.Tensor], **settings: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].odd = nn.Parameter(make(), **settings)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "not contiguous": (
        lambda: with_parameter(lambda: torch.zeros(4, 3).T),
        memd_client.InvalidArgument,
        r"'1\.odd' is not contiguous.*contiguous_format",
    ),
    "sparse": (
        lambda: with_parameter(lambda: torch.eye(3).to_sparse()),
        memd_client.InvalidArgument,
        r"'1\.odd' is sparse",
    ),
    "less than a byte": (
        lambda: with_parameter(
            lambda: torch.zeros(3, dtype=torch.uint8).view(torch.uint4),  # type: ignore[attr-defined]
            requires_grad=False,
        ),
        memd_client.InvalidArgument,
        r"no parameters of torch\.uint4; view '1\.odd' as uint8",
    ),
    "fp16": (
        lambda: with_parameter(lambda: torch.zeros(3, dtype=torch.float16)),
        memd_client.NotYet,
        r"'1\.odd', or freeze it.*it is torch\.float16",
    ),
    "fp64": (
        lambda: with_parameter(lambda: torch.zeros(3, dtype=torch.float64)),
        memd_client.InvalidArgument,
        r"'1\.odd', or freeze it.*it is torch\.float64",
    ),
    "without bytes": (
        lambda: with_parameter(lambda: torch.zeros(3, device="meta")),
        memd_client.NotYet,
        r"'1\.odd' has no bytes",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)),
        memd_client.InvalidArgument,
        "initialise lazy modules",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_cannot_be_offloaded_is_named_and_nothing_changes(
    daemon: FakeDaemon, session: Session, name: str
) -> None:
    make, error, message = REFUSED[name]
    module = make()
    before = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
    with pytest.raises(error, match=message):
        memd_client.offload(module, session)
    assert all(type(parameter) is nn.Parameter for parameter in before)
    assert daemon.calls == []
    assert not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"activations": "tape"}, memd_client.InvalidArgument),
        ({"device": "nowhere"}, memd_client.InvalidArgument),
        ({"tier": "tape"}, memd_client.InvalidArgument),
    ],
    ids=["activations", "device", "tier"],
)
def test_arguments_without_support_are_refused(
    session: Session, settings: dict[str, Any], error: type[Exception]
) -> None:
    module = Mlp()
    with pytest.raises(error, match=next(iter(settings.values()))):
        memd_client.offload(module, session, **settings)
    assert type(module.first.weight) is nn.Parameter


def test_a_pool_below_the_largest_module_is_refused_with_sizes() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(1024, 1024))
    with pytest.raises(
        memd_client.CapacityError, match=r"host_bytes.*'1'.*8 MiB < 14\.0 MiB.*4\.0 MiB"
    ):
        memd_client.offload(module, FakeDaemon(host_bytes=8 << 20).session())
    assert type(module[1].weight) is nn.Parameter


def test_a_failure_while_uploading_leaves_the_module_as_it_was() -> None:
    daemon = FakeDaemon(arena_bytes=6000)
    module, reference = build(Gpt), build(Gpt)
    with pytest.raises(memd_client.CapacityError, match="embedding"):
        memd_client.offload(module, daemon.session())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert torch.equal(loss_of(module), loss_of(reference))
    assert not daemon.leases


def test_a_gradient_or_an_optimizer_from_before_is_refused(session: Session) -> None:
    module = Mlp()
    loss_of(module).backward()
    with pytest.raises(memd_client.InvalidArgument, match="zero_grad"):
        memd_client.offload(module, session)
    module.zero_grad()
    optimizer = memd_client.AdamW(module.parameters(), session=session)
    with pytest.raises(memd_client.InvalidArgument, match="before you make it"):
        memd_client.offload(module, session)
    del optimizer


def test_a_module_that_does_not_fit_while_it_runs_fails_and_leaves_nothing_behind() -> None:
    daemon = FakeDaemon()
    model, reference = memd_client.offload(build(Gpt), daemon.session()), build(Gpt)
    daemon.arena_bytes = 9000
    for _ in range(2):
        with pytest.raises(memd_client.CapacityError, match="raise the job's host_bytes"):
            loss_of(model)
        assert not daemon.leases
    daemon.arena_bytes = None
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_same_gradients(model, reference)


def test_what_was_resident_is_let_go_where_the_rest_of_a_module_cannot_be_fetched(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memd_client.offload(build(Mlp), session)
    weight_id = next(s.shard_id for s in daemon.shards if s.spec.name == "layers.0.weight")

    def lease_resident(shard_id: int, dtype: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        if shard_id != weight_id:
            return None
        # From here on there is room for nothing else.
        lease = daemon.lease(shard_id, PART_VALUE, MODE_READ, dtype, shape, 1.0)
        daemon.arena_bytes = lease.nbytes
        return lease

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "lease_resident", lease_resident)
        with pytest.raises(memd_client.CapacityError, match=r"layers\.0\.bias"):
            loss_of(model)
        assert daemon.leases == {}
        assert type(model.get_parameter("layers.0.weight")) is AwayParameter
    daemon.arena_bytes = None
    assert torch.equal(loss_of(model), loss_of(build(Mlp)))


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_no_more_than_a_block_is_resident_at_a_time(checkpointing: bool | None) -> None:
    daemon = FakeDaemon()
    model = build(lambda: Gpt(checkpointing=checkpointing))
    block_bytes = sum(p.nbytes for p in model.get_submodule("blocks.0").parameters())
    attention = model.get_submodule("blocks.0.attention")
    attention_bytes = sum(p.nbytes for p in attention.parameters())
    root_bytes = model.get_parameter("positions").nbytes
    embedding_bytes = model.get_parameter("embedding.weight").nbytes
    memd_client.offload(model, daemon.session())
    daemon.lease_bytes_max = 0
    loss = loss_of(model)
    assert daemon.lease_bytes_max <= root_bytes + max(attention_bytes, embedding_bytes)
    daemon.lease_bytes_max = 0
    loss.backward()
    # With checkpointing the recomputed block is kept until its backward ends; gradients come atop.
    assert daemon.lease_bytes_max <= block_bytes + root_bytes + 2 * embedding_bytes
    assert not daemon.leases


def test_a_pool_as_small_as_a_layer_is_enough() -> None:
    daemon = FakeDaemon()
    model, reference = memd_client.offload(build(Gpt), daemon.session()), build(Gpt)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    daemon.arena_bytes = 6 * 4096
    for step in range(3):
        for trained, trainer in ((model, optimizer), (reference, expected)):
            loss_of(trained, step).backward()
            trainer.step()
            trainer.zero_grad()
    for (name, parameter), (_, value) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, value), name


def test_changed_buffers_and_only_those_are_part_of_a_step(
    daemon: FakeDaemon, session: Session
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.register_buffer("constant", torch.arange(3))
    module.register_buffer("scratch", torch.zeros(3, dtype=torch.complex64), persistent=False)
    memd_client.offload(module, session)
    optimizer = memd_client.AdamW(module.parameters())
    stored = {shard.spec.name: shard for shard in daemon.shards}
    assert torch.equal(stored["constant"].bytes_held, torch.arange(3))
    assert "scratch" not in stored
    module(torch.randn(8, 4)).sum().backward()
    assert not stored["1.running_mean"].bytes_held.any(), "only a step changes what is stored"
    optimizer.step()
    assert session.committed_step == 1
    assert torch.equal(stored["1.running_mean"].bytes_held, module.get_buffer("1.running_mean"))
    assert stored["1.num_batches_tracked"].bytes_held.item() == 1
    module(torch.randn(8, 4))
    optimizer.step()
    assert daemon.calls.count("step") == 1, "without a gradient there is no step"


def test_a_sparse_gradient_is_refused(session: Session) -> None:
    model = memd_client.offload(nn.Embedding(8, 4, sparse=True), session)
    with pytest.raises(memd_client.InvalidArgument, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "in the order of its shape": lambda: torch.randn(6, 4),
    "transposed": lambda: torch.randn(4, 6).T,
    "expanded": lambda: torch.randn(1, 4).expand(6, 4),
    "inside of another": lambda: torch.randn(6, 9)[:, 2:6],
    "with its sign to be turned": lambda: torch._neg_view(torch.randn(6, 4)),
    "of a class of its own": lambda: nn.Buffer(torch.randn(6, 4)),
    "without memory": lambda: torch._efficientzerotensor((6, 4)),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_a_gradient_comes_in_any_layout(
    gradient: Callable[[], torch.Tensor], session: Session
) -> None:
    model = memd_client.offload(nn.Linear(4, 6, bias=False), session)
    given = gradient()
    model.weight.grad = given
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.empty(6, 4).copy_(given))


def test_a_gradient_that_torch_copies_is_whole(session: Session) -> None:
    model = memd_client.offload(nn.Linear(1300, 1000, bias=False), session)
    given = torch.randn(1000, 1300)
    assert given.nbytes > 4 << 20
    model.weight.grad = given
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, given)


def test_a_gradient_without_room_is_refused_by_its_name(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(nn.Linear(4, 6, bias=False), session)
    daemon.arena_bytes = 0
    with pytest.raises(memd_client.CapacityError, match=r"shard 'weight'.*free tensors"):
        model.weight.grad = torch.randn(6, 4)
    daemon.arena_bytes = None
    assert model.weight.grad is None


def test_backward_asks_for_the_first_slots_when_it_begins(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    loss = loss_of(model)
    assert daemon.asked_ahead == [], "nobody knows the order in the first backward"
    loss.backward()
    assert sorted(daemon.asked_ahead[0]) == sorted(name for name, _ in model.named_parameters())


def test_backward_asks_for_no_first_slot_while_a_step_is_on_its_way(
    daemon: FakeDaemon, session: Session
) -> None:
    class OnItsWay(NoStep):
        def settle_answered(self) -> bool:
            return True

    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    loss = loss_of(model)
    session.leases.follow_steps(OnItsWay())
    loss.backward()
    assert len(daemon.asked_ahead[0]) == 3, "after the first gradient"


def test_no_slot_is_asked_for_whose_gradient_an_open_step_has(
    daemon: FakeDaemon, session: Session
) -> None:
    first, second = Mlp(), Mlp()
    for name, model in (("first", first), ("second", second)):
        memd_client.offload(nn.ModuleDict({name: model}), session)
    optimizers = [memd_client.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
    session.track(rng=True)
    for _ in range(2):
        daemon.asked_ahead.clear()
        loss_of(first).backward()
        optimizers[0].step()
        sealed_count = len(daemon.asked_ahead)
        loss_of(second).backward()
        assert not any(
            name.startswith("first.")
            for names in daemon.asked_ahead[sealed_count:]
            for name in names
        )
        optimizers[1].step()
        session.commit()


def test_a_gradient_without_memory_of_its_own_comes_by_backward(session: Session) -> None:
    model = memd_client.offload(nn.Linear(4, 6, bias=False), session)
    (torch.ones(6, 4) * torch.sgn(model.weight)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.zeros(6, 4))


def test_a_failed_step_keeps_the_gradients(daemon: FakeDaemon, session: Session) -> None:
    model, reference = memd_client.offload(Mlp(), session), Mlp()
    reference.load_state_dict(model.state_dict())
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()

    daemon.step_failures.append(from_code(6, "writing at 4096: Input/output error", 5))
    optimizer.step()
    optimizer.zero_grad()  # what the step has taken stays the step's
    with pytest.raises(
        memd_client.DeviceError, match=r"step 1 was not committed.*Input/output"
    ) as caught:
        loss_of(model)
    assert caught.value.errno == 5
    assert session.committed_step == 0
    optimizer.step()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    loss_of(reference).backward()
    expected.step()
    assert torch.equal(model.first.weight, reference.first.weight)


def test_a_gradient_that_is_held_while_its_step_fails_is_still_the_gradient(
    daemon: FakeDaemon, session: Session
) -> None:
    model, reference = memd_client.offload(Mlp(), session), Mlp()
    reference.load_state_dict(model.state_dict())
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    for module in (model, reference):
        loss_of(module).backward()
    held = model.first.weight.grad
    assert held is not None
    part = held[1:]
    daemon.step_failures.append(from_code(5, "the disk is full"))
    optimizer.step()
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        session.commit()
    assert model.first.weight.grad is held
    part.mul_(3)
    assert reference.first.weight.grad is not None
    reference.first.weight.grad[1:].mul_(3)
    optimizer.step()
    torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True).step()
    assert torch.equal(model.first.weight, reference.first.weight)
    assert torch.equal(held, reference.first.weight.grad)


def test_a_gradient_of_an_earlier_step_is_none_of_a_step_that_fails(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    held = model.first.weight.grad
    assert held is not None
    value = held.clone()
    optimizer.step()
    loss_of(model, 1).backward()  # nobody reads this gradient
    daemon.step_failures.append(from_code(5, "the disk is full"))
    optimizer.step()
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        session.commit()
    assert torch.equal(held, value)
    assert model.first.weight.grad is not held


def test_a_change_of_a_gradient_that_is_held_outlives_its_step_that_fails(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    held = model.first.weight.grad
    assert held is not None
    expected = held * 5
    daemon.step_failures.append(from_code(5, "the disk is full"))
    optimizer.step()
    held.mul_(5)
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        session.commit()
    assert torch.equal(held, expected)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_failed_step_under_a_grad_scaler_is_made_again_with_the_same_gradients(
    daemon: FakeDaemon, session: Session, *, offloaded: bool
) -> None:
    model, reference = Mlp(), Mlp()
    reference.load_state_dict(model.state_dict())
    if offloaded:
        memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    scaler, its_scaler = (torch.amp.GradScaler("cpu", init_scale=3000.0) for _ in range(2))
    for step in range(2):
        scaler.scale(loss_of(model, step)).backward()
        daemon.step_failures.append(from_code(5, "the disk is full"))
        if offloaded:
            scaler.step(optimizer)
            scaler.update()
        with pytest.raises(memd_client.CapacityError, match="not committed"):
            session.commit() if offloaded else scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        its_scaler.scale(loss_of(reference, step)).backward()
        its_scaler.step(expected)
        its_scaler.update()
        expected.zero_grad()
        assert torch.equal(model.first.weight, reference.first.weight)
    assert session.committed_step == 2


def test_a_step_with_infs_that_fails_counts_once(daemon: FakeDaemon, session: Session) -> None:
    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model) * float("inf")).backward()
    daemon.step_failures.append(from_code(5, "the disk is full"))
    scaler.step(optimizer)
    with pytest.raises(memd_client.CapacityError, match="not committed"):
        session.commit()
    scaler.update()
    assert session.committed_step == 0
    scaler.step(optimizer)
    assert session.committed_step == 1


def test_a_failed_commit_gives_the_gradients_back(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = memd_client.offload(Mlp(), session), Mlp()
    reference.load_state_dict(model.state_dict())
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    session.track(rng=True)
    loss_of(model).backward()
    optimizer.step()

    def not_sent(_: Any) -> None:
        raise from_code(10, "the channel is closed")

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "begin_step", not_sent)
        with pytest.raises(memd_client.DaemonUnavailable, match="the channel is closed"):
            session.commit()
    with pytest.raises(memd_client.InvalidArgument, match="commit"):
        loss_of(model)  # the step is open as before
    daemon.step_failures.append(from_code(5, "the disk is full"))
    with pytest.raises(memd_client.CapacityError, match=r"step 1 was not committed.*is full"):
        session.commit(wait=True)
    optimizer.step()
    session.commit()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    loss_of(reference).backward()
    expected.step()
    assert torch.equal(model.first.weight, reference.first.weight)
    assert session.committed_step == 1


def test_zero_grad_tells_the_daemon_only_of_gradients_there_are(
    daemon: FakeDaemon, session: Session
) -> None:
    model = memd_client.offload(Mlp(), session)
    optimizer = memd_client.AdamW(model.parameters())
    optimizer.zero_grad()
    assert "drop_gradients" not in daemon.calls
    loss_of(model).backward()
    optimizer.zero_grad()
    optimizer.zero_grad()
    assert daemon.calls.count("drop_gradients") == 1
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert daemon.calls.count("drop_gradients") == 1


def test_bf16_models_have_the_bits_of_the_untouched_model(session: Session) -> None:
    model, reference = build(Mlp).bfloat16(), build(Mlp).bfloat16()
    memd_client.offload(model, session)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    for _ in range(2):
        for module in (model, reference):
            module(x).float().square().mean().backward()
    assert_same_gradients(model, reference)


def test_a_warning_says_that_gradients_spill(
    daemon: FakeDaemon, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.gradients_fit = False
    memd_client.offload(nn.Sequential(Mlp(), Mlp()), session)
    assert [record.message for record in caplog.records] == [
        "job 'fake': its host memory (1 GiB) cannot hold all gradients, so some go to disk in "
        "every step; raise host_bytes to make it faster"
    ]


def test_a_change_that_leaves_the_bytes_as_they_were_is_not_written(
    session: Session, daemon: FakeDaemon
) -> None:
    """An embedding with `max_norm` changes its weight in each call."""
    embedding = memd_client.offload(nn.Embedding(8, 4, max_norm=1.0), session)
    synced = []
    for _ in range(2):
        embedding(torch.arange(8))
        synced.append(daemon.synced)
        session.commit()
    assert synced == [False, True], "only the first call finds rows that are too long"


def test_without_private_reads_a_write_while_the_parameter_is_away_is_refused(
    session: Session, daemon: FakeDaemon
) -> None:
    """The daemon has reserved huge pages."""
    model = memd_client.offload(build(Mlp), session)
    daemon.reads_privately = False
    with torch.no_grad():
        model.get_parameter("layers.0.weight")[0].zero_()
    with pytest.raises(
        memd_client.MemdError, match=r"'layers\.0\.weight' was written.*while.*lost"
    ):
        loss_of(model)
    loss_of(model)
