"""Copies on a device grow to what steps leave free, and shrink when memory runs out."""

from __future__ import annotations

import gc
import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memd_client
from memd_client.device import budget
from memd_client.device.copies import DeviceCopies
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, RATE, Loop, batch, reference
from tests.device.offloaded_models import MODELS, build
from tests.device.simulation import SIM
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session
    from memd_client.device.device_range import DeviceRange
    from tests.daemons import Daemon

SEEDS = (2, pytest.param(10, marks=pytest.mark.soak))
# All of them beside what a step needs besides, which is less than 250 kB.
_ROOMY_BYTES = 2_000_000
# The largest layer and 25 %.
LEAST_BYTES = 47104
ALL_BYTES = 274944
# So much of parameters beside what a step needs, and what a batch takes then.
_LIMIT_BYTES = 700_000
_WANTED_BYTES = 500_000


class Deep(nn.Module):
    """Its parameters have 275 kB, and its largest layer needs 48."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, *[96] * 8, 8)
        self.layers = nn.ModuleList(
            nn.Linear(first, second) for first, second in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.square().mean()


class _Hungry(torch.autograd.Function):
    """Takes memory in forward or backward, and gives it back: on a stream of its own, so that small
    tensors do not split it. torch's types know neither the fields of `ctx` nor what `apply`
    takes."""

    @staticmethod
    def forward(
        ctx: object, x: Tensor, forward_bytes: int, backward_bytes: int, stream: torch.Stream
    ) -> Tensor:
        ctx.backward = backward_bytes, stream  # type: ignore[attr-defined]
        with stream:
            torch.empty(forward_bytes, dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        backward_bytes, stream = ctx.backward  # type: ignore[attr-defined]
        with stream:
            torch.empty(backward_bytes, dtype=torch.uint8, device=gradients[0].device)
        return gradients[0], None, None, None


class Hungry(nn.Module):
    """Between its layers it takes memory when it is told to."""

    def __init__(self, name: str = "model") -> None:
        super().__init__()
        self._name = name  # of its parameters in the job
        self.add_module(name, build("deep"))
        self._bytes = (0, 0)
        self._stream = torch.Stream(device="sim")
        self.layer().register_forward_hook(self._take)

    def layer(self) -> nn.Module:
        return self.get_submodule(f"{self._name}.layers.1")

    def take(self, *, forward_bytes: int = 0, backward_bytes: int = 0) -> None:
        self._bytes = forward_bytes, backward_bytes

    def _take(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        del module, inputs
        taken: Tensor = _Hungry.apply(output, *self._bytes, self._stream)  # type: ignore[no-untyped-call]
        return taken

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.get_submodule(self._name)(x)
        return loss


@dataclass
class Training:
    """Steps of a model, which repeat a batch for which memory ran out."""

    model: Hungry
    session: Session
    before_step: Callable[[], None] = lambda: None
    loop: Loop = LOOPS[0]  # of which only the number of backwards counts
    losses: list[Tensor] = field(default_factory=list)
    ran_out: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = memd_client.AdamW(self.model.parameters(), lr=RATE, session=self.session)

    def step(self, **hungry: int) -> None:
        """With the last of its backwards the model is hungry."""
        number = len(self.losses) // self.loop.backwards
        for is_again in (False, True):
            try:
                losses = self._backwards(**hungry)
                break
            except torch.OutOfMemoryError:
                assert not is_again
                self.ran_out.append(number)
            # No exception keeps leases, and torch may give all that is freed to others.
            torch.accelerator.synchronize()
            self._optimizer.zero_grad()
        self.losses += losses
        self.before_step()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backwards(self, **hungry: int) -> list[Tensor]:
        losses: list[Tensor] = []
        for part in range(self.loop.backwards):
            self.model.take(**hungry if part == self.loop.backwards - 1 else {})
            loss = self.model(batch(len(self.losses) + part).to("sim"))
            loss.backward()
            losses.append(loss.detach())
        return losses

    def steps(self, count: int, **hungry: int) -> None:
        for _ in range(count):
            self.step(**hungry)

    def is_as_without_memd(self) -> bool:
        found = [each.cpu() for each in (*self.losses, *self.model.state_dict().values())]
        with SIM.limit(1 << 30):
            steps = len(self.losses) // self.loop.backwards
            return are_equal(found, reference("deep", self.loop, "sim", steps))


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "deep", Deep)


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """No test has memory that others have left."""
    gc.collect()
    torch.accelerator.empty_cache()
    yield
    gc.collect()


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def training(
    session: Session, device_bytes: int | None = None, name: str = "model", **more: Any
) -> Training:
    model = Hungry(name)
    memd_client.offload(model, session, device="sim", device_bytes=device_bytes)
    return Training(model, session, **more)


def copies(session: Session, number: int = 0) -> DeviceCopies:
    """Those of one of the session's models."""
    traffic: Any = session.leases.devices._traffic[number]
    found: DeviceCopies = traffic._copies
    return found


