"""Gradients of several backwards, whose sum is made on the device where there is room for it, with
a real daemon.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import memd_client
from memd_client.core.leases import MODE_WRITE
from memd_client.device import budget, departed_gradients
from memd_client.device.departed_gradients import DepartedGradients
from memd_client.device.departures import Departures
from memd_client.device.kept_gradients import KeptGradients
from memd_client.parameters.parameter import streamed
from tests.device.models import are_equal
from tests.device.offloaded import RATE, Loop, batch, reference
from tests.device.offloaded_models import MODELS, Mlp, build
from tests.device.simulation import SIM
from tests.device.test_budget import ALL_BYTES, Deep, Hungry, Training, limited
from tests.device.test_clipping import (
    NORM,
    HalvedInPart,
    Plain,
    backward,
    gradients,
)
from tests.device.test_offload import Shifted
from tests.device.test_scaled import assert_same as assert_same_scaled
from tests.device.test_scaled import backward as scaled_backward
from tests.device.test_waited_for import held_until_waited_for, leases_of
from tests.device.trained import connected, trained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session
    from memd_client.connection.shard import Shard
    from tests.daemons import Daemon
    from tests.device.test_clipping import Clip

    # Makes the gradients of the step of this number; returns the tensors that it sees.
    Program = Callable[[nn.Module, Clip, int], list[Tensor]]

SEEDS = (1, pytest.param(10, marks=pytest.mark.soak))
STEPS = 4
_ROOMY_BYTES = 1 << 20


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


@pytest.fixture(autouse=True)
def lent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step."""
    monkeypatch.setattr(budget, "_STEADY_ROUNDS_CHOSEN", 0)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many were made where."""
    counts = Counter[str]()
    plain_add, plain_total = Departures.add, DepartedGradients.total

    def add(*args: Any) -> None:
        counts["host"] += 1
        plain_add(*args)

    def total(*args: Any) -> Tensor | None:
        found = plain_total(*args)
        counts["device"] += found is not None
        return found

    monkeypatch.setattr(Departures, "add", add)
    monkeypatch.setattr(DepartedGradients, "total", total)
    return counts


def kept_by(model: nn.Module) -> KeptGradients:
    return leases_of(model)._departed.kept


def found_in(
    model: nn.Module, program: Program, clip: Clip, step: Callable[[], object]
) -> list[Tensor]:
    """Tensors that the program sees, and the values after some steps, on the host."""
    found: list[Tensor] = []
    for number in range(STEPS):
        found += program(model, clip, number)
        step()
    return [each.cpu() for each in (*found, *model.state_dict().values())]


def assert_same(session: Session, program: Program, model: str = "mlp") -> None:
    plain = Plain(build(model).to("sim"))
    expected = found_in(plain.model, program, plain.clip, plain.step)
    module, optimizer = with_memd(session, model)
    found = found_in(module, program, optimizer.clip_grad_norm_, optimizer.step)
    assert are_equal(found, expected)


def with_memd(session: Session, model: str = "mlp") -> tuple[nn.Module, memd_client.AdamW]:
    module = memd_client.offload(build(model), session, device="sim", device_bytes=_ROOMY_BYTES)
    return module, memd_client.AdamW(module.parameters(), lr=RATE, session=session)


def backwards(model: nn.Module, number: int, count: int) -> None:
    for part in range(count):
        backward(model, 8 * number + part)


def twice(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    backwards(model, number, 2)
    return []


def three_times(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    backwards(model, number, 3)
    return []


def ever_others(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """Fewer or more than in the step before."""
    backwards(model, number, (2, 4, 1, 3)[number])
    return [clip(NORM)]


def clipped(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    backwards(model, number, 3)
    return [clip(NORM), clip(NORM / 2)]


def clipped_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    backwards(model, number, 2)
    first = clip(NORM)
    backward(model, 7)
    second = clip(NORM)
    backward(model, 6)
    return [first, second]


def clipped_and_read_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """The thread multiplies when they are read."""
    backward(model, number)
    found = [clip(NORM), *gradients(model)]
    backward(model, 7)
    return found


def read_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    backward(model, number)
    found = gradients(model)
    backward(model, 7)
    return [*found, *gradients(model)]


@torch.no_grad()
def multiplied_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    with torch.enable_grad():
        backward(model, number)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(3)
    with torch.enable_grad():
        backward(model, 7)
    return []


def replace(model: nn.Module) -> list[Tensor]:
    held = []
    for parameter in model.parameters():
        held.append(torch.full(parameter.shape, 3.0, device=parameter.device))
        parameter.grad = held[-1]
    return held


def replaced_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    backward(model, number)
    replace(model)
    backward(model, 7)
    return []


def replaced_in_some(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """In place of what would be the last one."""
    del clip
    backward(model, number)
    if number % 2:
        replace(model)
    backward(model, 7)
    return []


def replaced_and_changed(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    backward(model, number)
    held = replace(model)
    for each in held:
        each.add_(1)
    backward(model, 7)
    return held


def replaced_on_the_host(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """As far as torch admits it."""
    del clip
    backward(model, number)
    for parameter in model.parameters():
        is_streamed = streamed(parameter) is not None
        parameter.grad = torch.full(
            parameter.shape, 3.0, device="cpu" if is_streamed else parameter.device
        )
    backward(model, 7)
    return []


def dropped_in_part(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    backward(model, number)
    next(model.parameters()).grad = None
    backward(model, 7)
    return [clip(NORM)]


def dropped_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    backwards(model, number, 2)
    model.zero_grad()
    backwards(model, 7, 2)
    return [clip(NORM)]


def set_to_zero_between(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    backward(model, number)
    model.zero_grad(set_to_none=False)
    backward(model, 7)
    return [clip(NORM)]


def of_one_graph(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    del clip
    loss = model(batch(number).to("sim", non_blocking=True))
    for keeps in (True, True, False):
        loss.backward(retain_graph=keeps)
    return []


def with_memory_held(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """Sums are made in the memory that somebody sees."""
    backward(model, number)
    held = [each.grad.untyped_storage() for each in model.parameters() if each.grad is not None]
    backward(model, 7)
    found = [torch.empty(0, device=each.device).set_(each).clone() for each in held]
    del held
    gc.collect()
    backward(model, 6)
    return [*found, clip(NORM)]


def on_another_stream(model: nn.Module, clip: Clip, number: int) -> list[Tensor]:
    """The first stream gets memory as soon as nobody has it."""
    here, side = torch.accelerator.current_stream(), torch.Stream(device="sim")
    backward(model, number)
    torch.accelerator.synchronize()  # copies to the host have passed
    side.wait_stream(here)
    with side:
        backward(model, 7)
    held = [
        torch.full(parameter.shape, 7.0, device="sim")
        for parameter in model.parameters()
        for _ in range(4)
    ]
    here.wait_stream(side)
    return [clip(NORM), *held]


PROGRAMS = (
    *(twice, three_times, ever_others, clipped, clipped_between, clipped_and_read_between),
    *(read_between, multiplied_between, replaced_between, replaced_in_some),
    *(replaced_and_changed, replaced_on_the_host, dropped_in_part, dropped_between),
    *(set_to_zero_between, of_one_graph, with_memory_held, on_another_stream),
)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_bits_of_torch_on_the_device(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, program: Program, seeds: int
) -> None:
    for seed in range(seeds):
        SIM.seed(seed)
        with connected(daemon, monkeypatch) as session:
            assert_same(session, program)


@pytest.mark.parametrize("model", ["gpt", "experts", "lora", "bf16", "in part", "shifted"])
def test_other_models(session: Session, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Some parameters have no gradient, have two uses, are frozen, or are of another type; or their
    gradients are in memory that autograd adds to."""
    monkeypatch.setitem(MODELS, "in part", HalvedInPart)
    monkeypatch.setitem(MODELS, "shifted", Shifted)
    assert_same(session, clipped_between, model)