def limited(limit_bytes: int) -> Any:
    """So much beside what is reserved now."""
    return SIM.limit(torch.accelerator.memory_reserved() + limit_bytes)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("where", ["forward_bytes", "backward_bytes"])
def test_a_batch_for_which_memory_ran_out_can_be_run_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, where: str, seeds: int
) -> None:
    """torch would keep the range for the stream of copies, and split it for the next."""
    for seed in range(seeds):
        SIM.seed(seed)
        torch.accelerator.empty_cache()
        with limited(_LIMIT_BYTES), connected(daemon, monkeypatch) as session:
            trained = training(session, ALL_BYTES)
            trained.steps(2)
            trained.step(**{where: _WANTED_BYTES})
            assert trained.ran_out == [2]
            assert copies(session).held_bytes == LEAST_BYTES
            trained.steps(2)
            assert trained.is_as_without_memd()
            del trained
            gc.collect()


def test_what_nobody_has_chosen_grows_to_what_steps_leave(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 4)
    with limited(_ROOMY_BYTES):
        trained = training(session)
        first_bytes = copies(session).size_bytes
        assert first_bytes == LEAST_BYTES
        sizes = []
        for _ in range(40):
            trained.step()
            sizes.append(copies(session).size_bytes)
        assert sizes[3] == first_bytes
        assert sorted(sizes) == sizes
        assert len(set(sizes)) > 2  # in steps
        assert sizes[-1] > 3 * LEAST_BYTES
        assert trained.is_as_without_memd()


def test_what_nobody_has_chosen_leaves_a_part_of_what_others_have_not_needed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is longer than all before finds it."""
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 2)
    limit_bytes = 500_000
    with limited(limit_bytes):
        trained = training(session)
        trained.steps(20)
        assert copies(session).size_bytes > LEAST_BYTES
        trained.step(forward_bytes=140_000)
        assert not trained.ran_out
        assert trained.is_as_without_memd()


@pytest.mark.parametrize(
    ("rounds", "most_bytes"),
    [(budget._CALM_ROUNDS - 1, 600_000), (3 * budget._CALM_ROUNDS, 760_000)],
)
def test_a_part_of_what_others_have_not_needed_stays_free(
    monkeypatch: pytest.MonkeyPatch, rounds: int, most_bytes: int
) -> None:
    """A quarter of 800 kB, and a twentieth once others have needed no more for long. By torch's
    statistics of a device on which nobody else changes anything."""
    total_bytes, others_bytes = 1_000_000, 200_000
    size_bytes = LEAST_BYTES
    monkeypatch.setattr(
        torch.accelerator,
        "memory_stats",
        lambda _: {"reserved_bytes.all.current": others_bytes + size_bytes},
    )
    monkeypatch.setattr(
        torch.accelerator,
        "get_memory_info",
        lambda _: (total_bytes - others_bytes - size_bytes, total_bytes),
    )
    found = budget.DeviceBudget(
        torch.device("sim", 0), least_bytes=LEAST_BYTES, most_bytes=total_bytes, chosen_bytes=None
    )
    for _ in range(rounds):
        found.note_use()
        found.note_step(held_bytes=size_bytes, kept_bytes=0, sum_bytes=0)
        size_bytes = found.size_bytes
    # It grows no more for an eighth of itself, and is rounded up to 512 bytes.
    assert most_bytes * 8 // 9 <= size_bytes < most_bytes + 512


def test_a_batch_that_needs_more_begins_the_long_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    total_bytes, others_bytes = 1_000_000, 100_000
    size_bytes = LEAST_BYTES
    monkeypatch.setattr(
        torch.accelerator,
        "memory_stats",
        lambda _: {"reserved_bytes.all.current": others_bytes + size_bytes},
    )
    monkeypatch.setattr(
        torch.accelerator,
        "get_memory_info",
        lambda _: (total_bytes - others_bytes - size_bytes, total_bytes),
    )
    found = budget.DeviceBudget(
        torch.device("sim", 0), least_bytes=LEAST_BYTES, most_bytes=total_bytes, chosen_bytes=None
    )
    for number in range(2 * budget._CALM_ROUNDS - 10):
        if number == budget._CALM_ROUNDS - 5:
            others_bytes = 200_000
        found.note_use()
        found.note_step(held_bytes=size_bytes, kept_bytes=0, sum_bytes=0)
        size_bytes = found.size_bytes
    assert size_bytes < 675_000 + 512  # three quarters of what the first batches have left


def test_a_smaller_range_lies_in_no_part_of_the_larger_one(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks of users on idle streams pass at once, and then torch may split what they used."""
    plain = DeviceCopies._leave_for

    def leave_for(found: DeviceCopies, new: DeviceRange) -> None:
        plain(found, new)
        torch.accelerator.synchronize()

    monkeypatch.setattr(DeviceCopies, "_leave_for", leave_for)
    with limited(_LIMIT_BYTES):
        trained = training(session, ALL_BYTES)
        trained.steps(2)
        trained.step(forward_bytes=_WANTED_BYTES)
        assert trained.ran_out == [2]
        assert trained.is_as_without_memd()


def test_short_batches_do_not_take_the_memory_of_longer_ones(session: Session) -> None:
    with limited(500_000):
        trained = training(session)
        trained.step()
        trained.steps(3, forward_bytes=250_000)
        trained.steps(2 * budget._STEADY_ROUNDS)
        trained.steps(3, forward_bytes=250_000)
        assert not trained.ran_out
        assert trained.is_as_without_memd()


@pytest.mark.parametrize("empties", [False, True])
def test_a_program_may_reset_what_torch_counts(
    session: Session, monkeypatch: pytest.MonkeyPatch, empties: bool
) -> None:
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 1)

    def log_memory() -> None:
        if empties:
            torch.accelerator.empty_cache()
        else:
            torch.accelerator.reset_accumulated_memory_stats()
        torch.accelerator.reset_peak_memory_stats()

    with limited(500_000):
        trained = training(session, before_step=log_memory)
        trained.steps(10, forward_bytes=250_000)
        assert not trained.ran_out
        assert trained.is_as_without_memd()


def test_a_model_does_not_take_the_memory_of_one_that_was_not_used_yet(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 2)
    first, second = (training(session, name=name) for name in ("first", "second"))
    first.steps(12)
    assert copies(session, 0).size_bytes > LEAST_BYTES
    assert copies(session, 1).size_bytes == LEAST_BYTES
    second.steps(12)
    assert copies(session, 1).size_bytes > LEAST_BYTES


def test_two_models_in_turn_fit_beside_each_other(session: Session) -> None:
    with limited(650_000):
        first, second = (training(session, name=name) for name in ("first", "second"))
        for _ in range(budget._STEADY_ROUNDS + 4):
            first.step()
            second.step(forward_bytes=250_000)
        assert not first.ran_out
        assert not second.ran_out


def test_memory_that_ran_out_before_the_first_step_lets_the_copies_grow_later(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a program looks for the largest batch that fits."""
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 2)
    stream = torch.Stream(device="sim")
    with limited(_ROOMY_BYTES):
        trained = training(session)
        with stream:
            activations = torch.empty(1_850_000, dtype=torch.uint8, device="sim")
        trained.model.take(forward_bytes=_ROOMY_BYTES)
        with pytest.raises(torch.OutOfMemoryError):
            trained.model(batch(0).to("sim"))
        trained.model.zero_grad()
        del activations  # torch keeps their memory
        trained.steps(20)
        assert copies(session).size_bytes > LEAST_BYTES
        assert trained.is_as_without_memd()


def test_a_size_that_was_chosen_comes_back_after_memory_ran_out(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memd_client")
    with limited(_LIMIT_BYTES):
        trained = training(session, ALL_BYTES)
        trained.steps(2)
        assert not caplog.records
        trained.step(forward_bytes=_WANTED_BYTES)
        assert trained.ran_out == [2]
        assert copies(session).size_bytes == LEAST_BYTES
        trained.steps(12)
        assert copies(session).size_bytes == ALL_BYTES
        assert trained.ran_out == [2]
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        assert "memory of sim:0 ran out" in caplog.messages[0]
        assert trained.is_as_without_memd()


def test_copies_that_could_not_grow_begin_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has taken the device's memory since the last use."""
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 1)
    trained = training(session)
    plain, step = torch.accelerator.get_memory_info, memd_client.AdamW.step
    # The driver's answer is outdated.
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda device: (1 << 30, plain(device)[1])
    )
    sizes = []

    def crowded(optimizer: memd_client.AdamW) -> None:
        with SIM.limit(1000):
            step(optimizer)
        sizes.append(copies(session).size_bytes)

    monkeypatch.setattr(memd_client.AdamW, "step", crowded)
    trained.steps(10)
    assert set(sizes) == {LEAST_BYTES, 0}
    assert not trained.ran_out
    assert trained.is_as_without_memd()