def unscaled_after(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaled_backward(model, scaler, 0)
    scaled_backward(model, scaler, 2)
    scaler.unscale_(optimizer)
    norm = clip(NORM)
    scaler.step(optimizer)
    return [norm]


def unscaled_between(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, clip: Clip
) -> list[Tensor]:
    scaled_backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    scaled_backward(model, scaler, 2)
    norm = clip(NORM)
    scaler.step(optimizer)
    return [norm]


@pytest.mark.parametrize("program", [unscaled_after, unscaled_between])
def test_a_program_with_a_scaler_has_the_bits_of_torch_on_the_device(
    session: Session, program: Any
) -> None:
    assert_same_scaled(session, program)


@pytest.mark.parametrize("budget_name", ["least", "all"])
@pytest.mark.parametrize(
    ("model", "loop"),
    [
        ("mlp", Loop("accumulated", backwards=3)),
        ("gpt", Loop("computed again", backwards=3, has_checkpoints=True)),
        ("gpt", Loop("saved", backwards=2, activations="host")),
        ("mlp", Loop("autocast", backwards=3, autocast=torch.bfloat16)),
        ("mlp", Loop("scaled", backwards=2, autocast=torch.float16, scale=2.0**23)),
    ],
    ids=str,
)
def test_loops_have_the_bits_of_loops_without_memd(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, model: str, loop: Loop, budget_name: str
) -> None:
    expected = reference(model, loop, "sim")
    assert are_equal(trained(daemon, monkeypatch, model, budget_name, loop), expected)


class Joined(nn.Module):
    """One loss of parts on two devices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.first(x).to("sim:1") + self.second(x.to("sim:1"))
        return loss


def test_two_devices_in_one_backward(session: Session) -> None:
    there, module = Joined(), Joined()
    for name, device in (("first", "sim:0"), ("second", "sim:1")):
        there.get_submodule(name).to(device)
        holder = nn.ModuleDict({name: module.get_submodule(name)})
        memd_client.offload(holder, session, device=device, device_bytes=_ROOMY_BYTES)
    plain = Plain(there)
    expected = found_in(there, clipped, plain.clip, plain.step)
    optimizer = memd_client.AdamW(module.named_parameters(), lr=RATE, session=session)
    found = found_in(module, clipped, optimizer.clip_grad_norm_, optimizer.step)
    assert are_equal(found, expected)


class TestWhereSumsAreMade:
    def test_on_the_device_once_a_step_has_shown_that_there_are_any(
        self, session: Session, sums: Counter[str]
    ) -> None:
        model, optimizer = with_memd(session)
        count = sum(1 for _ in model.parameters())
        found = []
        for number in range(STEPS):
            sums.clear()
            backwards(model, number, 3)
            found.append(dict(sums))
            optimizer.step()
        first, later = {"host": 2 * count, "device": 0}, {"device": 2 * count}
        assert found == [first, *[later] * (STEPS - 1)]

    def test_on_the_host_for_those_that_the_step_before_had_not(
        self, session: Session, sums: Counter[str]
    ) -> None:
        model, optimizer = with_memd(session)
        count = sum(1 for _ in model.parameters())
        for number, parts in enumerate((2, 4, 1, 2)):
            sums.clear()
            backwards(model, number, parts)
            optimizer.step()
        assert sums == {"host": count, "device": 0}

    def test_the_last_gradient_of_a_step_is_not_kept(self, session: Session) -> None:
        model, optimizer = with_memd(session)
        found = []
        for number in range(2):
            for part in range(3):
                backward(model, 8 * number + part)
                found.append(kept_by(model)._used_bytes)
            optimizer.step()
        size_bytes = sum(-(-each.nbytes // 512) * 512 for each in model.parameters())
        assert found == [0, 0, 0, size_bytes, size_bytes, 0]

    @pytest.mark.parametrize("end", ["step", "zero_grad", "close"])
    def test_what_is_kept_goes(self, session: Session, end: str) -> None:
        model, optimizer = with_memd(session)
        backwards(model, 0, 3)
        optimizer.step()
        backwards(model, 1, 2)
        kept = kept_by(model)
        assert kept._kept
        if end == "close":
            leases_of(model).close()
        else:
            getattr(optimizer, end)()
        assert not kept._kept
        assert not kept._used_bytes


def test_a_sum_that_is_interrupted_leaves_the_gradient_of_before(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease for overwriting need not show it."""
    model, optimizer = with_memd(session)
    backwards(model, 0, 2)
    optimizer.step()
    backward(model, 1)
    before = gradients(model)
    plain, modes = session.leases.gradient, list[int]()

    def gradient(shard: Shard, mode: int) -> Tensor:
        modes.append(mode)
        return plain(shard, mode)

    def interrupt(*args: object) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(Departures, "_copy_out", interrupt)
        patched.setattr(session.leases, "gradient", gradient)
        with pytest.raises(RuntimeError, match="interrupted"):
            backward(model, 2)
    assert modes == [MODE_WRITE]
    assert are_equal(gradients(model), before)
    optimizer.zero_grad()


def test_only_what_fits_is_kept(session: Session) -> None:
    kept = KeptGradients()
    shards = [entry.shard for entry in map(streamed, with_memd(session)[0].parameters()) if entry]
    there = torch.ones(130, device="sim")  # takes 1024 bytes
    kept.lend(2048)
    for shard in shards[:3]:
        kept.keep(shard, there)
    assert [kept.take(shard) is there for shard in shards[:3]] == [True, True, False]
    assert kept.most_bytes == 2048
    for shard in shards[:2]:
        kept.keep(shard, there)
    kept.lend(2048)
    kept.drop(shards[0])
    kept.keep(shards[2], there)
    assert kept.take(shards[2]) is there
    kept.lend(1023)
    assert kept.take(shards[1]) is None
    assert kept.most_bytes == 2048
    kept.lend(0)
    assert kept.most_bytes == 0


def test_nothing_waits_that_does_not_wait_without_memd(session: Session) -> None:
    plain = Plain(build("mlp").to("sim"))
    model, optimizer = with_memd(session)
    waits = []
    for there, clip, step in (
        (plain.model, plain.clip, plain.model.zero_grad),
        (model, optimizer.clip_grad_norm_, optimizer.step),
    ):
        SIM.host_waits()
        before = Counter(session.statistics().waited_for)
        for number in range(STEPS):
            with held_until_waited_for(session, leases_of(model)._departures._thread):
                backwards(there, number, 3)
                clip(NORM)
                step()
        waited_for = Counter(session.statistics().waited_for) - before
        # The host makes the first sums, and a norm of what it has added to waits.
        waits.append((SIM.host_waits(), {**waited_for}))
    assert waits == [({}, {}), ({}, {"gradient": 1})]


def test_the_norm_of_a_sum_is_computed_as_that_leaves(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of its parts."""
    model, optimizer = with_memd(session)
    count = sum(1 for _ in model.parameters())
    counts = Counter[str]()
    plain_back, plain_norm = Departures.bring_back, departed_gradients.norm_of

    def bring_back(*args: Any) -> Tensor:
        counts["back"] += 1
        return plain_back(*args)

    def norm_of(*args: Any) -> Tensor:
        counts["norms"] += 1
        return plain_norm(*args)

    monkeypatch.setattr(Departures, "bring_back", bring_back)
    monkeypatch.setattr(departed_gradients, "norm_of", norm_of)
    found = []
    for number in range(4):
        counts.clear()
        backwards(model, number, 2)
        optimizer.clip_grad_norm_(NORM)
        optimizer.step()
        found.append((counts["back"], counts["norms"]))
    assert found == [(count, count), (count, count), (0, count), (0, count)]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test has memory that others have left."""
    monkeypatch.setitem(MODELS, "deep", Deep)
    gc.collect()
    torch.accelerator.empty_cache()
    yield
    gc.collect()


def training(session: Session) -> Training:
    model = Hungry()
    memd_client.offload(model, session, device="sim", device_bytes=ALL_BYTES)
    return Training(model, session, loop=Loop("accumulated", backwards=2))


@pytest.mark.usefixtures("deep")
class TestMemory:
    @pytest.mark.parametrize("seeds", [2, pytest.param(10, marks=pytest.mark.soak)])
    def test_a_batch_for_which_it_ran_out_is_run_again_with_sums_on_the_host(
        self,
        daemon: Daemon,
        monkeypatch: pytest.MonkeyPatch,
        sums: Counter[str],
        seeds: int,
    ) -> None:
        for seed in range(seeds):
            SIM.seed(seed)
            torch.accelerator.empty_cache()
            with limited(1_800_000), connected(daemon, monkeypatch) as session:
                trained = training(session)
                trained.steps(3)
                made = [sums["device"]]
                trained.step(forward_bytes=1_300_000)
                assert trained.ran_out == [3]
                made.append(sums["device"])
                trained.step()
                made.append(sums["device"])
                trained.steps(20)
                made.append(sums["device"])
                assert 0 < made[0] == made[1] == made[2] < made[3]
                assert trained.is_as_without_memd()
                del trained
                gc.collect()

    def test_what_is_kept_goes_when_it_runs_out_and_gradients_stay(self, session: Session) -> None:
        """The program begins the batch again, which torch would add."""
        with limited(1_800_000):
            trained = training(session)
            trained.steps(3)
            trained.model(batch(0).to("sim")).backward()
            kept = leases_of(trained.model)._departed.kept
            assert kept._kept
            trained.model.take(forward_bytes=2_000_000)
            with suppress(torch.OutOfMemoryError):
                trained.model(batch(1).to("sim"))
                pytest.fail("there was room")
            trained.model.take()
            trained.model(batch(1).to("sim"))
            assert not kept._kept

    def test_where_it_runs_out_for_a_sum_the_host_adds(
        self, session: Session, sums: Counter[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = DepartedGradients.total

        def total(*args: Any) -> Tensor | None:
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            with SIM.limit(0):
                return plain(*args)

        trained = training(session)
        trained.steps(2)
        sums.clear()
        before = torch.accelerator.memory_stats()["num_ooms"]
        with monkeypatch.context() as patched:
            patched.setattr(DepartedGradients, "total", total)
            trained.step()
        assert torch.accelerator.memory_stats()["num_ooms"] == before + 1
        assert sums["host"]
        assert not trained.ran_out
        assert trained.is_as_without_memd()

    def test_where_little_is_free_the_host_adds(self, session: Session, sums: Counter[str]) -> None:
        with limited(700_000):
            trained = training(session)
            trained.steps(2)
            sums.clear()
            trained.steps(3)
            assert sums["host"]
            assert sums["device"]
            assert trained.is_as_without_memd()