def test_copies_that_could_not_grow_try_again_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's statistics: all copies are made anew each time."""
    refused_count, tried = 0, list[int]()
    monkeypatch.setattr(
        torch.accelerator,
        "memory_stats",
        lambda _: {"reserved_bytes.all.current": 2 * LEAST_BYTES, "num_ooms": refused_count},
    )
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (1_000_000, 2_000_000))
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 8)
    found = budget.DeviceBudget(
        torch.device("sim", 0), least_bytes=LEAST_BYTES, most_bytes=1_000_000, chosen_bytes=None
    )
    for number in range(64):
        found.note_use()
        found.note_step(held_bytes=LEAST_BYTES, kept_bytes=0, sum_bytes=0)
        if found.size_bytes > LEAST_BYTES:
            tried.append(number)
            refused_count += 1
            found.note_size(LEAST_BYTES)
    assert tried == [8, 8 + 16, 8 + 16 + 32]


def keep_weights(trained: Training, kept: list[Tensor]) -> None:
    """From the next use on somebody has a tensor over the memory of one parameter."""
    layer = trained.model.layer()

    def keep(module: nn.Module, _: object) -> None:
        kept.append(module.get_parameter("bias").detach())
        hook.remove()

    hook = layer.register_forward_pre_hook(keep)


def test_a_tensor_that_is_kept_keeps_one_range(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_STEADY_ROUNDS", 1)
    kept: list[Tensor] = []
    with limited(_ROOMY_BYTES):
        trained = training(session)
        for _ in range(5):
            keep_weights(trained, kept)  # of each range
            trained.steps(4)
        found = copies(session)
        assert len(found._left) == 1
        assert found.held_bytes == found.size_bytes + LEAST_BYTES
        kept.clear()
        trained.steps(10)
        assert not found._left
        assert trained.is_as_without_memd()


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_dropped_though_there_is_no_room_for_the_least(
    session: Session, keeps: bool
) -> None:
    """A range that a tensor keeps is used as before."""
    kept: list[Tensor] = []
    with limited(_LIMIT_BYTES):
        trained = training(session, ALL_BYTES)
        if keeps:
            keep_weights(trained, kept)
        trained.steps(2)
        trained.model.take(backward_bytes=_WANTED_BYTES)
        with suppress(torch.OutOfMemoryError):  # nobody keeps it, and so no lease
            trained.model(batch(2).to("sim")).backward()
            pytest.fail("there was room")
        torch.accelerator.empty_cache()
        with SIM.limit(0):
            trained._optimizer.zero_grad()
            if keeps:
                with memd_client.gather(trained.model.layer()):
                    pass
        assert copies(session).size_bytes == (ALL_BYTES if keeps else 0)
        trained.steps(2)
        kept.clear()
        trained.steps(2)
        assert not trained.ran_out
        assert trained.is_as_without_memd()


def test_memory_of_a_range_that_was_left_waits_for_its_last_users(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second stream has come to use it since."""
    for seed in range(5):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            trained = training(session, ALL_BYTES)
            layer = trained.model.layer()
            inputs, side = torch.ones(8, 96, device="sim"), torch.Stream(device="sim")
            size_bytes = copies(session).size_bytes
            with torch.no_grad(), memd_client.gather(layer):
                layer(inputs)
                copies(session).resize(2 * size_bytes)
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    layer(inputs)
            gc.collect()
            assert copies(session).held_bytes == 2 * size_bytes
            torch.accelerator.current_stream().synchronize()
            for _ in range(32):  # all streams, and so the one that copies
                with torch.Stream(device="sim"):
                    torch.empty(size_bytes, dtype=torch.uint8, device="sim")
            torch.accelerator.synchronize()
            del trained, layer


def test_statistics_of_the_device_are_asked_for_once_a_call(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = training(session, _ROOMY_BYTES)
    plain, calls = torch.accelerator.memory_stats, list[Any]()

    def memory_stats(*arguments: Any) -> Any:
        calls.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)
    with memd_client.gather(trained.model):
        assert len(calls) == 1
